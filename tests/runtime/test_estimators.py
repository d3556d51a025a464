"""What is timed as estimation chooses what the runtime would choose."""

from __future__ import annotations

import pytest
import torch

from dustin_runtime.attention.scoring import attention_scores
from dustin_runtime.bench.estimators import ALL_DRAFT, NAIVE, QUEST, estimators
from dustin_runtime.bench.synthetic import Synthetic
from dustin_runtime.bench.workload import Sizes, Workload
from dustin_runtime.config import LayerHeads, Selection
from dustin_runtime.policies.quest import DENSE_LAYERS, PageBounds, QuestAttention
from dustin_runtime.selection import select

CPU = torch.device("cpu")
CONTEXT, BATCH, DEPTH = 200, 2, 2
HEADS = Selection(
    budget=64,
    sink=3,
    window=5,
    m=20,
    history=LayerHeads(layer=4, heads=(1, 6)),
    lookahead=(LayerHeads(layer=7, heads=(0,)), LayerHeads(layer=2, heads=(3, 5))),
)


@pytest.fixture(scope="module")
def data() -> Synthetic:
    draft = Sizes().draft.model_copy(update={"layers": 8, "query_heads": 6, "kv_heads": 3, "head_size": 8})
    sizes = Sizes(layers=5, query_heads=8, kv_heads=2, head_size=16, budget=64, depth=DEPTH, draft=draft, heads=HEADS)
    return Synthetic(sizes, Workload(CONTEXT, BATCH), torch.float32, CPU)


def chosen(scores: tuple[torch.Tensor | None, torch.Tensor | None], data: Synthetic, m: int) -> torch.Tensor:
    return select(*scores, data.start, budget=64, m=m, sink=3, window=5)


def test_a_configurations_heads_are_asked_in_caches_of_their_own(data: Synthetic) -> None:
    assert [one.chosen[0].layer for one in data.history] == [0, 1]  # a CPU has two caches
    assert [[entry.layer for entry in one.chosen] for one in data.lookahead] == [[0, 1], [2, 3]]
    assert {one.chosen[0].heads for one in data.history} == {(1, 6)}
    assert data.draft_keys.shape == (4, BATCH, CONTEXT + DEPTH, 3, 8)
    assert data.selection.m == 20


def test_every_estimator_chooses_as_the_runtime_does(data: Synthetic) -> None:
    found = {one.name: one for one in estimators(data)}
    ahead, back = data.lookahead_scores(1), data.history_scores(1)
    both = {"dustin": ((ahead, back), 20), "dustin-t": ((None, back), 0), "dustin-d": ((ahead, None), 56)}
    for name, (scores, m) in both.items():
        assert found[name].units == 2
        lists = found[name].work()
        assert torch.equal(lists[1], chosen(scores, data, m))  # type: ignore[index]

    pages = PageBounds(data.sizes.target, BATCH, CONTEXT + DEPTH + 1, torch.float32, CPU)
    keys = [data.cache.keys[layer % 2, :, :CONTEXT] for layer in range(5)]
    for layer in range(DENSE_LAYERS, 5):  # as `admit` does, for both rows
        padded = torch.cat((keys[layer], keys[layer][:, -1:].expand(-1, -CONTEXT % 16, -1, -1)), 1)
        paged = padded.unflatten(1, (-1, 16))
        pages.lowest[layer - DENSE_LAYERS, :, : paged.shape[1]] = paged.amin(2)
        pages.highest[layer - DENSE_LAYERS, :, : paged.shape[1]] = paged.amax(2)
    serving = QuestAttention(pages, 64, by_query_head=False)
    for layer in range(5):
        cache = data.cache.keys[layer % 2], data.cache.values[layer % 2]
        serving(layer, data.q, *cache, data.start)
    lists = found[QUEST].work()
    for layer in range(DENSE_LAYERS, 5):
        assert torch.equal(lists[layer - DENSE_LAYERS], serving.kept(layer))  # type: ignore[index,arg-type]
    assert found[ALL_DRAFT].work().shape == found[NAIVE].work().shape == (BATCH, 64)  # type: ignore[attr-defined]


def test_all_heads_are_summed_over_all_layers(data: Synthetic, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []

    def record(ahead: torch.Tensor | None, back: torch.Tensor | None, lengths: torch.Tensor, **budget: int) -> object:
        seen.append((ahead, back))
        return select(ahead, back, lengths, **budget)

    made: list[torch.Tensor] = []
    queries = data.queries
    monkeypatch.setattr(data, "queries", lambda *size: made.append(queries(*size)) or made[-1])
    monkeypatch.setattr("dustin_runtime.bench.estimators.select", record)
    {one.name: one for one in estimators(data)}[NAIVE].work()
    (ahead, back), (draft_q, target_q) = seen[0], made
    want = sum(
        attention_scores(draft_q, data.draft_keys[layer % 4], range(6), 2, data.lookahead_at) for layer in range(8)
    )
    torch.testing.assert_close(ahead, want[:, :CONTEXT])  # type: ignore[index]
    keys = data.cache.keys[:, :, : CONTEXT + 1]
    want = sum(attention_scores(target_q, keys[layer % 2], range(8), 4, data.history_at) for layer in range(5))
    torch.testing.assert_close(back, want[:, :CONTEXT])  # type: ignore[index]


def test_costs_grow_with_what_is_asked(data: Synthetic) -> None:
    found = {one.name: one.cost.bytes for one in estimators(data)}
    assert found["dustin"] == found["dustin-t"] + found["dustin-d"]
    assert found["dustin-t"] == 2 * CONTEXT * BATCH * 16 * 4  # heads 1 and 6 read both KV heads
    assert found["dustin-d"] == (1 + 2) * (CONTEXT + DEPTH) * BATCH * 8 * 4
    assert found[ALL_DRAFT] == 8 * 3 * (CONTEXT + DEPTH) * BATCH * 8 * 4
    assert found[NAIVE] == found[ALL_DRAFT] + 5 * 2 * CONTEXT * BATCH * 16 * 4
    assert found[QUEST] == 2 * 3 * 2 * 16 * 13 * BATCH * 4  # two bounds of 13 pages in three layers
