"""Lists of several sizes, chosen and judged by the launches of `kernels.selection`, of which a third takes one.

Reference: `dustin_runtime.judge.judge_reference`, from which it differs by the order in which an estimate is summed.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.judge import Cut
from dustin_runtime.kernels import next_power_of_2
from dustin_runtime.kernels.selection import Cuts, choose


@triton.jit
def _take(
    lists, estimates, kept, estimate, target, batch, longest, cuts,
    CUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: of one sequence's lists the first whose estimate reaches the target, else the last.

    Args:
        lists: [cuts, batch, longest] int64; estimates: [cuts, batch] fp64; target: [1] fp64.
        kept, estimate: [batch, longest] and [batch], the results.
    """
    sequence = tl.program_id(0)
    cut = tl.arange(0, CUTS)
    each = tl.load(estimates + cut * batch + sequence, mask=cut < cuts, other=0.0)
    reached = (each >= tl.load(target)) & (cut < cuts)
    first = tl.min(tl.where(reached, cut, cuts - 1), 0)
    tl.store(estimate + sequence, tl.load(estimates + first * batch + sequence))
    mine = lists + (first * batch + sequence) * longest
    for begin in range(0, longest, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        tl.store(kept + sequence * longest + entry, tl.load(mine + entry, mask=entry < longest), mask=entry < longest)


def judge(
    lookahead: Tensor,
    history: Tensor,
    lengths: Tensor,
    cuts: tuple[Cut, ...],
    *,
    sink: int,
    window: int,
    target_arr: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as `dustin_runtime.judge.judge`; rows of scores are contiguous."""
    shares = tuple((cut.m, cut.budget - sink - window - cut.m) for cut in cuts)
    longest, (held, target) = cuts[-1].budget, _held(cuts, shares, target_arr, lookahead.device)
    lists, estimates = choose(lookahead, history, lengths, shares, longest, sink, window, held)
    if len(cuts) == 1:
        return lists[0], estimates[0]
    kept, estimate = torch.empty_like(lists[0]), torch.empty_like(estimates[0])
    _take[(len(kept),)](
        lists, estimates, kept, estimate, target, len(kept), longest, len(cuts),
        CUTS=next_power_of_2(len(cuts)), BLOCK=512, num_warps=4,
    )  # fmt: skip
    return kept, estimate


@functools.cache  # without a limit: a captured graph holds the addresses
def _held(
    cuts: tuple[Cut, ...], shares: tuple[tuple[int, int], ...], target_arr: float, device: torch.device
) -> tuple[Cuts, Tensor]:
    """Cuts and target on the device, fp64 as they are."""
    coefficients = torch.tensor([cut.by for cut in cuts], dtype=torch.float64, device=device)
    target = torch.tensor([target_arr], dtype=torch.float64, device=device)
    return Cuts(torch.tensor(shares, dtype=torch.int32, device=device), coefficients), target
