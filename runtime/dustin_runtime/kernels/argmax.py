"""The most probable token and whether its row of logits is sound, in one reading of the logits.

Reference: `torch.argmax` and `torch.isfinite`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.kernels import ceil_div, dependent_launch, next_power_of_2
from dustin_runtime.kernels.workspace import counters


@triton.jit
def _argmax(
    logits, best_value, best_id, sound, ids, finite, counter, stride, vocab,
    BLOCK: tl.constexpr, SHARE: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1)
    split = tl.program_id(0)
    # Column by column of a block, so that threads have to agree only once, at the end. NaN is never above.
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    turns = tl.full([BLOCK], SHARE // BLOCK, tl.int32)
    spoilt = tl.zeros([BLOCK], tl.float32)  # NaN once a value was not finite
    place = tl.arange(0, BLOCK)
    mine = logits + row.to(tl.int64) * stride + split * SHARE
    if split * SHARE + SHARE <= vocab:  # without a mask, loads are wide
        for turn in tl.static_range(SHARE // BLOCK):
            value = tl.load(mine + turn * BLOCK + place).to(tl.float32)
            spoilt += value * 0.0
            turns = tl.where(value > tops, turn, turns)
            tops = tl.where(value > tops, value, tops)
    else:
        for turn in tl.static_range(SHARE // BLOCK):
            inside = split * SHARE + turn * BLOCK + place < vocab
            value = tl.load(mine + turn * BLOCK + place, mask=inside, other=0.0).to(tl.float32)
            spoilt += value * 0.0
            higher = inside & (value > tops)
            turns = tl.where(higher, turn, turns)
            tops = tl.where(higher, value, tops)
    top = tl.max(tops, 0)
    # Where all are -inf or NaN: the first column.
    column = split * SHARE + tl.where(turns == SHARE // BLOCK, place, turns * BLOCK + place)
    tl.store(best_value + row * SPLITS + split, top)
    tl.store(best_id + row * SPLITS + split, tl.min(tl.where(tops == top, column, 0x7FFFFFFF), 0))
    tl.store(sound + row * SPLITS + split, tl.min((spoilt == 0.0).to(tl.int32), 0))
    tl.debug_barrier()
    arrived = tl.atomic_add(counter + row, 1, sem="acq_rel")
    if arrived == SPLITS - 1:
        slot = tl.arange(0, SLOTS)
        there = slot < SPLITS
        values = tl.load(best_value + row * SPLITS + slot, mask=there, other=float("-inf"), cache_modifier=".cg")
        ids_of = tl.load(best_id + row * SPLITS + slot, mask=there, other=0x7FFFFFFF, cache_modifier=".cg")
        sounds = tl.load(sound + row * SPLITS + slot, mask=there, other=1, cache_modifier=".cg")
        tl.store(ids + row, tl.min(tl.where(values == tl.max(values, 0), ids_of, 0x7FFFFFFF), 0).to(tl.int64))
        tl.store(finite + row, tl.min(sounds, 0).to(tl.int1))
        tl.store(counter + row, 0)


def argmax_finite(logits: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Arg-max over the first `vocab` columns, the smallest of equals, and whether all of them are finite.

    Args:
        logits: [..., columns], contiguous. NaN never wins.

    Returns:
        ids [...] int64; finite [...] bool.
    """
    rows = logits.numel() // logits.shape[-1]
    block, share = 2048, 8 * 2048
    splits = ceil_div(vocab, share)
    best_value = torch.empty(rows * splits, dtype=torch.float32, device=logits.device)
    best_id, sound = torch.empty(2, rows * splits, dtype=torch.int32, device=logits.device)
    ids = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    finite = torch.empty(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    _argmax[(splits, rows)](
        logits, best_value, best_id, sound, ids, finite, counters(logits.device, rows), logits.shape[-1], vocab,
        BLOCK=block, SHARE=share, SPLITS=splits, SLOTS=next_power_of_2(splits), num_warps=4,
        **dependent_launch(logits.device),
    )  # fmt: skip
    return ids, finite
