"""Dustin with a split between lookahead and history that each text decides in each step, in place of one m for all.

`dustin-merged` and `dustin-marginal` rank all tokens once, by a score made of both; `dustin-feedback` keeps the two
lists apart and moves m. What they are set to is `Selection.split`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dustin_runtime.config import PowerLaw, Selection, Split
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.policies.base import Prompted, Signals
from dustin_runtime.policies.dustin import Dustin
from dustin_runtime.selection import ascending, eligible_positions, ranked, select

_LEAST = 1e-30
"""What scores are divided by at least: those of a row may all be 0."""


def split_of(selection: Selection) -> Split:
    """How the split is decided; the defaults where a configuration does not say."""
    return selection.split or Split()


def weight_of(selection: Selection) -> float:
    """Of lookahead in a merged ranking: as configured, or what the searched m says of the pair.

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
    return _joined(weight * ahead, (1 - weight) * past, split.combine)


def calibrated(lookahead: Tensor, history: Tensor, eligible: Tensor, selection: Selection) -> Tensor:
    """[B, N] fp32: the attention that is expected of the target, from each score's share by its power law."""
    split = split_of(selection)
    ahead = expected(shares(lookahead, eligible), split.lookahead_law)
    past = expected(shares(history, eligible), split.history_law)
    return _joined(ahead, past, split.combine)


def expected(share: Tensor, law: PowerLaw) -> Tensor:
    """Expected share of the target's attention at tokens with such a share of a score."""
    return law.factor * share**law.exponent


def _joined(ahead: Tensor, past: Tensor, combine: str) -> Tensor:
    return ahead + past if combine == "sum" else torch.maximum(ahead, past)


def kept_of_both(lookahead: Tensor, history: Tensor, m: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Which entries of two ranked lists are kept if each row has an m of its own, as `select` keeps them.

    Args:
        lookahead, history: [B, free] int64 positions in order of decreasing score, -1 at the end.
        m: [B] int64, 0 to free; columns: above every position.

    Returns:
        [B, free] bool each: the draft's first m, and history's first that are not among them, up to free in all.
    """
    rank, cut = torch.arange(lookahead.shape[1], device=m.device), m.unsqueeze(1)
    ahead = (rank < cut) & (lookahead >= 0)
    # Of history's first `free`, the draft has taken m at most: enough are left.
    open_ = (history >= 0) & ~among(history, torch.where(ahead, lookahead, -1), columns)
    return ahead, open_ & (open_.cumsum(1) <= lookahead.shape[1] - cut)


def among(positions: Tensor, others: Tensor, columns: int) -> Tensor:
    """Which of [B, i] positions are among [B, j] others, -1 of either being none."""
    found = torch.zeros(len(others), columns + 1, dtype=torch.bool, device=others.device)  # the last is for -1
    found.scatter_(1, others.where(others >= 0, columns), True)
    return found.gather(1, positions.clamp(min=0)) & (positions >= 0)


@dataclass(frozen=True)
class _Adaptive(Dustin):
    """Asks for both scores; a draft that no head is asked of leaves the choice to history."""

    @property
    def uses_history(self) -> bool:
        return True

    @property
    def uses_lookahead(self) -> bool:
        assert self.selection is not None
        return bool(self.selection.lookahead)

    def memory_bytes(
        self, target: ModelShape, draft: ModelShape | None, depth: int, rows: int, capacity: int, element_bytes: int
    ) -> int:
        assert self.selection is not None
        # fp32: both scores masked and on one scale, a term of each and their sum; masks; lists, their copies and order.
        return rows * (capacity * (4 * 8 + 8) + 8 * 16 * self.selection.budget)


@dataclass(frozen=True)
class _OneRanking(_Adaptive):
    """Keeps what is protected and the best of one ranking."""

    def select(self, signals: Signals) -> Tensor:
        assert self.selection is not None
        if not (self.uses_lookahead and self.uses_history):
            scores = signals.lookahead() if self.uses_lookahead else signals.history()
        else:
            lookahead, history = signals.lookahead(), signals.history()
            sizes = {"sink": self.selection.sink, "window": self.selection.window}
            eligible = eligible_positions(signals.lengths, history.shape[1], **sizes)
            scores = self._joined_scores(lookahead, history, eligible)
        budget, sink, window, _ = self._settings
        return select(None, scores, signals.lengths, budget=budget, m=0, sink=sink, window=window)[None, :, None]

    @abstractmethod
    def _joined_scores(self, lookahead: Tensor, history: Tensor, eligible: Tensor) -> Tensor:
        """[B, N] fp32, not negative."""


@dataclass(frozen=True)
class DustinMerged(_OneRanking):
    """Tokens ranked by `weight` times lookahead and the rest times history, both brought to one scale.

    Where one signal is flat over a text and the other one peaked, the peaked one has the larger scores, so that it
    chooses more than its weight.
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

    def _joined_scores(self, lookahead: Tensor, history: Tensor, eligible: Tensor) -> Tensor:
        assert self.selection is not None
        return merged(lookahead, history, eligible, self.selection)


@dataclass(frozen=True)
class DustinMarginal(_OneRanking):
    """Tokens ranked by the attention that their scores promise, each score by a power law of its share.

    With `combine: max` the next token comes from the ranked list whose next one adds more expected mass, until the
    budget is spent: a list's next token has the largest score that it has left, and what a score promises grows with
    it, so this greedy merge of two sorted lists takes tokens in order of the larger of their two promises (a token
    that is in both at the first), which is one ranking by that maximum. `sum`, the default, adds the promises, as if
    each signal knew what the other does not: a token that both name ranks above one that either names as strongly.

    `dustin_profile.search.split_fit` fits the laws on traces. The default is the root of both, which lies between
    adding shares and adding ranks.
    """

    name: ClassVar[str] = "dustin-marginal"

    def _joined_scores(self, lookahead: Tensor, history: Tensor, eligible: Tensor) -> Tensor:
        assert self.selection is not None
        return calibrated(lookahead, history, eligible, self.selection)


class SplitFeedback:
    """m of every row, and the lists that the last step chose from; implements `policies.base.Memory`.

    Attributes:
        m: [rows] fp32, 0 to free: tokens that lookahead chooses.
        lookahead, history: [rows, free] int64, by rank in the last step; -1 where the other list had the token within
            its own share, so that moving m does not change whether it is kept.
    """

    def __init__(self, selection: Selection, rows: int, device: torch.device) -> None:
        self.configured, self.budget, self.split = selection.m, selection.budget, split_of(selection)
        self.free = selection.budget - selection.sink - selection.window
        self.m = torch.full((rows,), float(selection.m), device=device)
        self.lookahead = torch.full((rows, self.free), -1, dtype=torch.int64, device=device)
        self.history = self.lookahead.clone()
        self._rank = torch.arange(self.free, device=device)

    def admit(self, row: int, target: Prompted, draft: Prompted | None) -> None:
        """Begin with the configured m, and nothing to learn from."""
        self.m[row] = self.configured
        self.lookahead[row] = -1
        self.history[row] = -1

    @property
    def cut(self) -> Tensor:
        """[rows] int64, m in whole tokens."""
        return self.m.round().long()

    def learn(self, history: Tensor, lengths: Tensor) -> None:
        """Move m towards the list of the last step whose tokens near its end receive more attention by now.

        Args:
            history: [rows, columns] fp32, this step's: the target's attention at what was verified last.
            lengths: [rows] int64. Where all is kept, m stays.
        """
        ahead, past = self.margins(history)
        ahead = ahead * self.split.handicap
        # NaN, where a list has nothing near its end or neither receives anything, moves nothing.
        lead = ((ahead - past) / (ahead + past)).nan_to_num(0.0) * (lengths > self.budget)
        self.m.add_(self.split.rate * self.free * lead).clamp_(0, self.free)

    def margins(self, history: Tensor) -> tuple[Tensor, Tensor]:
        """[rows] fp32 each: mean attention at the end of either list's share, its last quarter and as many behind it.

        With those behind it, a list whose share is empty can gain one.
        """
        cut = self.cut.unsqueeze(1)
        return self._margin(self.lookahead, cut, history), self._margin(self.history, self.free - cut, history)

    def _margin(self, positions: Tensor, cut: Tensor, history: Tensor) -> Tensor:
        reach = (cut // 4).clamp(min=1)
        near = (self._rank >= cut - reach) & (self._rank < cut + reach)
        # Those beyond the columns are of a row that has ended.
        near &= (positions >= 0) & (positions < history.shape[1])
        found = history.gather(1, positions.clamp(0, history.shape[1] - 1)).masked_fill(~near, 0)
        return found.sum(1) / near.sum(1)

    def remember(self, lookahead: Tensor, history: Tensor, columns: int) -> None:
        """Keep two ranked lists for the next step to learn from, [rows, free] int64 each."""
        cut = self.cut.unsqueeze(1)
        ahead, past = lookahead.where(self._rank < cut, -1), history.where(self._rank < self.free - cut, -1)
        self.lookahead.copy_(lookahead.masked_fill(among(lookahead, past, columns), -1))
        self.history.copy_(history.masked_fill(among(history, ahead, columns), -1))


@dataclass(frozen=True)
class DustinFeedback(_Adaptive):
    """Dustin with an m of each row's own, moved in each step by what the last one's choices were worth.

    A step's history is the target's attention at the end of what the step before verified. It says which of two kinds
    of tokens near the end of their lists would have been worth more then: those that lookahead alone would have, or
    those that history alone would have. m moves by `rate` times the free budget, times the difference of the two in
    relation to their sum. History is measured by its own heads, one step later, which favours it: `handicap` is what
    lookahead's side is multiplied by. Each call of `select` is a step.
    """

    name: ClassVar[str] = "dustin-feedback"

    def memory(
        self, target: ModelShape, depth: int, rows: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> SplitFeedback:
        assert self.selection is not None
        return SplitFeedback(self.selection, rows, device)

    def select(self, signals: Signals) -> Tensor:
        assert isinstance(signals.memory, SplitFeedback)
        budget, sink, window, _ = self._settings
        memory, lengths, history = signals.memory, signals.lengths, signals.history()
        if not self.uses_lookahead:
            return select(None, history, lengths, budget=budget, m=0, sink=sink, window=window)[None, :, None]
        memory.learn(history, lengths)
        columns = history.shape[1]
        eligible = eligible_positions(lengths, columns, sink=sink, window=window)
        ahead = ranked(signals.lookahead(), eligible, memory.free)
        past = ranked(history, eligible, memory.free)
        by_draft, by_target = kept_of_both(ahead, past, memory.cut, columns)
        memory.remember(ahead, past, columns)
        kept = (protected(lengths, sink, window), ahead.where(by_draft, -1), past.where(by_target, -1))
        return ascending(torch.cat(kept, 1))[None, :, None, :budget]


def protected(lengths: Tensor, sink: int, window: int) -> Tensor:
    """[B, sink + window] int64 positions that are always kept, -1 where a prefix is too short for them."""
    ends = lengths.unsqueeze(1)
    first = torch.arange(sink, device=lengths.device)
    last = ends + torch.arange(-window, 0, device=lengths.device)
    return torch.cat(
        (first.expand(len(lengths), -1).masked_fill(first >= ends, -1), last.masked_fill(last < sink, -1)), 1
    )
