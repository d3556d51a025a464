"""Dustin with one ranking made of both scores, in place of one m for all texts. `Selection.split` sets it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dustin_runtime.config import Selection, Split
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.policies.dustin import Dustin
from dustin_runtime.selection import eligible_positions, select

_LEAST = 1e-30
"""What scores are divided by at least: those of a row may all be 0."""


def split_of(selection: Selection) -> Split:
    """How the split is decided; the defaults where a configuration does not say."""
    return selection.split or Split()


def weight_of(selection: Selection) -> float:
    """Of lookahead in the ranking: as configured, or what the searched m says of the pair.

    An m at its end, which another budget may have brought there, must not silence a signal: that costs the few tokens
    that only the other one names.
    """
    weight, free = split_of(selection).weight, selection.budget - selection.sink - selection.window
    return min(max(selection.m / free, 1 / 8), 7 / 8) if weight is None else weight


def shares(scores: Tensor, eligible: Tensor) -> Tensor:
    """Scores over their sum, 0 where not eligible.

    Args:
        scores: [B, N] fp32, not negative; eligible: [B, N] bool.
    """
    scores = scores.masked_fill(~eligible, 0)
    # In fp64, so that the sum does not depend on how many columns are behind the prefix.
    return scores / scores.sum(-1, keepdim=True, dtype=torch.float64).float().clamp(min=_LEAST)


def over_last(scores: Tensor, eligible: Tensor, count: int) -> Tensor:
    """Scores over the `count`-th largest of them, which is the last that would be kept alone; arguments as `shares`."""
    scores = scores.masked_fill(~eligible, 0)
    return scores / scores.topk(min(count, scores.shape[-1])).values[..., -1:].clamp(min=_LEAST)


def merged(lookahead: Tensor, history: Tensor, eligible: Tensor, selection: Selection) -> Tensor:
    """[B, N] fp32: both scores on one scale, weighted; their sum or the larger one."""
    split, weight = split_of(selection), weight_of(selection)
    if split.scale == "sum":
        ahead, past = shares(lookahead, eligible), shares(history, eligible)
    else:
        free = selection.budget - selection.sink - selection.window
        ahead, past = over_last(lookahead, eligible, free), over_last(history, eligible, free)
    ahead, past = weight * ahead, (1 - weight) * past
    return ahead + past if split.combine == "sum" else torch.maximum(ahead, past)


@dataclass(frozen=True)
class DustinMerged(Dustin):
    """Tokens ranked by `weight` times lookahead and the rest times history, both brought to one scale.

    Where one signal is flat over a text and the other one peaked, the peaked one has the larger scores, so that it
    chooses more than its weight. A draft that no head is asked of leaves the choice to history.
    """

    name: ClassVar[str] = "dustin-merged"

    @property
    def uses_history(self) -> bool:
        assert self.selection is not None
        return not self.selection.lookahead or weight_of(self.selection) < 1

    @property
    def uses_lookahead(self) -> bool:
        assert self.selection is not None
        return bool(self.selection.lookahead) and weight_of(self.selection) > 0

    def memory_bytes(
        self, target: ModelShape, draft: ModelShape | None, depth: int, rows: int, capacity: int, element_bytes: int
    ) -> int:
        # fp32: both scores masked and on one scale, a term of each and their sum; masks.
        return rows * capacity * (4 * 8 + 8)

    def _lists(self, lengths: Tensor, lookahead: Tensor | None, history: Tensor | None) -> Tensor:
        assert self.selection is not None
        chosen = self.selection
        protected = {"sink": chosen.sink, "window": chosen.window}
        scores = history if lookahead is None else lookahead
        if lookahead is not None and history is not None:
            eligible = eligible_positions(lengths, history.shape[1], **protected)
            scores = merged(lookahead, history, eligible, chosen)
        return select(None, scores, lengths, budget=chosen.budget, m=0, **protected)[None, :, None]
