"""What hybrid selection recovers of one document's windows at any split, without selecting anew for each.

Kept sets are nested: for m + 1 the draft's list grows by its next token and the target's gives up its last one. So
two ranked lists and the truth on them hold the whole curve ARR(m), exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dustin_profile.search.arr import arr, mass
from dustin_profile.search.budget import Budget, Split
from dustin_profile.traces.windows import Windows
from dustin_runtime.budget import check_budget
from dustin_runtime.selection import eligible_positions, ranked

_PART = 1 << 22
"""Most scores ranked at a time: some 150 MB of keys and their copies."""
_IN_CACHE = 1 << 16
"""Most entries of lists compared at a time on a CPU."""
_GPU_PART = 1 << 25
"""The same where launches cost more than memory: some 1.2 GB."""


@dataclass(frozen=True, eq=False)
class HistoryList:
    """The target's side of one document: ranked once, then paired with any draft signal.

    Leading dimensions of the scores, such as layers, lead the list too.
    """

    truth: Tensor
    """[W, N] fp32."""
    eligible: Tensor
    """[W, N] bool: positions outside sink and window."""
    protected: Tensor
    """[W] fp64: mass on sink and window."""
    positions: Tensor
    """[..., W, free] int64: by decreasing history score, -1 where there are fewer."""
    mass: Tensor
    """[..., W, free] fp64: truth at `positions`."""

    @classmethod
    def of(cls, windows: Windows, history: Tensor, budget: Budget) -> HistoryList:
        """Rank by `history`, [..., W, N] fp32.

        Raises:
            ConfigError: the budget is invalid.
        """
        check_budget(budget.k, 0, budget.sink, budget.window)
        truth = windows.truth
        eligible = eligible_positions(windows.prefix, truth.shape[-1], sink=budget.sink, window=budget.window)
        positions = ranked(history, eligible, budget.free)
        protected = truth.double().masked_fill(eligible, 0).sum(-1)
        return cls(truth, eligible, protected, positions, mass(truth, positions))

    def recovered_alone(self) -> Tensor:
        """Prefix mass, [..., W] fp64, on the tokens that `select` keeps if history chooses all that are free."""
        return self.protected + self.mass.sum(-1)

    def recovered(self, lookahead: Tensor, splits: Sequence[Split]) -> Tensor:
        """Prefix mass on the tokens that `select` keeps at each split.

        Args:
            lookahead: [..., W, N] fp32: any number of draft signals for the same windows.
            splits: each `free` at most that of the budget ranked for.

        Returns:
            [..., W, splits] fp64.
        """
        longest = max(split.m for split in splits)
        draft = ranked(lookahead, self.eligible, longest)
        draft_mass = torch.nn.functional.pad(mass(self.truth, draft).cumsum(-1), (1, 0))
        draft_rank = self._draft_rank(draft)
        size = max((_GPU_PART if draft.is_cuda else _IN_CACHE) // draft_rank.numel(), 1)
        parts = [splits[first : first + size] for first in range(0, len(splits), size)]
        target_mass = torch.cat([self._target_mass(draft_rank, part) for part in parts], -1)
        return draft_mass[..., [split.m for split in splits]] + target_mass + self.protected.unsqueeze(-1)

    def _target_mass(self, draft_rank: Tensor, splits: Sequence[Split]) -> Tensor:
        """Mass on what the target's side adds at each split, [..., W, splits] fp64."""
        free, m = torch.tensor(splits, device=draft_rank.device).T.unsqueeze(2)  # [splits, 1] each
        longest = max(split.free for split in splits)
        open_ = draft_rank[..., :longest].unsqueeze(-2) >= m
        if any(split.free < longest for split in splits):
            open_ &= torch.arange(longest, device=m.device) < free
        kept = open_ & (open_.cumsum(-1, dtype=torch.int32) <= free - m)
        found: Tensor = (self.mass[..., :longest].unsqueeze(-2) * kept).sum(-1)
        return found

    def _draft_rank(self, draft: Tensor) -> Tensor:
        """[..., W, free] int32: rank of each position of this list in the draft's, its length where it is not in it."""
        columns = self.truth.shape[-1]
        absent = draft.shape[-1]
        ranks = torch.arange(absent, dtype=torch.int32, device=draft.device).expand_as(draft)
        # One column more takes the ranks of -1.
        table = ranks.new_full((*draft.shape[:-1], columns + 1), absent)
        table.scatter_(-1, draft.where(draft >= 0, columns), ranks)
        own = self.positions.where(self.positions >= 0, columns)
        return table.gather(-1, own.expand(*draft.shape[:-1], -1))


def layer_parts(layers: Tensor) -> Iterator[Tensor]:
    """Split [layers, W, N] fp16 scores into fp32 parts: many rows to a call, yet bounded memory."""
    size = max((_GPU_PART if layers.is_cuda else _PART) // layers[0].numel(), 1)
    for start in range(0, len(layers), size):
        yield layers[start : start + size].float()


def lookahead_sum(windows: Windows, layers: Iterable[int]) -> Tensor:
    """Draft score of several layers (Eq. 5), [W, N] fp32, added in the order given; zeros for none."""
    total = torch.zeros_like(windows.truth)
    for layer in layers:
        total = total + windows.lookahead[layer].float()
    return total


def arr_curve(windows: Windows, target_layer: int, draft_layers: Sequence[int], budget: Budget) -> Tensor:
    """Windowed ARR of hybrid selection at every m from 0 to k - sink - window, [W, m] fp64.

    Raises:
        ConfigError: the budget is invalid.
    """
    splits = [Split(budget.free, m) for m in range(budget.free + 1)]
    history = HistoryList.of(windows, windows.history[target_layer].float(), budget)
    recovered = history.recovered(lookahead_sum(windows, draft_layers), splits)
    return arr(windows, recovered.mT).mT
