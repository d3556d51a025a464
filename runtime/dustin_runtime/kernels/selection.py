"""The kept list of every sequence in two launches: candidates per chunk, then the choice among them.

Reference: `dustin_runtime.selection.select_reference`, whose result this equals position for position. The same
launches choose lists of several sizes at once, and estimate what they recover, for `kernels.judge`.

The k-th largest score is found by building its bits from the top (scores are not negative, so their bits order as
they do): at most 16 counts, two bits each but the first, over values that stay in registers. Candidates keep the order
of positions, so ties go to the smaller position and lists come out ascending.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.judge import MOST as CEILING
from dustin_runtime.kernels import ceil_div, next_power_of_2

TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
MOST_CANDIDATES = 32768
"""Values that one program can hold; longer selections are left to the reference."""


@triton.jit
def _best(bits, count):
    """Mask of the `count` largest of `bits` [N] int32 (-1: not there), the first of equals; all, if there are fewer."""
    threshold = (1 << 30) * (tl.sum((bits >= 1 << 30).to(tl.int32), 0) >= count).to(tl.int32)
    reached = 0x7FFFFFFF  # how many are at least the threshold; once they are `count`, these are the best
    shift = 28
    while (shift >= 0) & (reached != count):
        # Two bits at a time: the counts of three thresholds are summed at once, packed into one integer.
        one = (bits >= (threshold | (1 << shift))).to(tl.int64)
        two = (bits >= (threshold | (2 << shift))).to(tl.int64)
        three = (bits >= (threshold | (3 << shift))).to(tl.int64)
        counts = tl.sum(one + (two << 20) + (three << 40), 0)
        first, second, third = counts & 0xFFFFF, (counts >> 20) & 0xFFFFF, counts >> 40
        digit = (first >= count).to(tl.int32) + (second >= count).to(tl.int32) + (third >= count).to(tl.int32)
        at_digit = tl.where(digit == 3, third, tl.where(digit == 2, second, first)).to(tl.int32)
        reached = tl.where(digit == 0, reached, at_digit)
        threshold |= digit << shift
        shift -= 2
    chosen = bits >= threshold
    if reached > count:
        above = bits > threshold
        room = count - tl.sum(above.to(tl.int32), 0)
        equal = bits == threshold
        if tl.sum(equal.to(tl.int32), 0) > room:  # a tie across the border
            chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    return chosen


@triton.jit
def _bits(scores):
    """Of non-negative floats, ordered as they are; without the sign bit, -0.0 equals 0.0."""
    return scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _candidates(
    lookahead, history, lengths, found, found_bits, sums, lookahead_stride, history_stride, columns, sink, window,
    m, others,
    CHUNK: tl.constexpr, MOST: tl.constexpr, CHUNKS: tl.constexpr, JUDGED: tl.constexpr,
):  # fmt: skip
    """One program: the `m` or `others` best positions of one chunk of one score list, lookahead or history.

    JUDGED: also the sum of its scores over the prefix.
    """
    chunk = tl.program_id(0)
    which = tl.program_id(1)
    sequence = tl.program_id(2)
    position = chunk * CHUNK + tl.arange(0, CHUNK)
    length = tl.load(lengths + sequence)
    eligible = (position >= sink) & (position < length - window) & (position < columns)
    read = eligible
    if JUDGED:
        read = (position < length) & (position < columns)
    if which == 0:
        scores = tl.load(lookahead + sequence.to(tl.int64) * lookahead_stride + position, mask=read, other=0.0)
        count = m
    else:
        scores = tl.load(history + sequence.to(tl.int64) * history_stride + position, mask=read, other=0.0)
        count = others
    if JUDGED:
        tl.store(sums + (sequence * 2 + which) * CHUNKS + chunk, tl.sum(scores.to(tl.float64), 0))
    if count == 0:
        return
    bits = tl.where(eligible, _bits(scores), -1)
    chosen = _best(bits, count) & eligible
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    base = ((sequence * 2 + which) * CHUNKS + chunk) * MOST
    slot = tl.arange(0, CHUNK)
    tl.store(found_bits + base + slot, -1, mask=(slot >= tl.sum(chosen.to(tl.int32), 0)) & (slot < MOST))
    tl.store(found_bits + base + place, bits, mask=chosen)
    tl.store(found + base + place, position, mask=chosen)


@triton.jit
def _choose(
    lookahead, history, lengths, found, found_bits, unsorted, kept, lookahead_stride, history_stride, sink, window,
    m, rest, longest, cuts, coefficients, sums, estimates,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr,
    HAS_LOOKAHEAD: tl.constexpr, HAS_HISTORY: tl.constexpr, JUDGED: tl.constexpr, CEILING: tl.constexpr,
    CHUNKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program: the kept list of one sequence, and if JUDGED its estimate, by one of `cuts`.

    Args:
        found, found_bits: [batch, 2, CHUNKS, MOST] int32, positions of candidates and bits of their scores.
        unsorted, kept: [cuts or 1, batch, longest] int32 and int64; estimates: [cuts, batch] fp64.
        cuts: [cuts, 2] int32, in place of `m` and `rest`; coefficients: [cuts, 3] fp64.
        sums: [batch, 2, CHUNKS] fp64, of both scores.
    """
    sequence = tl.program_id(0)
    line = tl.program_id(1) * tl.num_programs(0) + sequence
    if JUDGED:
        m = tl.load(cuts + tl.program_id(1) * 2)
        rest = tl.load(cuts + tl.program_id(1) * 2 + 1)
    length = tl.load(lengths + sequence).to(tl.int32)
    unsorted += line * longest
    entry = tl.arange(0, LIST)
    slot = tl.arange(0, BLOCK)
    there = slot < COUNT

    # Protected tokens: the first, then those of the window that are not among them.
    count = tl.minimum(sink, length)
    tl.store(unsorted + entry, entry, mask=entry < count)
    window_begin = tl.maximum(length - window, count)
    tl.store(unsorted + count + entry, window_begin + entry, mask=entry < length - window_begin)
    count += length - window_begin

    if HAS_LOOKAHEAD:
        base = sequence * 2 * COUNT
        bits = tl.load(found_bits + base + slot, mask=there, other=-1)
        position = tl.load(found + base + slot, mask=bits >= 0, other=0)
        chosen = _best(bits, m) & (bits >= 0)
        tl.store(unsorted + count + tl.cumsum(chosen.to(tl.int32), 0) - 1, position, mask=chosen)
        count += tl.sum(chosen.to(tl.int32), 0)
        # What lookahead chose is above this score, or has it and does not lie behind this position.
        least = tl.min(tl.where(chosen, bits, 0x7FFFFFFF), 0)
        behind = tl.max(tl.where(chosen & (bits == least), position, -1), 0)
    if HAS_HISTORY:
        base = (sequence * 2 + 1) * COUNT
        bits = tl.load(found_bits + base + slot, mask=there, other=-1)
        position = tl.load(found + base + slot, mask=bits >= 0, other=0)
        if HAS_LOOKAHEAD:
            scores = tl.load(lookahead + sequence.to(tl.int64) * lookahead_stride + position, mask=bits >= 0, other=0.0)
            ahead = _bits(scores)
            bits = tl.where((ahead > least) | ((ahead == least) & (position <= behind)), -1, bits)
        chosen = _best(bits, rest) & (bits >= 0)
        tl.store(unsorted + count + tl.cumsum(chosen.to(tl.int32), 0) - 1, position, mask=chosen)
        count += tl.sum(chosen.to(tl.int32), 0)

    # Ascending order: an entry's place is the number of entries below it.
    tl.debug_barrier()
    mine = tl.load(unsorted + entry, mask=entry < count, other=0x7FFFFFFF)
    rank = tl.zeros([LIST], tl.int32)
    for begin in range(0, count, TILE):
        other = begin + tl.arange(0, TILE)
        theirs = tl.load(unsorted + other, mask=other < count, other=0x7FFFFFFF)
        rank += tl.sum((theirs[:, None] < mine[None, :]).to(tl.int32), 0)
    kept += line * longest
    tl.store(kept + rank, mine.to(tl.int64), mask=entry < count)
    tl.store(kept + entry, tl.full([LIST], -1, tl.int64), mask=(entry >= count) & (entry < longest))
    if JUDGED:
        of = coefficients + tl.program_id(1) * 3
        lookahead += sequence.to(tl.int64) * lookahead_stride
        history += sequence.to(tl.int64) * history_stride
        sums += sequence * 2 * CHUNKS
        ahead = _share(lookahead, mine, entry < count, sums, CHUNKS, PARTS)
        back = _share(history, mine, entry < count, sums + CHUNKS, CHUNKS, PARTS)
        estimate = tl.load(of) + tl.load(of + 1) * back + tl.load(of + 2) * ahead
        # What is not a number stays so.
        estimate = tl.where(estimate < 0, 0.0, tl.where(estimate > CEILING, CEILING, estimate))
        tl.store(estimates + line, tl.where(length <= sink + window + m + rest, CEILING, estimate))


@triton.jit
def _share(scores, positions, listed, sums, CHUNKS: tl.constexpr, PARTS: tl.constexpr):
    """What of a sequence's scores [positions] lies on `positions` [LIST], where `listed` [LIST]; fp64.

    Args:
        sums: [CHUNKS] fp64, of the prefix's scores by chunk; PARTS: CHUNKS as a power of 2.
    """
    held = tl.sum(tl.load(scores + positions, mask=listed, other=0.0).to(tl.float64), 0)
    part = tl.arange(0, PARTS)
    whole = tl.sum(tl.load(sums + part, mask=part < CHUNKS, other=0.0), 0)
    return held / tl.where(whole < TINY, TINY, whole)  # what is not a number stays so, which a maximum loses


def chunking(columns: int, most: int) -> tuple[int, int, int]:
    """Positions per chunk, chunks, and candidates kept of each."""
    chunk = 4096
    while ceil_div(columns, chunk) * min(chunk, most) > 16384 and chunk < 16384:
        chunk *= 2
    return chunk, ceil_div(columns, chunk), min(chunk, most)


def fits(columns: int, budget: int, sink: int, window: int) -> bool:
    """Whether the kernels can do a selection of this size."""
    _, chunks, most = chunking(columns, budget - sink - window)
    return chunks * most <= MOST_CANDIDATES and budget <= 8192


def select(
    lookahead: Tensor | None,
    history: Tensor | None,
    lengths: Tensor,
    *,
    budget: int,
    m: int,
    sink: int,
    window: int,
) -> Tensor:
    """Arguments and result as `dustin_runtime.selection.select`; rows of scores are contiguous."""
    rest = budget - sink - window - m
    scores = lookahead if m else history
    assert scores is not None
    ahead, back = (scores if x is None else x for x in (lookahead, history))
    kept, _ = choose(ahead, back, lengths, [(m, rest)], budget, sink, window)
    return kept[0]


class Cuts(NamedTuple):
    """Of `judge.Cut`s, on the device.

    Attributes:
        shares: [cuts, 2] int32, what lookahead and history choose; coefficients: [cuts, 3] fp64.
    """

    shares: Tensor
    coefficients: Tensor


def choose(
    lookahead: Tensor,
    history: Tensor,
    lengths: Tensor,
    shares: Sequence[tuple[int, int]],
    longest: int,
    sink: int,
    window: int,
    cuts: Cuts | None = None,
) -> tuple[Tensor, Tensor]:
    """Lists of several sizes.

    Args:
        lookahead, history: [batch, positions] fp32, of contiguous rows; lengths: [batch] int64, `positions` at most.
        shares: of each size, what lookahead and history choose.
        longest: the largest size, with what is protected.
        cuts: the same on the device, and how the lists are judged. None for one size that is not.

    Returns:
        kept: [sizes, batch, longest] int64; estimates: [sizes, batch] fp64, or [0, batch].
    """
    batch, columns = lookahead.shape
    device = lookahead.device
    lengths = lengths.contiguous()  # one that is expanded over rows would be read beyond its end
    m, others = max(m for m, _ in shares), max(m + rest if rest else 0 for m, rest in shares)
    chunk, chunks, most = chunking(columns, max(m + rest for m, rest in shares))
    found, found_bits = torch.empty(2, batch * 2 * chunks * most, dtype=torch.int32, device=device)
    unsorted = torch.empty(len(shares), batch, longest, dtype=torch.int32, device=device)
    kept = torch.empty(len(shares), batch, longest, dtype=torch.int64, device=device)
    sums = torch.empty(batch, 2 * chunks if cuts else 0, dtype=torch.float64, device=device)
    estimates = torch.empty(len(shares) if cuts else 0, batch, dtype=torch.float64, device=device)
    _candidates[(chunks, 2, batch)](
        lookahead, history, lengths, found, found_bits, sums, lookahead.stride(0), history.stride(0), columns,
        sink, window, m, others,
        CHUNK=chunk, MOST=most, CHUNKS=chunks, JUDGED=cuts is not None, num_warps=chunk // 512,
    )  # fmt: skip
    count = chunks * most
    _choose[(batch, len(shares))](
        lookahead, history, lengths, found, found_bits, unsorted, kept, lookahead.stride(0), history.stride(0),
        sink, window, *shares[0], longest, *(cuts or (lengths, lengths)), sums, estimates,
        COUNT=count, BLOCK=next_power_of_2(count), LIST=next_power_of_2(longest), TILE=64,
        HAS_LOOKAHEAD=m > 0, HAS_HISTORY=others > 0, JUDGED=cuts is not None, CEILING=CEILING,
        CHUNKS=chunks, PARTS=next_power_of_2(chunks), num_warps=8 if count <= 4096 else 16 if count <= 8192 else 32,
    )  # fmt: skip
    return kept, estimates
