"""What it costs to decide which tokens to read: Dustin's three forms, Quest, and every head of both models.

Arrangement of arXiv 2606.24957, Figure 8. Caches are random: times are real, what is chosen means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dustin_runtime.attention.scoring import ScoredHeads
from dustin_runtime.bench.synthetic import Synthetic
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.policies.draft_rows import all_heads
from dustin_runtime.policies.quest import DENSE_LAYERS, PAGE, PageBounds, choose_pages, page_scores
from dustin_runtime.roofline import Cost, history_cost, lookahead_cost, sum_costs
from dustin_runtime.selection import select

QUEST, ALL_DRAFT, NAIVE = f"quest, pages of {PAGE}", "all heads of the draft", "all heads of both models"


class Estimator(NamedTuple):
    """A way to choose what the target reads in one step."""

    name: str
    work: Callable[[], object]
    units: int
    """Steps that `work` does."""
    cost: Cost
    """The least that one step must move; see `roofline`."""


def estimators(data: Synthetic) -> list[Estimator]:
    """Every way for one workload, scores and choice together, by the functions that serve."""
    one, sizes, depth = data.selection, data.sizes, data.sizes.depth
    target, draft, size = sizes.target, sizes.draft, data.q.dtype.itemsize
    context, batch = data.workload
    lengths, scorings = [context] * batch, range(len(data.history))
    free = one.budget - one.sink - one.window
    history = history_cost(target, one.history, lengths, size)
    lookahead = lookahead_cost(draft, one.lookahead, lengths, depth, size)
    every = lookahead_cost(draft, all_heads(draft), lengths, depth, size)
    past = sum_costs(*(history_cost(target, entry, lengths, size) for entry in all_heads(target)))
    pages = Cost(2 * max(sizes.layers - DENSE_LAYERS, 0) * _kv_width(target) * -(-context // PAGE) * batch * size, 0.0)

    def chosen(ahead: Tensor | None, back: Tensor | None, m: int) -> Tensor:
        return select(ahead, back, data.start, budget=one.budget, m=m, sink=one.sink, window=one.window)

    def in_turn(step: Callable[[int], object]) -> Callable[[], object]:
        return lambda: [step(index) for index in scorings]

    draft_scores = _all_scores(data, draft, data.draft_keys, data.lookahead_at)
    target_scores = _all_scores(data, target, data.cache.keys, data.history_at)
    bounds = _Pages(data)
    return [
        Estimator(
            "dustin",
            in_turn(lambda index: chosen(data.lookahead_scores(index), data.history_scores(index), one.m)),
            len(scorings),
            sum_costs(history, lookahead),
        ),
        Estimator(
            "dustin-t", in_turn(lambda index: chosen(None, data.history_scores(index), 0)), len(scorings), history
        ),
        Estimator(
            "dustin-d",
            in_turn(lambda index: chosen(data.lookahead_scores(index), None, free)),
            len(scorings),
            lookahead,
        ),
        Estimator(QUEST, bounds.choose, 1, pages),
        Estimator(ALL_DRAFT, lambda: chosen(draft_scores(), None, free), 1, every),
        Estimator(NAIVE, lambda: chosen(draft_scores(), target_scores(), one.m), 1, sum_costs(every, past)),
    ]


def _all_scores(data: Synthetic, shape: ModelShape, keys: Tensor, at: Tensor) -> Callable[[], Tensor]:
    """Scores of every head of a model, layer by layer, over the caches there are in turn."""
    heads = [
        ScoredHeads([entry], shape.query_heads, shape.group, data.q.device, [entry.layer % len(keys)])
        for entry in all_heads(shape)
    ]
    q = data.queries(at.shape[1], shape.query_heads, shape.head_size, data.q.dtype)

    def scores() -> Tensor:
        total = heads[0].scores(q, keys, at, data.workload.context)
        for one in heads[1:]:
            total += one.scores(q, keys, at, data.workload.context)
        return total

    return scores


class _Pages:
    """Quest's choice in every layer that it serves."""

    def __init__(self, data: Synthetic) -> None:
        self.data = data
        context, batch = data.workload
        target, dtype, device = data.sizes.target, data.q.dtype, data.q.device
        self.bounds = PageBounds(target, batch, context, dtype, device)
        self.layers = range(DENSE_LAYERS, target.layers)
        for layer in self.layers:
            paged = data.cache.keys[layer % len(data.cache.keys), :, : context // PAGE * PAGE]
            paged = paged.unflatten(1, (-1, PAGE))
            self.bounds.lowest[layer - DENSE_LAYERS, :, : paged.shape[1]] = paged.amin(dim=2)
            self.bounds.highest[layer - DENSE_LAYERS, :, : paged.shape[1]] = paged.amax(dim=2)

    @torch.inference_mode()
    def choose(self) -> list[Tensor]:
        """[batch, kv_heads, tokens] of every layer."""
        data, found = self.data, []
        keys = data.cache.keys[:, :, : data.workload.context]
        for layer in self.layers:
            bounds = self.bounds.refresh(layer, keys[layer % len(keys)], data.start, data.q.shape[1])
            found.append(choose_pages(page_scores(data.q, *bounds, by_query_head=False), data.start, data.sizes.budget))
        return found


def _kv_width(shape: ModelShape) -> int:
    return shape.kv_heads * shape.head_size
