"""Which rows of a step are verified in full, and how many tokens the others read: what a policy asks of its lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dustin_runtime.judge import Coefficients

if TYPE_CHECKING:
    from dustin_runtime.policies.base import Prompted

NEVER = 1e-9
"""A threshold below all estimates above 0: steps are judged, and none is verified in full."""


@dataclass(frozen=True)
class Rule:
    """When a row is verified in full.

    Attributes:
        threshold: estimates below it are; 0 for none.
        every: of each row every so many-th step is; 0 for none.
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

    def full(self, estimate: Tensor | None, due: Tensor | None) -> Tensor | None:
        """[batch] bool, which rows are verified in full, or None if that is not asked for.

        Args:
            estimate: [batch] fp64 of `judge.judge`; due: [batch] bool of `due`; None for what is not asked for.
        """
        # What is not a number counts as low.
        low = ~(estimate >= self.threshold) if self.threshold and estimate is not None else None
        if low is None or due is None:
            return due if low is None else low
        return low | due

    def due(self, steps: Tensor) -> Tensor:
        """[batch] bool, by how many steps of a row have been done before this one, [batch] int64, counted from any."""
        return steps % self.every == self.every - 1


class StepCount:
    """Steps of each row since it was filled; implements `policies.base.Memory`."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.steps = torch.zeros(rows, dtype=torch.int64, device=device)

    def admit(self, row: int, target: Prompted, draft: Prompted | None) -> None:
        self.steps[row] = 0
