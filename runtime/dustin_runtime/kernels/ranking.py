"""The best positions of many score lists in order of preference, in two launches: the best of each chunk, then of all.

Reference: `dustin_runtime.policies.dustin_layers.candidates_reference`, whose result this equals position for position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.kernels import next_power_of_2
from dustin_runtime.kernels.selection import MOST_CANDIDATES, _best, _bits, chunking


@triton.jit(do_not_specialize=["lists", "batch", "count"])
def _best_of_chunk(
    scores, lengths, found, found_bits, columns, lists, batch, sink, window, count,
    CHUNK: tl.constexpr, MOST: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One program: the best positions of one chunk of one list, ascending; `found_bits` is -1 behind them."""
    chunk = tl.program_id(0)
    one = tl.program_id(1)
    position = chunk * CHUNK + tl.arange(0, CHUNK)
    end = tl.load(lengths + one // lists % batch) - window
    eligible = (position >= sink) & (position < end) & (position < columns)
    values = tl.load(scores + one.to(tl.int64) * columns + position, mask=eligible, other=0.0)
    bits = tl.where(eligible, _bits(values), -1)
    chosen = _best(bits, count) & eligible
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    base = (one * CHUNKS + chunk) * MOST
    slot = tl.arange(0, CHUNK)
    tl.store(found_bits + base + slot, -1, mask=(slot >= tl.sum(chosen.to(tl.int32), 0)) & (slot < MOST))
    tl.store(found_bits + base + place, bits, mask=chosen)
    tl.store(found + base + place, position, mask=chosen)


@triton.jit(do_not_specialize=["count"])
def _rank(
    found, found_bits, best, best_bits, ranked, sink, count,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: the order of one list. A position's place is how many are better; behind the last, see `ranked`."""
    one = tl.program_id(0)
    slot = tl.arange(0, BLOCK)
    bits = tl.load(found_bits + one * COUNT + slot, mask=slot < COUNT, other=-1)
    position = tl.load(found + one * COUNT + slot, mask=bits >= 0, other=0)
    chosen = _best(bits, count) & (bits >= 0)
    total = tl.sum(chosen.to(tl.int32), 0)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    best += one * count
    best_bits += one * count
    tl.store(best + place, position, mask=chosen)
    tl.store(best_bits + place, bits, mask=chosen)
    tl.debug_barrier()
    entry = tl.arange(0, LIST)
    mine = tl.load(best_bits + entry, mask=entry < total, other=-1)
    position = tl.load(best + entry, mask=entry < total, other=0)
    better = tl.zeros([LIST, TILE], tl.int32)  # columns apart until the end: threads have to agree only once
    for begin in range(0, total, TILE):
        other = begin + tl.arange(0, TILE)
        theirs = tl.load(best_bits + other, mask=other < total, other=-1)
        # They ascend by position, so an equal one in front is better.
        first = other[None, :] < entry[:, None]
        better += (theirs[None, :] > mine[:, None] - first.to(tl.int32)).to(tl.int32)
    ranked += one * count
    tl.store(ranked + tl.sum(better, 1), position.to(tl.int64), mask=entry < total)
    tl.store(ranked + entry, (sink + entry).to(tl.int64), mask=(entry >= total) & (entry < count))


def fits(columns: int, count: int) -> bool:
    """Whether the kernels can rank so many of so many positions."""
    _, chunks, most = chunking(columns, count)
    return chunks * most <= MOST_CANDIDATES and count <= 2048


def candidates(mass: Tensor, lengths: Tensor, count: int, *, sink: int, window: int) -> Tensor:
    """Arguments and result as of `policies.dustin_layers.candidates`."""
    mass = mass.contiguous()
    batch, lists, columns = mass.shape[-3:]
    every = mass.numel() // columns
    chunk, chunks, most = chunking(columns, count)
    found, found_bits = torch.empty(2, every * chunks * most, dtype=torch.int32, device=mass.device)
    best, best_bits = torch.empty(2, every * count, dtype=torch.int32, device=mass.device)
    order = torch.empty(*mass.shape[:-1], count, dtype=torch.int64, device=mass.device)
    _best_of_chunk[(chunks, every)](
        mass, lengths, found, found_bits, columns, lists, batch, sink, window, count,
        CHUNK=chunk, MOST=most, CHUNKS=chunks, num_warps=chunk // 512,
    )  # fmt: skip
    total, width = chunks * most, next_power_of_2(count)
    warps = 16 if total > 4096 else 8
    _rank[(every,)](
        found, found_bits, best, best_bits, order, sink, count,
        COUNT=total, BLOCK=next_power_of_2(total), LIST=width, TILE=min(32, 1024 * warps // width), num_warps=warps,
    )  # fmt: skip
    return order
