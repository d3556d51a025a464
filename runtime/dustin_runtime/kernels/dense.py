"""Attention of a few new tokens over the whole cache: split over keys, GQA packed into one tile, ragged lengths.

Reference: `dustin_runtime.attention.dense.dense_reference`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.kernels import ceil_div, dependent_launch, fence, next_power_of_2, processors, row_tile
from dustin_runtime.kernels.online_softmax import MOST_IN_A_TEAM, attend_tile, finish, packed_queries
from dustin_runtime.kernels.workspace import counters
from dustin_runtime.scaled import Held, parts


@triton.jit(do_not_specialize=["batch", "tokens", "kv_heads", "group", "tiles", "programs", "least"])
def _dense(
    q, k, v, k_scale, v_scale, start, full, out, partials, tops, totals, counter,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    batch, tokens, scale, kv_heads, group, tiles, programs, least,
    ROWS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, BATCH: tl.constexpr, SCALED: tl.constexpr,
    GUARDED: tl.constexpr, TEAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one KV head of one sequence, ROWS of its queries, one share of its keys.

    Sequences share the programs in proportion to their lengths, which only the device knows: each program finds its
    own place from the lengths of all.

    SCALED: keys and values are to be multiplied by the scale of their KV head: logits and the result are, instead.
    GUARDED: only the sequences that `full` names have programs; if there are none, all end here.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    index = tl.arange(0, BATCH)
    lengths = tl.load(start + index, mask=index < batch, other=0).to(tl.int32) + tokens
    served = index < batch
    if GUARDED:
        served = served & (tl.load(full + index, mask=served, other=0) != 0)
    lengths = tl.where(served, lengths, 0)
    whole = tl.sum(lengths, 0)
    if GUARDED:
        whole = tl.maximum(whole, 1)
    fraction = lengths.to(tl.float32) / whole.to(tl.float32)
    wanted = (fraction * (programs // (kv_heads * tiles)) + 0.001).to(tl.int32)  # equal lengths divide evenly
    splits = tl.maximum(tl.minimum(wanted, tl.cdiv(lengths, least)), 1)
    splits = tl.where(served, splits, 0)
    ends = tl.cumsum(splits * kv_heads * tiles, 0)
    program = tl.program_id(0)
    sequence = tl.sum((ends <= program).to(tl.int32), 0)
    if sequence >= batch:
        return
    own = index == sequence
    active = tl.sum(tl.where(own, splits, 0), 0)
    length = tl.sum(tl.where(own, lengths, 0), 0)
    first = length - tokens  # position of the first new token
    slot = tl.sum(tl.where(own, ends, 0), 0) - active * kv_heads * tiles
    place = program - slot
    stride = kv_heads * tiles
    split = place // stride
    head = place % stride // tiles
    row_tile = place % tiles
    share = tl.cdiv(tl.cdiv(length, active), KEYS) * KEYS
    begin = split * share
    end = tl.minimum(begin + share, length)

    queries, token, there, place_out = packed_queries(
        q, q_batch, q_token, q_head, sequence, head, row_tile, tokens, kv_heads, group, ROWS, D
    )
    column = tl.arange(0, D)
    if SCALED:
        of_head = sequence * kv_heads + head
        scale *= tl.load(k_scale + of_head)

    k += sequence.to(tl.int64) * k_batch + head.to(tl.int64) * k_head
    v += sequence.to(tl.int64) * v_batch + head.to(tl.int64) * v_head
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    # Keys that every row sees need no mask; the last ones, the new tokens among them, do.
    open_end = begin + tl.maximum(tl.minimum(end, first + 1) - begin, 0) // KEYS * KEYS
    for at in tl.range(begin, open_end, KEYS):
        key = at + tl.arange(0, KEYS)
        keys = tl.load(k + key[:, None] * k_token + column[None, :])
        values = tl.load(v + key[:, None] * v_token + column[None, :])
        top, total, acc = attend_tile(queries, keys, values, None, scale, top, total, acc, MASKED=False)
    for at in tl.range(open_end, end, KEYS, num_stages=1):
        key = at + tl.arange(0, KEYS)
        inside = (key < end)[:, None]
        keys = tl.load(k + key[:, None] * k_token + column[None, :], mask=inside, other=0.0)
        values = tl.load(v + key[:, None] * v_token + column[None, :], mask=inside, other=0.0)
        seen = (key[None, :] <= (first + token)[:, None]) & (key < end)[None, :]
        top, total, acc = attend_tile(queries, keys, values, seen, scale, top, total, acc, MASKED=True)

    if SCALED:
        acc *= tl.load(v_scale + of_head)
    finish(
        acc, top, total, scale, out, place_out, there,
        sequence * stride + place % stride, slot + place % stride, stride, split, active, batch * stride,
        partials, tops, totals, counter, ROWS, D, TEAMS,
    )  # fmt: skip


class Tiling(NamedTuple):
    """How the work is cut: rows and keys of a tile, programs in all, keys that make a further program worthwhile."""

    rows: int
    keys: int
    programs: int
    least: int
    warps: int
    stages: int


def tiling(batch: int, kv_heads: int, rows: int, head_size: int, element_bytes: int, processors: int) -> Tiling:
    """Choose by the shape alone (a CUDA graph keeps the grid; lengths are read on the device).

    One program per processor with many tiles under way reads fastest, if the work divides so; else two with fewer.
    """
    tile = row_tile(rows)
    groups = batch * kv_heads * ceil_div(rows, tile)
    keys = 64 if head_size >= 128 else 128
    one, two = (count * processors // groups * groups / (count * processors) for count in (1, 2))
    wide = element_bytes > 2 or tile > 64  # fewer tiles fit
    if one >= 0.9 and not wide:
        # With four stages two programs of the smallest tile fit on a processor: started early, they are dealt out two
        # to some and none to others, and a layer takes a third longer.
        return Tiling(tile, keys, processors, 256, 4, 5 if tile == 16 else 4)
    return Tiling(tile, keys, max(processors * 2, groups) if two else groups, 256, 4, 2 if wide else 3)


def dense_attention(q: Tensor, k: Held, v: Held, start: Tensor, cut: Tiling | None = None) -> Tensor:
    """Attend; shapes as in `models.decoder.Attention`: head sizes are powers of two from 16 on.

    Each key is read once, whatever the number of new tokens and query heads (rows <= 128).
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(q, k, v, start, None, out, cut)
    return out


def dense_rows(
    q: Tensor, k: Held, v: Held, start: Tensor, full: Tensor, out: Tensor, cut: Tiling | None = None
) -> None:
    """The same for the rows of a batch that `full` [batch] bool names, written to their places in `out`; others are
    left as they are. With no such row the launch costs little more than itself."""
    _launch(q, k, v, start, full, out, cut)


def _launch(q: Tensor, k: Held, v: Held, start: Tensor, full: Tensor | None, out: Tensor, cut: Tiling | None) -> None:
    (k, k_scale), (v, v_scale) = parts(k), parts(v)
    batch, tokens, query_heads, head_size = q.shape
    kv_heads = k.shape[2]
    group = query_heads // kv_heads
    if cut is None:
        cut = tiling(batch, kv_heads, tokens * group, head_size, q.itemsize, processors(q.device))
    tiles = ceil_div(tokens * group, cut.rows)
    groups = batch * kv_heads * tiles
    slots = cut.programs + groups  # every group has a program at least
    scratch = torch.empty(slots * cut.rows * (head_size + 2), dtype=torch.float32, device=q.device)
    partials, tops, totals = scratch.split([slots * cut.rows * x for x in (head_size, 1, 1)])
    _dense[(slots,)](
        q, k, v, k_scale, v_scale, start, start if full is None else full, out, partials, tops, totals,
        counters(q.device, groups + slots),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        batch, tokens, head_size**-0.5 * math.log2(math.e), kv_heads, group, tiles, cut.programs, cut.least,
        ROWS=cut.rows, D=head_size, KEYS=cut.keys, BATCH=next_power_of_2(batch),
        SCALED=k_scale is not None, GUARDED=full is not None,
        TEAMS=cut.programs // (kv_heads * tiles) > MOST_IN_A_TEAM,
        num_warps=cut.warps, num_stages=cut.stages, **dependent_launch(q.device),
    )  # fmt: skip
    if full is None:  # of chosen rows a step was never slower without, whether 0 or all 16 of 32,000 tokens were
        fence(q.device)
