"""The same on a GPU as on the CPU: logits, text, kept tokens, traces, scores of heads, whole commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import SEARCH, dustin_profile, dustin_run
from tiny_pair import TinyPair

from dustin_profile.encoder import PlainEncoder
from dustin_profile.prompts import Sample
from dustin_profile.srh.score import Prober
from dustin_profile.texts import topics
from dustin_profile.traces.collect import Collector, Prompted, TraceSettings
from dustin_profile.traces.windows import Windows
from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.scoring import attention_scores
from dustin_runtime.attention.sparse import SparseAttention
from dustin_runtime.config import LayerHeads, Selection
from dustin_runtime.engine import Engine
from dustin_runtime.errors import CapacityError
from dustin_runtime.loading import Pair, open_pair, pick_device, pick_dtype
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.policies import POLICIES, make_policy
from dustin_runtime.selection import select
from dustin_runtime.step import Stepper

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SELECTION = Selection(
    budget=48,
    sink=4,
    window=8,
    m=12,
    history=LayerHeads(layer=2, heads=(1, 5)),
    lookahead=(LayerHeads(layer=1, heads=(0, 3)), LayerHeads(layer=2, heads=(2,))),
    retrieval_heads=((0, 3), (5, 1), (2, 3), (1, 2)),
)


@pytest.fixture(scope="module")
def pair(tiny_pair: TinyPair) -> Pair:
    return open_pair(str(tiny_pair.target), str(tiny_pair.draft), offline=True)


@pytest.fixture(scope="module")
def models(pair: Pair) -> dict[str, tuple[Decoder, Decoder]]:
    """Target and draft in float32 by device."""
    found = {}
    for device in ("cpu", DEVICE):
        target = pair.load_target(torch.float32, device)
        found[device] = target, pair.load_draft(target)
    return found


@pytest.fixture(scope="module")
def prompts(pair: Pair) -> list[list[int]]:
    ids = PlainEncoder(pair.tokenizer)(topics()[:20_000])
    return [ids[:300], ids[1000:1137], ids[2000:2001], ids[3000:3700]]


def texts(
    models: tuple[Decoder, Decoder], prompts: list[list[int]], method: str, selection: Selection
) -> list[list[int]]:
    policy = make_policy(method, selection)
    stepper = Stepper(*models, policy, policy.selection, 4, 1990)
    generations, statistics = Engine(stepper).generate(prompts, 40)
    if policy.selection and selection is SELECTION:
        assert statistics.kept <= 48
    return [generation.tokens for generation in generations]


@torch.inference_mode()
def test_logits_equal_the_cpus(models: dict[str, tuple[Decoder, Decoder]], prompts: list[list[int]]) -> None:
    kept = torch.arange(0, 200, 7).view(1, 1, 1, -1)
    for side in (0, 1):
        found = {}
        for device in ("cpu", DEVICE):
            model = models[device][side]
            assert model.weights.head.device.type == device
            cache = model.cache(1, 300)
            ids = torch.tensor([prompts[0]], device=device)
            start = torch.zeros(1, dtype=torch.long, device=device)
            whole = model.logits(model.forward(ids[:, :290], start, cache, dense_attention))
            sparse = SparseAttention(kept.to(device))
            last = model.logits(model.forward(ids[:, 290:], start + 290, cache, sparse))
            found[device] = whole.cpu(), last.cpu()
        for one, other in zip(found["cpu"], found[DEVICE], strict=True):
            torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)


@torch.inference_mode()
def test_scores_and_kept_tokens_equal_the_cpus() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(3, 4, 2, 16, generator=generator), torch.randn(3, 600, 2, 16, generator=generator)
    position = torch.tensor([[200, 201, 202, 203], [500, 501, 502, 503], [10, 11, 12, 13]])
    scores = [
        attention_scores(x, y, [1, 5], 3, p)
        for x, y, p in ((q, k, position), (q.to(DEVICE), k.to(DEVICE), position.to(DEVICE)))
    ]
    torch.testing.assert_close(scores[0], scores[1].cpu(), atol=1e-6, rtol=1e-5)
    history, lookahead = ((torch.rand(3, 600, generator=generator) * 20).floor() / 20 for _ in range(2))  # many ties
    lengths = torch.tensor([200, 600, 10])
    for m in (0, 12, 36):
        kept = [
            select(lookahead.to(device), history.to(device), lengths.to(device), budget=48, m=m, sink=4, window=8).cpu()
            for device in ("cpu", DEVICE)
        ]
        assert torch.equal(kept[0], kept[1])


def test_speculative_decoding_and_a_budget_of_everything_equal_vanilla(
    models: dict[str, tuple[Decoder, Decoder]], prompts: list[list[int]]
) -> None:
    vanilla = texts(models[DEVICE], prompts, "vanilla", SELECTION)
    assert vanilla == texts(models["cpu"], prompts, "vanilla", SELECTION)
    assert texts(models[DEVICE], prompts, "sd", SELECTION) == vanilla
    everything = SELECTION.model_copy(update={"budget": 800, "m": 100})
    for method in (name for name, policy in POLICIES.items() if policy.needs_selection):
        assert texts(models[DEVICE], prompts, method, everything) == vanilla, method


def test_a_budget_of_everything_equals_vanilla_over_an_8_bit_cache(
    models: dict[str, tuple[Decoder, Decoder]], prompts: list[list[int]]
) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    everything = SELECTION.model_copy(update={"budget": 800, "m": 100})
    found = {}
    for method in POLICIES:
        policy = make_policy(method, everything)
        stepper = Stepper(*models[DEVICE], policy, policy.selection, 4, 1990, kv_dtype=torch.float8_e4m3fn)
        found[method] = [generation.tokens for generation in Engine(stepper).generate(prompts, 40)[0]]
    assert all(text == found["vanilla"] for text in found.values())


def test_sparse_text_equals_the_cpus(models: dict[str, tuple[Decoder, Decoder]], prompts: list[list[int]]) -> None:
    for method in ("dustin", "streaming"):
        found = [texts(models[device], prompts, method, SELECTION) for device in ("cpu", DEVICE)]
        assert found[0] == found[1], method


@pytest.mark.parametrize("lookahead", ["trajectory", "proposals"])
def test_traces_are_close_to_the_cpus(
    models: dict[str, tuple[Decoder, Decoder]], prompts: list[list[int]], lookahead: str
) -> None:
    found = []
    for device in ("cpu", DEVICE):
        collector = Collector(
            *models[device],
            history={layer: [0, 4] for layer in range(4)},
            evaluation={layer: [1, 2, 5] for layer in range(4)},
            lookahead={layer: [3, 1] for layer in range(3)},
            settings=TraceSettings(24, 6, 4, 5, lookahead),  # type: ignore[arg-type]
            shared_vocab=1990,
            stop_ids=frozenset(),
            capacity=800,
        )
        found.append(collector.trace("d", prompts[3]))
    for field in ("prefix", "truth", "tail", "history", "lookahead"):
        one, other = (getattr(windows, field) for windows in found)
        assert other.device.type == "cpu"
        torch.testing.assert_close(one.float(), other.float(), atol=2e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_documents_traces_do_not_depend_on_those_continued_with_it(
    pair: Pair, prompts: list[list[int]], dtype: torch.dtype
) -> None:
    """To the bit, for a resumed run finds other documents left to do; the last group has an idle row."""
    target = pair.load_target(dtype, DEVICE)
    collector = Collector(
        target,
        pair.load_draft(target),
        history={layer: [0, 4] for layer in range(4)},
        evaluation={layer: [1, 2, 5] for layer in range(4)},
        lookahead={layer: [3, 1] for layer in range(3)},
        settings=TraceSettings(40, 6, 4, 4),
        shared_vocab=1990,
        stop_ids=frozenset(),
        capacity=800,
        rows=2,
    )
    asked = [Prompted(str(index), prompts[index]) for index in (0, 1, 3)]
    found = {one.document: one for one in collector.trace_all(asked[::-1])}
    first = {one.document: one for one in collector.trace_all(asked)}
    for name, windows in first.items():
        assert isinstance(windows, Windows) and len(windows.text) == 40
        for field, value in vars(windows).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, getattr(found[name], field)), (name, field)


@pytest.mark.parametrize("mode", ["forced", "generate"])
def test_head_scores_are_close_to_the_cpus(
    models: dict[str, tuple[Decoder, Decoder]], prompts: list[list[int]], mode: str
) -> None:
    sample = Sample(0, 700, 0.5, prompts[3], tuple(range(300, 308)), prompts[3][300:308], 290)
    scores = []
    for device in ("cpu", DEVICE):
        prober = Prober(
            models[device][0],
            mode=mode,  # type: ignore[arg-type]
            decode=str,
            accept=lambda text, needle: True,
            stop=lambda tokens: False,
            vocab=1990,
            capacity=720,
            steps=8,
        )
        scores.append(prober.score(sample))
        again = prober.score(sample)  # on a cache that holds it already
        assert torch.equal(again.copies, scores[-1].copies)
    assert scores[0].response == scores[1].response
    torch.testing.assert_close(scores[0].span, scores[1].span, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompts_scores_do_not_depend_on_those_continued_with_it(
    pair: Pair, prompts: list[list[int]], dtype: torch.dtype
) -> None:
    texts = [prompts[3] * 3, prompts[3] * 2 + prompts[0], prompts[0] * 5]  # two share whole chunks
    asked = [Sample(i, len(ids), 0.5, ids, tuple(range(300, 308)), ids[300:308], 290) for i, ids in enumerate(texts)]
    prober = Prober(
        pair.load_target(dtype, DEVICE),
        mode="generate",
        decode=str,
        accept=lambda text, needle: True,
        stop=lambda tokens: False,
        vocab=1990,
        capacity=2200,
        steps=20,
        rows=2,
    )
    groups = [[0, 1], [2], [2, 0], [1], [1, 2], [0]]
    scores = [
        (index, score)
        for group in groups
        for index, score in zip(group, prober.score_all([asked[i] for i in group]), strict=True)
    ]
    for index, score in scores:
        first = next(other for number, other in scores if number == index)
        assert score.response == first.response
        assert torch.equal(score.span, first.span) and torch.equal(score.copies, first.copies)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_whole_commands(tiny_pair: TinyPair, tmp_path: Path, dtype: str) -> None:
    models = [*tiny_pair.options[:-1], DEVICE, "--dtype", dtype]
    searched = dustin_profile("search", *models, "--run-dir", tmp_path, *SEARCH, "--json")
    assert searched.code == 0, searched.err
    results = json.loads(searched.out)
    assert results["traces"]["dtype"] == ("bfloat16" if dtype == "auto" else dtype)
    assert torch.cuda.get_device_name() == results["provenance"]["device"]
    checked = dustin_profile("check", tmp_path, "--baseline", tmp_path / "results.json", *models)
    assert checked.code == 0, checked.err
    served = ["generate", "Some text.", "--config", tmp_path, *models, "--max-new-tokens", 20, "--compare", "vanilla"]
    assert dustin_run(*served, "--json").code == 0
    texts = ("--context", 64, "--documents", 3, "--tokens", 8, "--batch", 2, "--method", "sd", "--method", "dustin")
    for name, options in (("greedy", ()), ("sampled", ("--temperature", 1))):
        drift = dustin_profile("drift", tmp_path, *models, *texts, "--run-dir", tmp_path / name, *options, "--json")
        assert drift.code == 0, drift.err
        if dtype == "float32":
            assert json.loads(drift.out)["summary"]["sd"]["kl"]["mean"] < 1e-5


def test_devices_are_counted() -> None:
    assert pick_device("auto") == "cuda"
    assert pick_dtype("auto", "cuda:0") == torch.bfloat16
    with pytest.raises(CapacityError, match=r"^--device cuda:99: \d+ CUDA devices are available; use --device cpu$"):
        pick_device("cuda:99")
