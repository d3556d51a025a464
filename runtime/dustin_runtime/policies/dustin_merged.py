"""Dustin with one ranking made of both scores, in place of one m for all texts. `Selection.split` sets it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dustin_runtime.config import Selection, Split
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.parallel.split import Part
from dustin_runtime.policies.dustin import Dustin
from dustin_runtime.selection import eligible_positions, select

_LEAST = 1e-30
"""What scores are divided by at least: those of a row may all be 0."""


def split_of(selection: Selection) -> Split:
    """How the split is decided; the defaults where a configuration does not say."""
    return selection.split or Split()


def shares(scores: Tensor, eligible: Tensor) -> Tensor:
    """Scores over their sum, 0 where not eligible.

    Args:
        scores: [B, N] fp32, not negative; eligible: [B, N] bool.
    """
    scores = scores.masked_fill(~eligible, 0)
    # In fp64, so that the sum does not depend on how many columns are behind the prefix.
    return scores / scores.sum(-1, keepdim=True, dtype=torch.float64).float().clamp(min=_LEAST)


def merged(lookahead: Tensor, history: Tensor, eligible: Tensor, split: Split) -> Tensor:
    """[B, N] fp32: both scores' shares to the split's exponent, weighted and added; arguments as of `shares`."""
    ahead, past = (_power(shares(scores, eligible), split.exponent) for scores in (lookahead, history))
    return split.weight * ahead + (1 - split.weight) * past


def _power(values: Tensor, exponent: float) -> Tensor:
    # A root is correctly rounded on every device, which a power is not: a CPU and a GPU then keep the same tokens.
    return values.sqrt() if exponent == 0.5 else values.pow(exponent)


@dataclass(frozen=True)
class DustinMerged(Dustin):
    """Tokens ranked by `weight` times lookahead and the rest times history, each its share to the power of `exponent`.

    Where one signal is flat over a text and the other one peaked, the peaked one has the larger shares, so that it
    chooses more than its weight. An exponent below 1 makes such peaks count for less, and ranks a token that both
    signals name above one that a single signal names as strongly as both together. A draft that no head is asked of
    leaves the choice to history.
    """

    name: ClassVar[str] = "dustin-merged"

    @property
    def uses_history(self) -> bool:
        assert self.selection is not None
        return not self.selection.lookahead or split_of(self.selection).weight < 1

    @property
    def uses_lookahead(self) -> bool:
        assert self.selection is not None
        return bool(self.selection.lookahead) and split_of(self.selection).weight > 0

    def memory_bytes(
        self, target: Part, draft: ModelShape | None, depth: int, rows: int, capacity: int, element_bytes: int
    ) -> int:
        # fp32: of both scores the share, its power and its term, and their sum; masks.
        return rows * capacity * (4 * 8 + 8)

    def _lists(self, lengths: Tensor, lookahead: Tensor | None, history: Tensor | None) -> Tensor:
        assert self.selection is not None
        chosen = self.selection
        protected = {"sink": chosen.sink, "window": chosen.window}
        scores = history if lookahead is None else lookahead
        if lookahead is not None and history is not None:
            eligible = eligible_positions(lengths, history.shape[1], **protected)
            scores = merged(lookahead, history, eligible, split_of(chosen))
        return select(None, scores, lengths, budget=chosen.budget, m=0, **protected)[None, :, None]
