"""What the methods that split the budget by the text are set to, fitted on traces (`dustin_runtime.config.Split`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dustin_profile.search.arr import arr, first_best, mass
from dustin_profile.search.curve import lookahead_sum
from dustin_profile.search.phases import over_documents, usable
from dustin_profile.traces.windows import Documents, Windows
from dustin_runtime.config import PowerLaw, Selection, Split
from dustin_runtime.policies.adaptive_split import DustinFeedback, DustinMerged, SplitFeedback, shares, split_of
from dustin_runtime.policies.base import Memory
from dustin_runtime.policies.dustin import Dustin
from dustin_runtime.selection import eligible_positions, ranked

WEIGHTS = tuple(step / 16 for step in range(17))
"""Tried for `Split.weight`."""
HANDICAPS = tuple(2.0**power for power in range(8))
"""Tried for `Split.handicap`."""
_BINS_PER_DECADE = 8
_FLATTEST, _STEEPEST = 0.05, 4.0
"""Exponents of a power law."""


@dataclass(frozen=True)
class TracedSignals:
    """Scores of some windows of a document, one a row, as a step's (implements `policies.Signals`, lists aside)."""

    lengths: Tensor
    scores: tuple[Tensor, Tensor]
    memory: Memory | None = None

    @classmethod
    def of(cls, windows: Windows, selection: Selection) -> TracedSignals:
        """Under the selection's layers."""
        lookahead = lookahead_sum(windows, [entry.layer for entry in selection.lookahead])
        return cls(windows.prefix, (lookahead, windows.history[selection.history.layer].float()))

    def rows(self) -> list[TracedSignals]:
        """Window by window."""
        at = [slice(row, row + 1) for row in range(len(self.lengths))]
        return [replace(self, lengths=self.lengths[i], scores=(self.scores[0][i], self.scores[1][i])) for i in at]

    def lookahead(self) -> Tensor:
        return self.scores[0]

    def history(self) -> Tensor:
        return self.scores[1]

    def prefix_keys(self) -> Tensor:
        raise NotImplementedError("traces hold no keys")

    def prefix_values(self) -> Tensor:
        raise NotImplementedError("traces hold no keys")

    def lookahead_rows(self) -> list[Tensor]:
        raise NotImplementedError("traces hold no scores by head")


def arr_of(windows: Windows, policy: Dustin) -> Tensor:
    """Windowed ARR of what a method keeps, [W] fp64. One that learns from step to step takes the windows for steps."""
    assert policy.selection is not None
    signals = TracedSignals.of(windows, policy.selection)
    if isinstance(policy, DustinFeedback):
        memory = SplitFeedback(policy.selection, 1, windows.prefix.device)
        kept = torch.cat([policy.select(replace(row, memory=memory))[0, :, 0] for row in signals.rows()])
    else:
        kept = policy.select(signals)[0, :, 0]
    return arr(windows, mass(windows.truth, kept).sum(-1))


def fit_split(documents: Documents, selection: Selection) -> Split:
    """Everything that can be learned from traces; the rest is as the selection has it, or its defaults.

    Raises:
        NothingMeasuredError: there are no documents, or their traces are empty or not finite.
    """
    ahead, past = fit_laws(documents, selection)
    return split_of(selection).model_copy(
        update={
            "weight": fit_weight(documents, selection),
            "lookahead_law": ahead,
            "history_law": past,
            "handicap": fit_handicap(documents, selection),
        }
    )


def fit_weight(documents: Documents, selection: Selection) -> float:
    """The weight of lookahead in a merged ranking with the best mean ARR, the smallest of equals.

    The embedded pair's KL asks for more lookahead than its ARR does: `tools/study_splits.py` compares weights by both.
    """
    return WEIGHTS[_best(documents, [DustinMerged(_with(selection, weight=weight)) for weight in WEIGHTS])]


def fit_laws(documents: Documents, selection: Selection) -> tuple[PowerLaw, PowerLaw]:
    """The target's attention expected at a share of lookahead, and of history.

    Fitted where lists end: on the ranks from an eighth of what is free to four times that.
    """
    free = selection.budget - selection.sink - selection.window
    found: tuple[list[tuple[Tensor, Tensor]], ...] = ([], [])
    for windows in usable(documents):
        eligible = eligible_positions(
            windows.prefix, windows.truth.shape[-1], sink=selection.sink, window=selection.window
        )
        truth = shares(windows.truth, eligible)
        for pairs, scores in zip(found, TracedSignals.of(windows, selection).scores, strict=True):
            positions = ranked(scores, eligible, 4 * free)[:, free // 8 :]
            there = positions >= 0
            share = shares(scores, eligible).gather(1, positions.clamp(min=0))[there]
            pairs.append((share.double().cpu(), truth.gather(1, positions.clamp(min=0))[there].double().cpu()))
    ahead, past = (power_law(*(torch.cat(side) for side in zip(*pairs, strict=True))) for pairs in found)
    return ahead, past


def power_law(share: Tensor, attention: Tensor) -> PowerLaw:
    """Least squares in logarithms, through the means of both over tokens whose shares are about as large.

    Means come first, since a token's attention varies over orders of magnitude and may be 0: what counts is what a
    score promises on average. A group weighs as many as it has tokens.

    Args:
        share, attention: [tokens] fp64, not negative.
    """
    seen = share > 0
    share, attention = share[seen], attention[seen]
    if not len(share) or not float(attention.sum()):
        return PowerLaw(factor=1, exponent=1)
    group = (share.log10() * _BINS_PER_DECADE).floor().long()
    group -= group.min()
    count = torch.bincount(group).double()
    sums = [torch.bincount(group, values) for values in (share, attention)]
    full = (count > 0) & (sums[1] > 0)
    weight = count[full] / count[full].sum()
    x, y = ((total[full] / count[full]).log() for total in sums)
    x0, y0 = (weight * x).sum(), (weight * y).sum()
    spread = float((weight * (x - x0) ** 2).sum())
    slope = float((weight * (x - x0) * (y - y0)).sum()) / spread if spread > 0 else 1.0
    slope = min(max(slope, _FLATTEST), _STEEPEST)
    return PowerLaw(factor=float((y0 - slope * x0).exp()), exponent=slope)


def fit_handicap(documents: Documents, selection: Selection) -> float:
    """What lookahead's side of the feedback is multiplied by, with the best mean ARR, the smallest of equals.

    The windows of a document stand for steps, though they may lie further apart.
    """
    policies = [DustinFeedback(_with(selection, handicap=handicap)) for handicap in HANDICAPS]
    return HANDICAPS[_best(documents, policies)]


def _best(documents: Documents, policies: Sequence[Dustin]) -> int:
    def measure(windows: Windows) -> Tensor:
        return torch.stack([arr_of(windows, policy) for policy in policies])

    return first_best(over_documents(documents, measure).mean(0))


def _with(selection: Selection, **fields: float) -> Selection:
    return selection.model_copy(update={"split": split_of(selection).model_copy(update=fields)})
