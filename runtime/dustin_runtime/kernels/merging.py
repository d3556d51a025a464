"""Every layer's list in one launch: the shared one, and the layer's first candidates that are not in it, ascending.

Reference: `dustin_runtime.policies.dustin_layers.merge_reference`, whose result this equals position for position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.kernels import next_power_of_2

_ABSENT = tl.constexpr(0x7FFFFFFF)
"""Sorts behind every position."""


@triton.jit(do_not_specialize=["batch", "lists", "shared_count", "count", "own", "window"])
def _merge(
    shared, candidates, lengths, merged, shared_stride, batch, lists, shared_count, count, own, window,
    STEPS: tl.constexpr, CANDIDATES: tl.constexpr, OWN: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: one list. What it takes lies in the list's own place until its order is known."""
    one = tl.program_id(0)
    sequence = one // lists % batch
    width = shared_count + own
    shared += sequence * shared_stride
    merged += one.to(tl.int64) * width
    entry = tl.arange(0, CANDIDATES)
    mine = tl.load(candidates + one.to(tl.int64) * count + entry, mask=entry < count, other=_ABSENT).to(tl.int32)

    # How many of the shared list are smaller, by bisection.
    smaller = tl.zeros([CANDIDATES], tl.int32)
    for step in tl.static_range(STEPS):
        probe = smaller + (1 << (STEPS - 1 - step)) - 1
        value = tl.load(shared + probe, mask=probe < shared_count, other=-1).to(tl.int32)
        smaller += tl.where((value >= 0) & (value < mine), 1 << (STEPS - 1 - step), 0)
    same = tl.load(shared + smaller, mask=smaller < shared_count, other=-1).to(tl.int32) == mine
    free = (entry < count) & ~same & (mine < tl.load(lengths + sequence) - window)
    order = tl.cumsum(free.to(tl.int32), 0)
    total = tl.minimum(tl.sum(free.to(tl.int32), 0), own)
    packed = (smaller.to(tl.int64) << 32) | mine.to(tl.int64)
    tl.store(merged + order - 1, packed, mask=free & (order <= own))
    tl.debug_barrier()

    # A taken one's place: how many of the shared list, and of the taken ones, are smaller.
    turn = tl.arange(0, OWN)
    packed = tl.load(merged + turn, mask=turn < total, other=0)
    mine_taken = packed.to(tl.int32)
    below = tl.zeros([OWN, TILE], tl.int32)  # columns apart until the end: threads have to agree only once
    for begin in range(0, total, TILE):
        other = begin + tl.arange(0, TILE)
        theirs = tl.load(merged + other, mask=other < total, other=_ABSENT).to(tl.int32)
        below += (theirs[None, :] < mine_taken[:, None]).to(tl.int32)
    place = (packed >> 32).to(tl.int32) + tl.sum(below, 1)
    tl.debug_barrier()
    slot = tl.arange(0, LIST)
    tl.store(merged + slot, tl.full([LIST], -1, tl.int64), mask=slot < width)
    tl.debug_barrier()
    tl.store(merged + place, mine_taken.to(tl.int64), mask=turn < total)
    tl.debug_barrier()

    # The shared list, with its padding, fills what is left.
    left = tl.load(merged + slot, mask=slot < width, other=0) < 0
    index = tl.cumsum(left.to(tl.int32), 0) - 1
    rest = tl.load(shared + index, mask=left & (index < shared_count), other=-1)
    tl.store(merged + slot, rest, mask=left)


def fits(shared: int, count: int, own: int) -> bool:
    """Whether a program can hold such lists."""
    return shared + own <= 4096 and count <= 4096 and own <= 2048


def merge(shared: Tensor, candidates: Tensor, lengths: Tensor, own: int, window: int) -> Tensor:
    """Arguments and result as of `policies.dustin_layers.merge`."""
    shared, candidates = shared.contiguous(), candidates.contiguous()
    layers, batch, lists, count = candidates.shape
    width = shared.shape[1] + own
    merged = torch.empty(layers, batch, lists, width, dtype=torch.int64, device=shared.device)
    taken = next_power_of_2(max(own, 32))
    warps = max(4, min(16, taken // 64))
    _merge[(layers * batch * lists,)](
        shared, candidates, lengths, merged, shared.stride(0), batch, lists, shared.shape[1], count, own, window,
        STEPS=shared.shape[1].bit_length(), CANDIDATES=next_power_of_2(count), OWN=taken, LIST=next_power_of_2(width),
        TILE=min(32, 1024 * warps // taken), num_warps=warps,
    )  # fmt: skip
    return merged
