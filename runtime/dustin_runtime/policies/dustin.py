"""Dustin: draft, then verify over tokens chosen by lookahead and history (arXiv 2606.24957, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dustin_runtime.attention.sparse import SparseAttention
from dustin_runtime.config import changed
from dustin_runtime.guard import Rule, StepCount
from dustin_runtime.judge import Cut, judge
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.parallel.split import Part
from dustin_runtime.policies.base import Memory, Policy, Signals, Verification
from dustin_runtime.selection import select


@dataclass(frozen=True)
class Dustin(Policy):
    """Dustin-H, the hybrid: `m` tokens by lookahead, the rest of the budget by history.

    Attributes:
        rule: when rows are verified in full, and which budget others have; None for the selection's, always.
    """

    name: ClassVar[str] = "dustin"
    over_ranks: ClassVar[bool] = True
    needs_selection: ClassVar[bool] = True
    rule: Rule | None = None

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
    def _estimates(self) -> bool:
        return self.rule is not None and self.rule.estimates

    @property
    def uses_history(self) -> bool:
        budget, sink, window, m = self._settings
        return self._estimates or m < budget - sink - window

    @property
    def uses_lookahead(self) -> bool:
        return self._estimates or self._settings[3] > 0

    def memory(self, target: Decoder, depth: int, rows: int, capacity: int) -> Memory | None:
        return StepCount(rows, target.device) if self.rule and self.rule.every else None

    def memory_bytes(
        self, target: Part, draft: ModelShape | None, depth: int, rows: int, capacity: int, element_bytes: int
    ) -> int:
        known = super().memory_bytes(target, draft, depth, rows, capacity, element_bytes)
        if self.rule is None or self.selection is None:
            return known
        # Scores without what lies beyond the prefix, and lists of every size with the scores on them.
        lists = 8 * rows * self.selection.budget * (2 * max(len(self.rule.sizes), 1) + 3)
        return known + (rows * capacity * (4 + 1) + lists if self.rule.estimates else 0)

    def verification(self, signals: Signals) -> Verification:
        if self.rule is None:
            return self._attention(signals, self.select(signals))
        due = self._due(signals, self.rule) if self.rule.every else None
        lookahead, history = self._scores(signals)
        kept, estimate = self._judged(signals.lengths, lookahead, history, self.rule)
        return self._attention(signals, kept, self.rule.full(estimate, due), estimate)

    def select(self, signals: Signals) -> Tensor:
        return self._lists(signals.lengths, *self._scores(signals))

    def _attention(
        self, signals: Signals, kept: Tensor, full: Tensor | None = None, estimate: Tensor | None = None
    ) -> SparseAttention:
        return SparseAttention(kept, full=full, estimate=estimate)

    def _due(self, signals: Signals, rule: Rule) -> Tensor:
        """Rows whose turn it is to be verified in full; counts the step."""
        assert isinstance(signals.memory, StepCount)
        found = rule.due(signals.memory.steps)
        signals.memory.steps.add_(1)
        return found

    def _scores(self, signals: Signals) -> tuple[Tensor | None, Tensor | None]:
        """Lookahead and history, as far as they are used."""
        lookahead = signals.lookahead() if self.uses_lookahead else None
        return lookahead, signals.history() if self.uses_history else None

    def _judged(
        self, lengths: Tensor, lookahead: Tensor | None, history: Tensor | None, rule: Rule
    ) -> tuple[Tensor, Tensor | None]:
        """The lists, and what they are estimated to recover, [batch] fp64; None if that is not asked for."""
        assert self.selection is not None
        if lookahead is None or history is None or not rule.estimates:
            return self._lists(lengths, lookahead, history), None
        cuts = [self._cut(size, rule) for size in rule.sizes or (self.selection.budget,)]
        protected = {"sink": self.selection.sink, "window": self.selection.window}
        kept, estimate = judge(lookahead, history, lengths, cuts, target_arr=rule.target_arr, **protected)
        return kept[None, :, None], estimate

    def _cut(self, size: int, rule: Rule) -> Cut:
        """Lists of so many tokens."""
        assert self.selection is not None
        budget, _, _, m = type(self)(changed(self.selection, size, None))._settings
        return Cut(budget, m, dict(rule.estimate)[size])

    def _lists(self, lengths: Tensor, lookahead: Tensor | None, history: Tensor | None) -> Tensor:
        """What `select` returns, from scores."""
        budget, sink, window, m = self._settings
        ahead, back = (lookahead if m else None), (history if m < budget - sink - window else None)
        kept = select(ahead, back, lengths, budget=budget, m=m, sink=sink, window=window)
        return kept[None, :, None]  # for all layers and heads


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


@dataclass(frozen=True)
class DustinLook(Dustin):
    """Dustin whose draft looks once more, from its last token.

    A step verifies at the pending token and at `depth` drafts, and what is verified at the last of them is emitted if
    all are accepted. The draft never processes that one in its step, so lookahead knows nothing of what it attends to,
    and its KL is about twice that of the others (our finding, `results/README.md`). One pass more asks, without
    the head and up to the last scored layer.
    """

    name: ClassVar[str] = "dustin-look"
    last_look: ClassVar[bool] = True
