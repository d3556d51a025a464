"""One CUDA graph per step: the same tokens as launch by launch, without a wait or an allocation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from dustin_runtime.audit import Audits, summary
from dustin_runtime.config import LayerHeads, Rest, Selection
from dustin_runtime.engine import Engine
from dustin_runtime.errors import NothingMeasuredError
from dustin_runtime.generation import Draw
from dustin_runtime.guard import Rule
from dustin_runtime.judge import Coefficients
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.policies import POLICIES, make_policy
from dustin_runtime.step import Stepper

pytestmark = pytest.mark.gpu

VOCAB = 997
SHAPES = {
    "llama": ModelShape(
        family="llama", layers=4, hidden=512, ffn=768, query_heads=8, kv_heads=2, head_size=64, vocab=1000, context=4096
    ),
    "qwen3": ModelShape(
        family="qwen3", layers=3, hidden=640, ffn=512, query_heads=5, kv_heads=1, head_size=128, vocab=1024,
        context=4096, tied=True, qk_norm=True,
    ),
    "qwen2": ModelShape(
        family="qwen2", layers=3, hidden=448, ffn=512, query_heads=14, kv_heads=2, head_size=32, vocab=1000,
        context=4096, qkv_bias=True,
    ),
}  # fmt: skip
SELECTION = Selection(
    budget=96,
    sink=4,
    window=16,
    m=30,
    history=LayerHeads(layer=1, heads=(0, 3, 4)),
    lookahead=(LayerHeads(layer=1, heads=(2, 0)), LayerHeads(layer=0, heads=(1, 4))),
    retrieval_heads=((0, 3), (4, 1), (2, 3), (1, 2)),
)
METHODS = list(POLICIES)


@pytest.fixture(scope="module", params=list(SHAPES))
def models(request: pytest.FixtureRequest) -> dict[torch.dtype, Decoder]:
    """A random model in float32 and bfloat16; its first two layers are the draft."""
    return {dtype: random_decoder(SHAPES[request.param], dtype, "cuda") for dtype in (torch.float32, torch.bfloat16)}


def prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 700 tokens."""
    chance = random.Random(0)
    return [[chance.randrange(VOCAB) for _ in range(chance.choice((1, 5, 63, 64, 300, 700)))] for _ in range(count)]


def engine(
    target: Decoder, method: str, graph: bool, rows: int = 8, selection: Selection = SELECTION, **options: object
) -> Engine:
    policy = make_policy(method, selection if POLICIES[method].needs_selection else None)
    window = 48 if POLICIES[method].partial_draft else None
    stepper = Stepper(
        target, target.first_layers(2), policy, policy.selection, 3, VOCAB, draft_budget=window, **options
    )  # type: ignore[arg-type]
    return Engine(stepper, frozenset([11]), rows=rows, graph=graph)


@pytest.mark.parametrize("method", METHODS)
def test_graph_and_eager_give_equal_tokens(models: dict[torch.dtype, Decoder], method: str) -> None:
    asked = prompts(20)
    for model in models.values():
        found = [engine(model, method, graph).generate(asked, 40) for graph in (True, False)]
        assert [g.tokens for g in found[0][0]] == [g.tokens for g in found[1][0]]
        assert found[0][1].tau == found[1][1].tau
        assert found[0][1].kept == pytest.approx(found[1][1].kept)


@pytest.mark.parametrize("method", METHODS)
def test_graph_and_eager_give_equal_tokens_over_an_8_bit_cache(models: dict[torch.dtype, Decoder], method: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    asked = prompts(12)
    for model in models.values():
        found = [
            engine(model, method, graph, kv_dtype=torch.float8_e4m3fn).generate(asked, 30)[0] for graph in (True, False)
        ]
        assert [g.tokens for g in found[0]] == [g.tokens for g in found[1]]


GUARDED = {
    "guard": {"threshold": 0.62},
    "every": {"every": 3},
    "adaptive": {"sizes": (48, 96, 192), "target_arr": 0.7, "threshold": 0.4},
}


def rule(**fields: object) -> Rule:
    by_size = tuple((size, Coefficients(0.1, 0.4, 0.4)) for size in (96, *fields.get("sizes", ())))  # type: ignore[misc]
    return Rule(estimate=by_size, **fields)  # type: ignore[arg-type]


def guarded_engine(target: Decoder, method: str, graph: bool, judge: Rule, rows: int = 8) -> Engine:
    selection = SELECTION
    if judge.sizes:
        selection = SELECTION.model_copy(update={"budget": judge.sizes[-1]})
    policy = replace(make_policy(method, selection), rule=judge)  # type: ignore[call-arg]
    stepper = Stepper(target, target.first_layers(2), policy, policy.selection, 3, VOCAB)
    return Engine(stepper, frozenset([11]), rows=rows, graph=graph)


@pytest.mark.parametrize("method", ["dustin", "dustin-rest"])
@pytest.mark.parametrize("kind", list(GUARDED))
def test_guarded_graph_and_eager_give_equal_tokens(models: dict[torch.dtype, Decoder], method: str, kind: str) -> None:
    asked, judge = prompts(20), rule(**GUARDED[kind])
    for model in models.values():
        found = [guarded_engine(model, method, graph, judge).generate(asked, 40) for graph in (True, False)]
        assert [g.tokens for g in found[0][0]] == [g.tokens for g in found[1][0]]
        assert found[0][1].full == found[1][1].full
        assert found[0][1].kept == pytest.approx(found[1][1].kept)


@pytest.mark.parametrize("method", ["dustin", "dustin-rest"])
def test_a_guard_at_1_equals_vanilla_in_fp32(models: dict[torch.dtype, Decoder], method: str) -> None:
    asked, model = prompts(16), models[torch.float32]
    vanilla = [g.tokens for g in engine(model, "vanilla", True).generate(asked, 40)[0]]
    found, statistics = guarded_engine(model, method, True, rule(threshold=1.0)).generate(asked, 40)
    assert [g.tokens for g in found] == vanilla
    assert statistics.full_share == 1
    plain = engine(model, method, True).generate(asked, 40)[0]
    found, statistics = guarded_engine(model, method, True, rule(threshold=1e-9)).generate(asked, 40)
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert statistics.full_share == 0


@torch.inference_mode()
def test_a_guarded_replay_neither_waits_nor_allocates(models: dict[torch.dtype, Decoder]) -> None:
    served = guarded_engine(models[torch.bfloat16], "dustin", True, rule(**GUARDED["adaptive"]))
    served.generate(prompts(8), 5)
    state = served._state
    assert state is not None
    state.lengths.fill_(300)
    state.active.fill_(True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            served.step(state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("method", ["dustin", "dustin-rest", "h2o"])
def test_audited_graphs_leave_the_text_and_find_what_eager_steps_find(
    models: dict[torch.dtype, Decoder], method: str
) -> None:
    asked = prompts(12)
    for model in models.values():
        plain = engine(model, method, True).generate(asked, 40)[0]
        found = []
        for graph in (True, False):
            served = Engine(
                engine(model, method, graph).stepper, frozenset([11]), rows=8, graph=graph, audits=Audits(0.3, 1)
            )
            generations, statistics = served.generate(asked, 40)
            assert [g.tokens for g in generations] == [g.tokens for g in plain]
            found.append(summary(statistics.audits))
        # A graph is read a step late, so that it audits other steps behind a prompt's end.
        assert found[0] and found[1] and found[0].mean > 0
        assert found[0].mean == pytest.approx(found[1].mean, rel=1.0)


@pytest.mark.parametrize("rest", [Rest(period=1, queries=16), Rest(period=2, queries=1), Rest(period=7, weight=0.5)])
def test_graph_and_eager_give_equal_tokens_for_every_kind_of_rest(
    models: dict[torch.dtype, Decoder], rest: Rest
) -> None:
    asked, chosen = prompts(20), SELECTION.model_copy(update={"rest": rest})
    for model in models.values():
        found = [
            engine(model, "dustin-rest", graph, selection=chosen).generate(asked, 40)[0] for graph in (True, False)
        ]
        assert [g.tokens for g in found[0]] == [g.tokens for g in found[1]]


def test_sampled_graph_and_eager_give_equal_tokens(models: dict[torch.dtype, Decoder]) -> None:
    asked = prompts(12)
    draws = [Draw(0.8 if index % 3 else 0.0, 0.9, index) for index in range(12)]
    for method in ("vanilla", "dustin"):
        found = [
            engine(models[torch.bfloat16], method, graph, sampled=True, nucleus=True).generate(asked, 30, draws=draws)
            for graph in (True, False)
        ]
        assert [g.tokens for g in found[0][0]] == [g.tokens for g in found[1][0]]


def test_full_verification_equals_vanilla_in_fp32(models: dict[torch.dtype, Decoder]) -> None:
    asked, model = prompts(16), models[torch.float32]
    vanilla = [g.tokens for g in engine(model, "vanilla", True).generate(asked, 40)[0]]
    everything = SELECTION.model_copy(update={"budget": 800, "m": 100})
    for method in METHODS[1:]:
        found, statistics = engine(model, method, True, selection=everything).generate(asked, 40)
        assert [g.tokens for g in found] == vanilla, method
        assert statistics.tau > 1, method


def test_a_queue_of_64_prompts_through_8_rows(models: dict[torch.dtype, Decoder]) -> None:
    asked, model = prompts(64), models[torch.float32]
    served = engine(model, "dustin", True, rows=8)
    found, statistics = served.generate(asked, 50)
    alone = engine(model, "dustin", True, rows=1)
    for index in range(0, 64, 7):
        assert alone.generate([asked[index]], 50)[0][0].tokens == found[index].tokens
    assert {g.finished for g in found} <= {"stop", "length"}
    assert statistics.launches < statistics.steps / 5


@pytest.mark.parametrize("method", ["dustin", "dustin-rest-look"])
@torch.inference_mode()
def test_a_replay_neither_waits_nor_allocates(models: dict[torch.dtype, Decoder], method: str) -> None:
    served = engine(models[torch.bfloat16], method, True)
    served.generate(prompts(8), 5)
    state = served._state
    assert state is not None
    state.lengths.fill_(300)
    state.active.fill_(True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            served.step(state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert int(state.lengths.min()) >= 305


def test_sparse_verification_of_everything_is_close_to_dense_in_bf16(models: dict[torch.dtype, Decoder]) -> None:
    """Where the two choose different tokens, the model was undecided between them (a near tie)."""
    model = models[torch.bfloat16]
    asked = [prompt for prompt in prompts(40) if len(prompt) == 700][:4]
    logits: dict[str, torch.Tensor] = {}
    everything = SELECTION.model_copy(update={"budget": 900, "m": 100})
    for method in ("sd", "dustin"):
        kept: list[torch.Tensor] = []
        served = engine(model, method, True, selection=everything)
        served.generate(asked, 2, on_step=lambda result, _, kept=kept: kept.append(result.logits[:, 0].float().clone()))
        logits[method] = kept[0]
    gap = (logits["sd"] - logits["dustin"]).abs().max()
    assert gap < 0.06 * logits["sd"].std()
    top = logits["sd"].topk(2).values
    decided = top[:, 0] - top[:, 1] > 2 * gap
    assert torch.equal(logits["sd"].argmax(1)[decided], logits["dustin"].argmax(1)[decided])


def test_what_is_not_finite_names_prompt_and_layer(models: dict[torch.dtype, Decoder]) -> None:
    model = models[torch.float32]
    kept = model.weights.layers[1].down.clone()

    def spoil(index: int, tokens: list[int]) -> bool:
        model.weights.layers[1].down[0] = float("inf")
        return False

    try:
        with pytest.raises(NothingMeasuredError, match=r"prompt 0: logits are not finite after .* from layer 1 on"):
            engine(model, "sd", True).generate(prompts(8)[:1], 30, on_tokens=spoil)
    finally:
        model.weights.layers[1].down.copy_(kept)
