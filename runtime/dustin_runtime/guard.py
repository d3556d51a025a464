"""Which rows of a step are verified in full, and how many tokens the others read: what a policy asks after choosing.

All is decided on the device, from the scores that the lists were chosen by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dustin_runtime.policies.base import Prompted

MOST = 1 - 2**-24
"""The largest estimate. It is below 1 also for lists of everything, so that a threshold of 1 verifies all in full."""

NEVER = 1e-9
"""A threshold below all estimates above 0: steps are judged, and none is verified in full."""


@dataclass(frozen=True)
class Coefficients:
    """Of `config.Estimate`."""

    intercept: float
    history: float
    lookahead: float


@dataclass(frozen=True)
class Rule:
    """When a row is verified in full.

    Attributes:
        threshold: estimates below it are; 0 for none.
        every: the `every`-th step of each row is, and all its multiples; 0 for none.
        sizes: ascending budgets to choose from by `target_arr`; empty for the selection's own.
        estimate: by budget, for the selection's own and each of `sizes`; empty if nothing is estimated.
    """

    threshold: float = 0.0
    every: int = 0
    sizes: tuple[int, ...] = ()
    target_arr: float = 0.0
    estimate: tuple[tuple[int, Coefficients], ...] = ()

    @property
    def guards(self) -> bool:
        """Whether rows may be verified in full."""
        return bool(self.threshold or self.every)

    @property
    def estimates(self) -> bool:
        """Whether both scores are asked for."""
        return bool(self.estimate)

    @property
    def label(self) -> str:
        """For names of what is measured."""
        parts = [f"guard{self.threshold:g}"] if self.threshold else []
        parts += [f"every{self.every}"] if self.every else []
        parts += [f"arr{self.target_arr:g}"] if self.sizes else []
        return "-".join(parts)

    def estimated(self, budget: int, kept: Tensor, scores: Scores, lengths: Tensor) -> Tensor:
        """Estimated ARR of lists of `budget` tokens: [batch] fp64 in [0, `MOST`].

        Args:
            kept: [layers or 1, batch, kv_heads or 1, k], see `Policy.select`.
            lengths: [batch] int64.
        """
        by = dict(self.estimate)[budget]
        found = (
            by.intercept
            + by.history * share_on(kept, scores.history, scores.all_history)
            + by.lookahead * share_on(kept, scores.lookahead, scores.all_lookahead)
        )
        # A list of everything recovers everything.
        return torch.where(lengths <= budget, MOST, found.clamp(0, MOST))

    def full(self, estimate: Tensor | None, due: Tensor | None) -> Tensor | None:
        """[batch] bool, which rows are verified in full, or None if that is not asked for.

        Args:
            estimate: of `estimated`; due: [batch] bool of `due`; either may be None if it is not asked for.
        """
        # What is not a number counts as low.
        low = ~(estimate >= self.threshold) if self.threshold and estimate is not None else None
        if low is None or due is None:
            return due if low is None else low
        return low | due

    def due(self, steps: Tensor) -> Tensor:
        """[batch] bool, by how many steps of a row have been done before this one, [batch] int64."""
        return steps % self.every == self.every - 1

    def smallest(self, estimates: Tensor) -> Tensor:
        """[batch] int64, which size is the first to reach the target, else the last; estimates: [sizes, batch]."""
        missed = ~(estimates >= self.target_arr)
        return missed.long().cumprod(dim=0).sum(dim=0).clamp(max=len(self.sizes) - 1)


def share_on(kept: Tensor, scores: Tensor, whole: Tensor) -> Tensor:
    """What of the scores lies on a list, mean over lists: [batch] fp64.

    Args:
        kept: as of `Rule.estimated`; scores: [batch, positions] fp32; whole: [batch] of `on_prefix`.
    """
    layers, batch, heads, _ = kept.shape
    lists = kept.transpose(0, 1).reshape(batch, -1)
    held = scores.gather(1, lists.clamp(min=0)).masked_fill(lists < 0, 0).sum(dim=1, dtype=torch.float64)
    return held / (layers * heads) / whole.clamp(min=torch.finfo(torch.float32).tiny)


def on_prefix(scores: Tensor, lengths: Tensor) -> Tensor:
    """Sum of [batch, positions] fp32 scores over each prefix of `lengths` [batch]: [batch] fp64."""
    beyond = torch.arange(scores.shape[1], device=scores.device) >= lengths.unsqueeze(1)
    return scores.masked_fill(beyond, 0).sum(dim=1, dtype=torch.float64)


class Scores(NamedTuple):
    """Both scores of a step, [batch, positions] fp32, and their sums over the prefix, [batch] fp64."""

    history: Tensor
    lookahead: Tensor
    all_history: Tensor
    all_lookahead: Tensor

    @classmethod
    def of(cls, history: Tensor, lookahead: Tensor, lengths: Tensor) -> Scores:
        return cls(history, lookahead, on_prefix(history, lengths), on_prefix(lookahead, lengths))


class StepCount:
    """Steps of each row since it was filled; implements `policies.base.Memory`."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.steps = torch.zeros(rows, dtype=torch.int64, device=device)

    def admit(self, row: int, target: Prompted, draft: Prompted | None) -> None:
        self.steps[row] = 0
