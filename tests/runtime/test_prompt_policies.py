"""Baselines against brute force: the sets that their published rules choose on small random tensors, ties included."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dustin_runtime import method_names
from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.tap import QueryTap
from dustin_runtime.cache import KVCache
from dustin_runtime.config import LayerHeads, Selection
from dustin_runtime.engine import Engine
from dustin_runtime.errors import ConfigError
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.policies import POLICIES, make_policy
from dustin_runtime.policies.base import Prompted
from dustin_runtime.policies.compresskv import CompressKV
from dustin_runtime.policies.prompt_lists import PromptLists
from dustin_runtime.policies.quest import DENSE_LAYERS, PAGE, PageBounds, QuestAttention
from dustin_runtime.policies.snapkv import choose_tokens, window_mass
from dustin_runtime.prefill import prefill
from dustin_runtime.signals import StepSignals
from dustin_runtime.step import Stepper

KV_HEADS, GROUP, SIZE = 2, 3, 8
SHAPE = ModelShape(
    family="llama", layers=4, hidden=48, ffn=64, query_heads=6, kv_heads=2, head_size=8, vocab=40, context=512,
    tied=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder(SHAPE, torch.float64, "cpu", seed=1)


def random(*size: int, seed: int = 0, steps: int | None = None) -> Tensor:
    """Normal numbers; rounded to a grid of 1 / steps, which makes ties."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return x if steps is None else (x * steps).round() / steps


def kept(positions: Tensor) -> list[int]:
    """Positions of a list, which must ascend with -1 at its end."""
    found = [p for p in positions.tolist() if p >= 0]
    assert found == sorted(set(found)) and positions.tolist() == found + [-1] * (len(positions) - len(found))
    return found


# --- SnapKV


@pytest.mark.parametrize("pooling", ["max", "mean"])
@pytest.mark.parametrize(("length", "window", "kernel", "budget"), [(60, 8, 5, 20), (33, 32, 7, 40), (90, 4, 3, 90)])
def test_snapkv_keeps_what_its_rule_says(length: int, window: int, kernel: int, budget: int, pooling: str) -> None:
    q, k = random(1, window, KV_HEADS * GROUP, SIZE, steps=2), random(1, length, KV_HEADS, SIZE, seed=1, steps=2)
    found = choose_tokens(window_mass(q, k), window, budget, kernel, pooling)  # type: ignore[arg-type]
    for kv_head in range(KV_HEADS):
        mass = torch.zeros(length - window)
        for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
            for place in range(window):
                seen = length - window + place + 1
                row = (q[0, place, head] @ k[0, :seen, kv_head].T / math.sqrt(SIZE)).softmax(-1)
                mass += row[: length - window] / GROUP
        pooled = []
        for at in range(len(mass)):
            around = mass[max(at - kernel // 2, 0) : at + kernel // 2 + 1]
            pooled.append(float(around.max() if pooling == "max" else around.sum() / kernel))
        order = sorted(range(len(pooled)), key=lambda at: (-round(pooled[at], 5), at))
        want = set(order[: budget - window]) | set(range(length - window, length))
        chosen = kept(found[0, kv_head])
        # A max pool makes many equal values, whose last bits differ between the two ways to compute them.
        if pooling == "mean":
            assert set(chosen) == want
        assert len(chosen) == min(budget, length)
        worst = min(pooled[p] for p in chosen if p < length - window)
        assert all(pooled[p] <= worst + 1e-5 for p in range(length - window) if p not in chosen)
        assert set(range(length - window, length)) <= set(chosen)


def test_of_equal_tokens_the_first_are_kept() -> None:
    assert kept(choose_tokens(torch.ones(1, 1, 20), 3, 7, 1, "max")[0, 0]) == [0, 1, 2, 3, 20, 21, 22]


def test_a_budget_below_the_window_keeps_its_last_tokens() -> None:
    assert kept(choose_tokens(torch.ones(1, 1, 20), 8, 5, 5, "mean")[0, 0]) == [23, 24, 25, 26, 27]


@pytest.mark.parametrize("length", [1, 5, 40, 511])
def test_prompts_are_compressed_once_and_what_follows_is_kept(target: Decoder, length: int) -> None:
    """From a chunked prefill: the last chunk is long enough for the window."""
    policy = make_policy("snapkv-8", selection(24))
    cache = target.cache(1, 600)
    tap = QueryTap(dense_attention, range(4), last=8)
    ids = [(7 * at) % 37 for at in range(length)]
    prefill(target, cache, ids, attend=tap, chunk=32, tail=8)
    whole = QueryTap(dense_attention, range(4))
    prefill(target, target.cache(1, 600), ids, attend=whole, chunk=1024)
    memory = policy.memory(target, 3, 2, 600)
    assert isinstance(memory, PromptLists)
    memory.admit(1, Prompted(length, cache, tap.queries), None)
    lengths = torch.tensor([1, length + 5])
    lists = memory.lists(lengths)
    for layer in range(4):
        want = whole.queries[layer][:, -8:]
        torch.testing.assert_close(tap.queries[layer], want)
        prompt = choose_tokens(window_mass(want, cache.keys[layer, :, :length]), min(length, 8), 24, 5, "mean")
        for kv_head in range(2):
            chosen = kept(lists[layer, 1, kv_head])
            assert chosen == kept(prompt[0, kv_head]) + list(range(length, length + 5))


def test_the_first_and_the_last_eight_of_a_prompt(target: Decoder) -> None:
    policy = make_policy("streaming-prompt", selection(20))
    memory = policy.memory(target, 3, 1, 100)
    assert isinstance(memory, PromptLists)
    queries = {layer: random(1, 1, 6, 8) for layer in range(4)}
    memory.admit(0, Prompted(60, target.cache(1, 100), queries), None)
    assert kept(memory.lists(torch.tensor([62]))[3, 0, 1]) == [*range(12), *range(52, 62)]


# --- CompressKV


@pytest.mark.parametrize("steps", [None, 1])
@pytest.mark.parametrize(("length", "heads", "budget"), [(60, (0, 4), 20), (9, (5,), 9), (5, (1, 2, 3), 40)])
def test_compresskv_keeps_what_its_rule_says(
    length: int, heads: tuple[int, ...], budget: int, steps: int | None
) -> None:
    window = min(8, length)
    q, k = random(1, window, 6, SIZE, steps=steps), random(1, length, KV_HEADS, SIZE, seed=1, steps=steps)
    policy = make_policy("compresskv", selection(budget).model_copy(update={"retrieval_heads": ((0,), heads)}))
    assert isinstance(policy, CompressKV)
    mass = torch.zeros(length - window)
    for head in heads:
        for place in range(window):
            seen = length - window + place + 1
            row = (q[0, place, head] @ k[0, :seen, head // GROUP].T / math.sqrt(SIZE)).softmax(-1)
            mass += row[: length - window] / len(heads)
    pooled = [float(mass[max(at - 2, 0) : at + 3].sum()) / 5 for at in range(len(mass))]
    order = sorted(range(len(pooled)), key=lambda at: (-round(pooled[at], 5), at))
    want = sorted({*order[: max(budget - window, 0)], *range(length - window, length)})
    found = policy.choose(1, q, k, budget)[0]
    assert found.shape == (KV_HEADS, budget)
    assert [kept(found[kv_head]) for kv_head in range(KV_HEADS)] == [want] * KV_HEADS


def test_a_config_without_heads_of_every_layer_is_refused_by_compresskv() -> None:
    bare = selection(20).model_copy(update={"retrieval_heads": ()})
    with pytest.raises(ConfigError, match=r"--method compresskv needs selection\.retrieval_heads"):
        make_policy("compresskv", bare)


# --- Quest


@pytest.mark.parametrize(("lengths", "budget"), [([130, 17], 64), ([1, 160], 16), ([48, 49], 48), ([33, 500], 1000)])
@pytest.mark.parametrize("by_query_head", [False, True])
def test_quest_reads_the_pages_of_the_highest_bounds(lengths: list[int], budget: int, by_query_head: bool) -> None:
    capacity = 512
    q, k = random(2, 3, KV_HEADS * GROUP, SIZE, steps=1), random(2, capacity, KV_HEADS, SIZE, seed=1, steps=1)
    bounds = filled(k, lengths)
    start = torch.tensor(lengths)
    attend = QuestAttention(bounds, budget, by_query_head)
    for layer in range(DENSE_LAYERS + 1):
        out = attend(layer, q, k, k, start)
    found = attend.kept(DENSE_LAYERS)
    assert found is not None
    group = 1 if by_query_head else GROUP  # query heads that read the same pages
    read = [0.0, 0.0]
    for row, length in enumerate(lengths):
        pages = -(-length // PAGE)
        for list_of in range(KV_HEADS * GROUP // group):
            kv_head = list_of * group // GROUP
            scores = []
            for page in range(pages):
                keys = k[row, page * PAGE : min((page + 1) * PAGE, length), kv_head]
                low, high = keys.amin(0), keys.amax(0)
                queries = q[row, :, list_of * group : (list_of + 1) * group].flatten(0, 1)
                scores.append(max(float(torch.maximum(x * low, x * high).sum()) for x in queries))
            scores[-1] = math.inf  # the current page is always read
            count = max(budget // PAGE, 3)
            best = sorted(range(pages), key=lambda page: (-scores[page], page))[:count]
            want = [p for page in sorted(best) for p in range(page * PAGE, min((page + 1) * PAGE, length))]
            assert kept(found[row, list_of]) == want
            for head in range(list_of * group, (list_of + 1) * group):
                for token in range(3):
                    seen = want + list(range(length, length + token + 1))
                    shares = (k[row, seen, kv_head] @ q[row, token, head] / math.sqrt(SIZE)).softmax(-1)
                    torch.testing.assert_close(out[row, token, head], shares @ k[row, seen, kv_head])
        for heads in found[row].view(KV_HEADS, -1).tolist():
            read[row] += len(set(heads) - {-1}) / KV_HEADS
    dense = torch.tensor(lengths) * DENSE_LAYERS
    torch.testing.assert_close(attend.tokens_read(start), (dense + torch.tensor(read)) / (DENSE_LAYERS + 1))


def test_bounds_follow_a_growing_cache() -> None:
    """Step by step as if computed anew, with the new tokens of a step not yet in it."""
    k = random(2, 400, KV_HEADS, SIZE, seed=3)
    lengths = [70, 15]
    bounds = filled(k, lengths)
    for grown in ([1, 4], [4, 4], [4, 1], [1, 1], *[[4, 3]] * 20):
        lengths = [n + more for n, more in zip(lengths, grown, strict=True)]
        found = bounds.refresh(DENSE_LAYERS, k, torch.tensor(lengths), 4)
        want = filled(k, lengths)
        for row, length in enumerate(lengths):
            pages = -(-length // PAGE)
            assert torch.equal(found[0][row, :pages], want.lowest[0, row, :pages])
            assert torch.equal(found[1][row, :pages], want.highest[0, row, :pages])


def filled(k: Tensor, lengths: list[int]) -> PageBounds:
    """Bounds of caches of these keys, in one layer behind the dense ones."""
    shape = SHAPE.model_copy(update={"layers": DENSE_LAYERS + 1})
    bounds = PageBounds(shape, len(lengths), k.shape[1], k.dtype, torch.device("cpu"))
    stacked = k.expand(DENSE_LAYERS + 1, -1, -1, -1, -1)
    for row, length in enumerate(lengths):
        cache = KVCache(stacked[:, row : row + 1], stacked[:, row : row + 1])
        bounds.admit(row, Prompted(length, cache), None)
    return bounds


# --- SpecAttn, the stand-in


def test_all_heads_of_the_draft_choose_one_list(target: Decoder) -> None:
    """The best positions by the attention of every head, layer and drafted token, computed from whole matrices."""
    chosen = selection(16)
    draft = target.first_layers(3)
    policy = make_policy("specattn-all", chosen)
    stepper = Stepper(target, draft, policy, policy.selection, 3, 37)
    state = stepper.state(1, 200)
    ids = [(7 * at) % 37 for at in range(60)]
    for model, cache in ((target, state.target_cache), (draft, state.draft_cache)):
        assert cache is not None
        prefill(model, cache, ids)
    state.lengths[0], state.extent = 60, 60
    state.recent[0] = torch.tensor([ids[-1], 5])
    signals = StepSignals(stepper, state)
    with torch.inference_mode():
        drafts, _ = stepper.draft_tokens(state, signals)
        found = policy.select(signals)
    text = torch.tensor([[*ids, 5, *drafts[0, :2].tolist()]])
    mass = torch.zeros(63, dtype=torch.float64)

    def add(layer: int, q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Tensor:
        scores = torch.einsum("thd,nhd->htn", q[0], k[0].repeat_interleave(3, 1)) * 8**-0.5
        scores = scores.masked_fill(torch.ones(63, 63).triu(1).bool(), -math.inf)
        mass.add_(scores.softmax(-1)[:, 60:].sum(dim=(0, 1)))
        return dense_attention(layer, q, k, v, start)

    draft.forward(text, torch.zeros(1, dtype=torch.long), draft.cache(1, 63), add)
    free = mass[2:56].topk(10).indices + 2
    assert kept(found[0, 0, 0]) == sorted([0, 1, 56, 57, 58, 59, *free.tolist()])


# --- served


def selection(budget: int) -> Selection:
    return Selection(
        budget=budget,
        sink=2,
        window=4,
        m=(budget - 6) // 2,
        history=LayerHeads(layer=2, heads=(1, 5)),
        lookahead=(LayerHeads(layer=1, heads=(0, 4)),),
        retrieval_heads=((0, 3), (5, 1), (2, 3), (1, 2)),
    )


COMPARED = [
    "dustin-merged",
    "dustin-rest",
    "snapkv",
    "snapkv-8",
    "compresskv",
    "streaming-prompt",
    "h2o",
    "specattn",
    "quest",
    "quest-query-head",
    "smallkv",
]
PROMPTS = [[1, 5, 9, 30, 2], list(range(36)), [7], [3, 3, 8] * 30, [4] * 129]


def generate(target: Decoder, method: str, budget: int, rows: int | None = None) -> tuple[list[list[int]], float]:
    policy = make_policy(method, selection(budget) if method != "vanilla" else None)
    stepper = Stepper(target, target.first_layers(3), policy, policy.selection, 3, 37)
    generations, statistics = Engine(stepper, rows=rows).generate(PROMPTS, 24)
    return [generation.tokens for generation in generations], statistics.kept


@pytest.fixture(scope="module")
def vanilla(target: Decoder) -> tuple[list[list[int]], float]:
    return generate(target, "vanilla", 48)


@pytest.mark.parametrize("method", COMPARED)
def test_a_budget_that_covers_everything_is_full_verification(
    target: Decoder, vanilla: tuple[list[list[int]], float], method: str
) -> None:
    assert generate(target, method, 256)[0] == vanilla[0]


@pytest.mark.parametrize("method", COMPARED)
def test_rows_do_not_disturb_each_other(target: Decoder, vanilla: tuple[list[list[int]], float], method: str) -> None:
    """Through one row one after the other, through two with replacements, and all at once."""
    found = [generate(target, method, 48, rows) for rows in (1, 2, None)]
    assert found[0][0] == found[1][0] == found[2][0]
    assert found[0][1] == pytest.approx(found[2][1])
    assert found[0][1] < vanilla[1]


def test_tokens_read_are_counted_over_layers_and_heads(target: Decoder, vanilla: tuple[list[list[int]], float]) -> None:
    """Half of the layers read everything, the others three pages."""
    _, read = generate(target, "quest", 48)
    assert read < 0.5 * vanilla[1] + 0.5 * 48


def test_the_names_in_help_texts_are_the_methods() -> None:
    assert list(method_names.METHODS) == list(POLICIES)
    assert [name for name, policy in POLICIES.items() if policy.needs_selection] == list(method_names.SPARSE)
    by_layer = [name for name, policy in POLICIES.items() if policy.chooses_by_layer]
    assert by_layer == list(method_names.BY_LAYER)
