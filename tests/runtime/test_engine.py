"""Speculative decoding emits the target's own text; Dustin with a budget that covers everything does too."""

from __future__ import annotations

import pytest
import torch

from dustin_runtime.acceptance import rate_for
from dustin_runtime.attention.dense import FullAttention
from dustin_runtime.attention.scoring import ScoredHeads
from dustin_runtime.config import LayerHeads, Selection
from dustin_runtime.engine import Engine
from dustin_runtime.errors import CapacityError, NothingMeasuredError, UsageError
from dustin_runtime.generation import Draw, Generation
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.policies import POLICIES, make_policy
from dustin_runtime.prompt_store import PromptStore
from dustin_runtime.selection import select
from dustin_runtime.step import Stepper

SHAPE = ModelShape(
    family="llama",
    layers=4,
    hidden=48,
    ffn=64,
    query_heads=6,
    kv_heads=2,
    head_size=8,
    vocab=40,
    context=256,
    tied=True,
)
PROMPTS = [[1, 5, 9, 30, 2], list(range(39)), [7], [3, 3, 8] * 20]


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder(SHAPE, torch.float64, "cpu", seed=1)


def selection(budget: int, m: int, sink: int = 2, window: int = 4) -> Selection:
    return Selection(
        budget=budget,
        sink=sink,
        window=window,
        m=m,
        history=LayerHeads(layer=2, heads=(1, 5)),
        lookahead=(LayerHeads(layer=1, heads=(0, 4)), LayerHeads(layer=0, heads=(2,))),
        retrieval_heads=((0, 3), (5, 1), (2, 3), (1, 2)),
    )


def run(target: Decoder, method: str, chosen: Selection | None = None, depth: int = 3, new: int = 30, vocab: int = 37):
    policy = make_policy(method, chosen)
    stepper = Stepper(target, target.first_layers(3), policy, policy.selection, depth, vocab)
    return Engine(stepper).generate(PROMPTS, new)


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_speculative_decoding_equals_vanilla_token_for_token(target: Decoder, depth: int) -> None:
    vanilla, plain = run(target, "vanilla")
    speculative, fast = run(target, "sd", depth=depth)
    assert [g.tokens for g in speculative] == [g.tokens for g in vanilla]
    assert all(len(g.tokens) == 30 and g.finished == "length" for g in vanilla)
    assert max(max(g.tokens) for g in vanilla) < 37
    assert plain.tau == 1
    assert fast.tau > 1.1
    assert fast.steps < plain.steps
    assert fast.acceptance == sorted(fast.acceptance, reverse=True)


@pytest.mark.parametrize("method", [name for name, policy in POLICIES.items() if policy.needs_selection])
def test_a_budget_of_everything_equals_full_verification(target: Decoder, method: str) -> None:
    vanilla, _ = run(target, "vanilla")
    everything, statistics = run(target, method, selection(budget=200, m=50))
    assert [g.tokens for g in everything] == [g.tokens for g in vanilla]
    assert statistics.kept < 200


@pytest.mark.parametrize("method", ["dustin", "dustin-t", "dustin-d", "streaming"])
def test_a_small_budget_is_respected_and_changes_the_text(target: Decoder, method: str) -> None:
    vanilla, _ = run(target, "vanilla")
    sparse, statistics = run(target, method, selection(budget=12, m=3))
    assert statistics.kept <= 12
    assert [g.tokens for g in sparse] != [g.tokens for g in vanilla]


@pytest.mark.parametrize(("method", "passes"), [("dustin", 3), ("dustin-look", 4)])
def test_scores_of_a_step_are_those_of_the_full_attention_matrix(target: Decoder, method: str, passes: int) -> None:
    """History: the row of the last processed token. Lookahead: rows of the pending token and the drafts, summed, of
    all but the last draft unless the method looks there too."""
    chosen, seen = selection(budget=14, m=4), []

    class Spy(POLICIES[method]):  # type: ignore[misc]
        def verification(self, signals):
            seen.append((signals.lengths.clone(), signals.history().clone(), signals.lookahead().clone()))
            return FullAttention()  # so that a dense pass over the emitted text has the same keys

    draft = target.first_layers(3)
    stepper = Stepper(target, draft, Spy(chosen), chosen, 3, 40)
    drafted = []
    original = stepper.draft_tokens

    def keep(state, signals):
        found = original(state, signals)
        drafted.append(found[0])
        return found

    stepper.draft_tokens = keep
    (generation,), _ = Engine(stepper).generate([PROMPTS[3]], 20)
    text = PROMPTS[3] + generation.tokens

    def row(model: Decoder, ids: list[int], layer: int, head: int, position: int) -> torch.Tensor:
        captured = {}

        def spy(at, q, k, v, start):
            captured[at] = (q, k)
            from dustin_runtime.attention.dense import dense_attention

            return dense_attention(at, q, k, v, start)

        model.forward(torch.tensor([ids]), torch.zeros(1, dtype=torch.long), model.cache(1, len(ids)), spy)
        q, k = captured[layer]
        return (q[0, position, head] @ k[0, : position + 1, head // 3].T * 8**-0.5).softmax(-1).float()

    with torch.inference_mode():
        for (lengths, history, lookahead), draft_tokens in list(zip(seen, drafted, strict=True))[:4]:
            n = int(lengths[0])
            want = sum(row(target, text[:n], 2, head, n - 1) for head in (1, 5))
            torch.testing.assert_close(history[0, :n], want, rtol=1e-5, atol=1e-6)
            ids = text[: n + 1] + draft_tokens[0].tolist()
            want = torch.zeros(n)
            for layer, head in ((1, 0), (1, 4), (0, 2)):
                for position in range(n, n + passes):
                    want += row(draft, ids, layer, head, position)[:n]
            torch.testing.assert_close(lookahead[0, :n], want, rtol=1e-5, atol=1e-6)
            kept = select(lookahead, history, lengths, budget=14, m=4, sink=2, window=4)
            assert kept.shape == (1, 14)


@pytest.mark.parametrize("depth", [1, 3, 6])
@pytest.mark.parametrize("method", ["dustin", "dustin-look"])
def test_a_ring_of_first_and_last_tokens_holds_all_that_a_step_reads(target: Decoder, method: str, depth: int) -> None:
    """Also behind a look, which writes one position more than the drafts do."""
    layers = (LayerHeads(layer=0, heads=(2,)), LayerHeads(layer=1, heads=(0, 4)))  # as the kept keys are numbered
    chosen = selection(budget=14, m=4).model_copy(update={"lookahead": layers})

    class Whole(POLICIES[method]):  # type: ignore[misc]
        def draft_keeps(self, budget):
            return None

    found = []
    for policy in (POLICIES[method](chosen), Whole(chosen)):
        stepper = Stepper(target, target.first_layers(3), policy, chosen, depth, 37, draft_budget=9)
        generations, _ = Engine(stepper).generate(PROMPTS, 40)
        found.append([(one.tokens, one.accepted) for one in generations])
    assert found[0] == found[1]


def test_scores_are_computed_at_every_call(target: Decoder) -> None:
    """The benchmark times them so."""
    chosen, seen = selection(budget=14, m=4), []

    class Twice(POLICIES["dustin"]):  # type: ignore[misc]
        def select(self, signals):
            seen.append([(signals.history(), signals.lookahead()) for _ in range(2)])
            return super().select(signals)

    Engine(Stepper(target, target.first_layers(3), Twice(chosen), chosen, 3, 40)).generate([PROMPTS[0]], 2)
    for first, second in seen:
        for ours, theirs in zip(first, second, strict=True):
            assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()


def test_stop_tokens_end_a_row_and_are_its_last(target: Decoder) -> None:
    vanilla, _ = run(target, "vanilla")
    stop = vanilla[1].tokens[7]
    stepper = Stepper(target, target.first_layers(3), make_policy("sd", None), None, 3, 37)
    stopped, _ = Engine(stepper, frozenset([stop])).generate(PROMPTS, 30)
    for full, cut in zip(vanilla, stopped, strict=True):
        end = full.tokens.index(stop) + 1 if stop in full.tokens else 30
        assert cut.tokens == full.tokens[:end]
        assert cut.finished == ("stop" if stop in full.tokens else "length")


def test_a_row_of_a_batch_is_not_disturbed_by_the_others(target: Decoder) -> None:
    batch, _ = run(target, "dustin", selection(budget=16, m=5))
    for prompt, generation in zip(PROMPTS, batch, strict=True):
        policy = make_policy("dustin", selection(budget=16, m=5))
        stepper = Stepper(target, target.first_layers(3), policy, policy.selection, 3, 37)
        (alone,), _ = Engine(stepper).generate([prompt], 30)
        assert alone.tokens == generation.tokens


def test_what_cannot_run_is_refused(target: Decoder) -> None:
    with pytest.raises(CapacityError, match="prompt 1 with its output: 269 tokens exceed"):
        run(target, "vanilla", new=230)
    stepper = Stepper(target, None, make_policy("vanilla", None), None, 0, 37)
    with pytest.raises(UsageError, match="prompt 0: is empty"):
        Engine(stepper).generate([[]], 4)
    with pytest.raises(UsageError, match="needs --config"):
        make_policy("dustin", None)
    with pytest.raises(UsageError, match="unknown"):
        make_policy("dustn", None)


def test_what_is_not_finite_is_refused_and_says_where(target: Decoder) -> None:
    broken = random_decoder(SHAPE, torch.float32, "cpu")

    def spoil(*_: object) -> bool:
        broken.weights.layers[1].down[0, 0] = float("nan")
        return False

    stepper = Stepper(broken, broken.first_layers(1), make_policy("sd", None), None, 3, 37)
    with pytest.raises(
        NothingMeasuredError, match="prompt 0: logits are not finite after 1 tokens, from layer 1 on; try"
    ):
        Engine(stepper).generate(PROMPTS[:1], 30, on_tokens=spoil)
    with pytest.raises(
        NothingMeasuredError, match="prompt 0: what the target makes of it is not finite, from layer 1 on"
    ):
        run(broken, "sd")
    stepper = Stepper(target, broken, make_policy("sd", None), None, 3, 37)
    with pytest.raises(NothingMeasuredError, match="prompt 0: what the draft makes of it is not finite"):
        Engine(stepper).generate(PROMPTS, 30)
    broken.weights.layers[1].down.nan_to_num_()
    broken.weights.head[3] = float("inf")
    with pytest.raises(NothingMeasuredError, match="prompt 0: what the target makes of it is not finite, in its head"):
        run(broken, "vanilla")


STOP = frozenset([0, 15])


def queue(target: Decoder, method: str, rows: int, **stepper_options) -> tuple:
    """16 prompts of different lengths through `rows` rows."""
    prompts = [PROMPTS[index % 4] + [index] * (index % 5) for index in range(16)]
    policy = make_policy(method, selection(budget=16, m=5))
    stepper = Stepper(target, target.first_layers(3), policy, policy.selection, 3, 37, **stepper_options)
    return prompts, Engine(stepper, STOP, rows=rows)


@pytest.mark.parametrize("method", ["vanilla", "dustin", "magicdec", "triforce"])
def test_a_queue_gives_every_prompt_the_text_it_has_alone(target: Decoder, method: str) -> None:
    prompts, engine = queue(target, method, rows=3, draft_budget=16 if POLICIES[method].partial_draft else None)
    together, statistics = engine.generate(prompts, 20)
    state = engine._state
    again, _ = engine.generate(prompts[:9], 20)
    assert engine._state is state  # buffers are kept
    _, alone = queue(target, method, 1, draft_budget=16 if POLICIES[method].partial_draft else None)
    for prompt, generation in zip(prompts, together, strict=True):
        (single,), _ = alone.generate([prompt], 20)
        assert single.tokens == generation.tokens
        assert generation.finished == ("stop" if generation.tokens[-1] in STOP else "length")
    assert [g.tokens for g in again] == [g.tokens for g in together[:9]]
    assert {g.finished for g in together} == {"stop", "length"}
    assert statistics.launches < statistics.steps
    assert sum(g.steps for g in together) == statistics.steps
    assert sum(g.accepted for g in together) == sum(statistics.accepted_at)
    assert sum(g.read for g in together) == pytest.approx(statistics.read)


@pytest.mark.parametrize("method", ["magicdec", "triforce"])
def test_a_partial_draft_changes_drafts_and_not_the_text(target: Decoder, method: str) -> None:
    vanilla, _ = run(target, "vanilla")
    policy = make_policy(method, None)
    stepper = Stepper(target, target.first_layers(3), policy, None, 3, 37, draft_budget=8)
    windowed, statistics = Engine(stepper).generate(PROMPTS, 30)
    assert [g.tokens for g in windowed] == [g.tokens for g in vanilla]
    _, full = run(target, "sd")
    assert statistics.tau != full.tau


@pytest.mark.parametrize("method", ["dustin", "specattn"])
@pytest.mark.parametrize("budget", [6, 13, 300])
def test_a_windowed_draft_cache_keeps_all_that_is_read(target: Decoder, budget: int, method: str) -> None:
    """The same text, drafts and scores as from a draft that keeps everything and reads the same tokens."""
    found = []
    for keeps_all in (False, True):
        policy = make_policy(method, selection(budget=16, m=5))
        draft = target.first_layers(3)
        stepper = Stepper(target, draft, policy, policy.selection, 3, 37, draft_budget=budget)
        if keeps_all:
            stepper._draft_caches = lambda rows, capacity: (target.first_layers(3).cache(rows, capacity), None)
            heads = policy.lookahead_heads(draft.shape)
            stepper.lookahead_heads = ScoredHeads(heads, SHAPE.query_heads, SHAPE.group, "cpu")
        engine = Engine(stepper, rows=2)
        generations, statistics = engine.generate(PROMPTS, 60)
        found.append(([g.tokens for g in generations], statistics.accepted_at))
        assert (engine._state.draft_cache.keys.shape[2] == budget + 5) != keeps_all
    assert found[0] == found[1]


def test_sampling_depends_on_the_seed_and_not_on_the_batch(target: Decoder) -> None:
    draws = [Draw(0.9, 0.8, seed) if seed % 3 else Draw() for seed in range(16)]
    found = []
    for rows in (1, 5, 16):
        prompts, engine = queue(target, "sd", rows, sampled=True, nucleus=True)
        found.append([g.tokens for g in engine.generate(prompts, 20, draws=draws)[0]])
    assert found[0] == found[1] == found[2]
    prompts, engine = queue(target, "sd", 4, sampled=True, nucleus=True)
    others = [Draw(d.temperature, d.top_p, d.seed + 100) for d in draws]
    different = [g.tokens for g in engine.generate(prompts, 20, draws=others)[0]]
    greedy = [g.tokens for g in queue(target, "vanilla", 16)[1].generate(prompts, 20)[0]]
    for index in range(16):
        if index % 3:
            assert different[index] != found[0][index]
        else:
            assert different[index] == found[0][index] == greedy[index]
    with pytest.raises(UsageError, match="built for greedy decoding"):
        queue(target, "sd", 4)[1].generate(prompts, 20, draws=draws)


def test_forced_acceptance_has_the_rate_it_is_given(target: Decoder) -> None:
    policy = make_policy("sd", None)
    stepper = Stepper(target, target.first_layers(1), policy, None, 3, 37, forced_rate=rate_for(2.2, 3))
    engine = Engine(stepper)
    draws = [Draw(seed=index) for index in range(40)]
    _, statistics = engine.generate([PROMPTS[0]] * 40, 60, draws=draws)
    assert statistics.tau == pytest.approx(2.2, rel=0.03)


def test_an_interruption_delivers_what_has_ended(target: Decoder) -> None:
    prompts, engine = queue(target, "sd", rows=2)
    full, _ = engine.generate(prompts, 20)

    def interrupt(index: int, tokens: list[int]) -> bool:
        if index == 4:
            raise KeyboardInterrupt
        return False

    found, statistics = engine.generate(prompts, 20, on_tokens=interrupt)
    assert statistics.interrupted
    ended = [index for index, generation in enumerate(found) if generation.finished]
    assert 0 < len(ended) < len(prompts)
    for index in ended:
        assert found[index].tokens == full[index].tokens
    again, statistics = engine.generate(prompts, 20)  # and the engine still serves
    assert [g.tokens for g in again] == [g.tokens for g in full]
    assert not statistics.interrupted


def test_an_engine_serves_on_after_an_error(target: Decoder) -> None:
    """Rows that a broken run left active are not stepped on by the next."""
    prompts, engine = queue(target, "sd", rows=2)
    full, _ = engine.generate(prompts, 20)

    def fail(index: int, tokens: list[int]) -> bool:
        if index == 3:
            raise ValueError
        return False

    with pytest.raises(ValueError):
        engine.generate(prompts, 20, on_tokens=fail)
    for _ in range(3):
        again, _ = engine.generate(prompts[:2], 20)
        assert [g.tokens for g in again] == [g.tokens for g in full[:2]]
    assert not engine._state.active.any()


@pytest.mark.parametrize("method", list(POLICIES))
@pytest.mark.parametrize("draft_budget", [None, 24])
def test_prompts_that_another_engine_has_processed_give_the_same(
    target: Decoder, method: str, draft_budget: int | None
) -> None:
    policy = make_policy(method, selection(budget=16, m=5))
    store = PromptStore(max(policy.prompt_queries for policy in POLICIES.values()), mass=True)
    prompts = [list(range(39)) * 4, [3, 3, 8] * 20, [7]]

    def run(shared: PromptStore | None) -> list[Generation]:
        budget = draft_budget or (12 if policy.partial_draft else None)
        stepper = Stepper(target, target.first_layers(3), policy, policy.selection, 3, 37, draft_budget=budget)
        return Engine(stepper, rows=2, prompts=shared).generate(prompts, 12)[0]

    assert run(store) == run(store) == run(None)
