"""Dustin: draft, then verify over tokens chosen by lookahead and history (arXiv 2606.24957, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dustin_runtime.policies.base import Policy, Signals
from dustin_runtime.selection import select


@dataclass(frozen=True)
class Dustin(Policy):
    """Dustin-H, the hybrid: `m` tokens by lookahead, the rest of the budget by history."""

    name: ClassVar[str] = "dustin"
    over_ranks: ClassVar[bool] = True
    needs_selection: ClassVar[bool] = True

    @property
    def _settings(self) -> tuple[int, int, int, int]:
        """budget, sink, window, m."""
        assert self.selection is not None
        chosen = self.selection
        return (
            chosen.budget,
            chosen.sink,
            chosen.window,
            self._lookahead_share(chosen.budget - chosen.sink - chosen.window, chosen.m),
        )

    def _lookahead_share(self, free: int, configured: int) -> int:
        return configured

    @property
    def uses_history(self) -> bool:
        budget, sink, window, m = self._settings
        return m < budget - sink - window

    @property
    def uses_lookahead(self) -> bool:
        return self._settings[3] > 0

    def select(self, signals: Signals) -> Tensor:
        budget, sink, window, m = self._settings
        kept = select(
            signals.lookahead() if self.uses_lookahead else None,
            signals.history() if self.uses_history else None,
            signals.lengths,
            budget=budget,
            m=m,
            sink=sink,
            window=window,
        )
        return kept[None, :, None]  # one list for all layers and heads


@dataclass(frozen=True)
class DustinT(Dustin):
    """Dustin-T: history alone."""

    name: ClassVar[str] = "dustin-t"

    def _lookahead_share(self, free: int, configured: int) -> int:
        return 0


@dataclass(frozen=True)
class DustinD(Dustin):
    """Dustin-D: lookahead alone."""

    name: ClassVar[str] = "dustin-d"

    def _lookahead_share(self, free: int, configured: int) -> int:
        return free
