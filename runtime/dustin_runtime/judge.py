"""How much of the attention lists are estimated to recover, and the smallest list that is estimated to suffice.

All is decided on the device, from the scores that the lists are chosen by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dustin_runtime.kernels import usable
from dustin_runtime.selection import select_reference

MOST = 1 - 2**-24
"""The largest estimate. It is below 1 also for lists of everything, so that a threshold of 1 verifies all in full."""


class Coefficients(NamedTuple):
    """Of `config.Estimate`."""

    intercept: float
    history: float
    lookahead: float


class Cut(NamedTuple):
    """A list's size, what of it lookahead chooses, and how its ARR is estimated."""

    budget: int
    m: int
    by: Coefficients


def judge(
    lookahead: Tensor,
    history: Tensor,
    lengths: Tensor,
    cuts: Sequence[Cut],
    *,
    sink: int,
    window: int,
    target_arr: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Choose each row's list as `selection.select` does, by the first of some cuts whose estimate reaches a target.

    Nothing waits for the device, so a CUDA graph can hold the call.

    Args:
        lookahead, history: [batch, positions] fp32, not negative.
        lengths: [batch] int64, tokens in each prefix, `positions` at most.
        cuts: of valid sizes, ascending.
        target_arr: if no cut reaches it, the last is taken.

    Returns:
        kept: [batch, last cut's budget] int64 ascending positions, -1 padded.
        estimate: [batch] fp64 in [0, `MOST`], the estimated ARR of these lists; NaN where scores are.
    """
    if usable(lookahead):
        from dustin_runtime.kernels import judge as kernels
        from dustin_runtime.kernels.selection import fits

        if fits(lookahead.shape[1], cuts[-1].budget, sink, window):
            return kernels.judge(
                lookahead, history, lengths, tuple(cuts), sink=sink, window=window, target_arr=target_arr
            )
    return judge_reference(lookahead, history, lengths, cuts, sink=sink, window=window, target_arr=target_arr)


def judge_reference(
    lookahead: Tensor,
    history: Tensor,
    lengths: Tensor,
    cuts: Sequence[Cut],
    *,
    sink: int,
    window: int,
    target_arr: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`judge` in plain torch, on any device."""
    longest = cuts[-1].budget
    all_history, all_lookahead = (on_prefix(scores, lengths) for scores in (history, lookahead))
    lists, estimates = [], []
    for budget, m, by in cuts:
        kept = select_reference(lookahead, history, lengths, budget=budget, m=m, sink=sink, window=window)
        held = kept[None, :, None]
        found = (
            by.intercept
            + by.history * share_on(held, history, all_history)
            + by.lookahead * share_on(held, lookahead, all_lookahead)
        )
        # A list of everything recovers everything.
        estimates.append(torch.where(lengths <= budget, MOST, found.clamp(0, MOST)))
        lists.append(torch.nn.functional.pad(kept, (0, longest - budget), value=-1))
    estimated = torch.stack(estimates)
    chosen, row = smallest(estimated, target_arr), torch.arange(len(lengths), device=lengths.device)
    return torch.stack(lists)[chosen, row], estimated[chosen, row]


def smallest(estimates: Tensor, target_arr: float) -> Tensor:
    """[batch] int64, which of ascending cuts is the first to reach the target, else the last; estimates: [cuts, batch].
    What is not a number does not reach it."""
    missed = ~(estimates >= target_arr)
    return missed.long().cumprod(dim=0).sum(dim=0).clamp(max=len(estimates) - 1)


def share_on(kept: Tensor, scores: Tensor, whole: Tensor) -> Tensor:
    """What of the scores lies on a list, mean over lists: [batch] fp64.

    Args:
        kept: [layers or 1, batch, kv_heads or 1, k], see `Policy.select`.
        scores: [batch, positions] fp32; whole: [batch] of `on_prefix`.
    """
    layers, batch, heads, _ = kept.shape
    lists = kept.transpose(0, 1).reshape(batch, -1)
    held = scores.gather(1, lists.clamp(min=0)).masked_fill(lists < 0, 0).sum(dim=1, dtype=torch.float64)
    return held / (layers * heads) / whole.clamp(min=torch.finfo(torch.float32).tiny)


def on_prefix(scores: Tensor, lengths: Tensor) -> Tensor:
    """Sum of [batch, positions] fp32 scores over each prefix of `lengths` [batch]: [batch] fp64."""
    beyond = torch.arange(scores.shape[1], device=scores.device) >= lengths.unsqueeze(1)
    return scores.masked_fill(beyond, 0).sum(dim=1, dtype=torch.float64)
