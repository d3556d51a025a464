"""Attention of a few new tokens over listed positions of the cache: gathered, split, merged, in one launch.

Reference: `dustin_runtime.attention.sparse.sparse_reference`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.cache import WHOLE, Ring
from dustin_runtime.kernels import ceil_div, dependent_launch, next_power_of_2, processors, row_tile
from dustin_runtime.kernels.online_softmax import attend_tile, finish, packed_queries
from dustin_runtime.kernels.workspace import counters


@triton.jit(
    do_not_specialize=["tokens", "kv_heads", "group", "splits", "share", "budget", "sink", "ring"]
)  # one binary serves all
def _sparse(
    q, k, v, start, kept, out, partials, tops, totals, counter,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, kept_batch, kept_head,
    tokens, scale, kv_heads, group, splits, share, budget, sink, ring,
    ROWS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, LIST: tl.constexpr, NEW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: one KV head of one sequence, ROWS of its queries, a share of the list; the last has the new tokens.

    The list is read before the wait for the kernel that wrote the queries (programmatic dependent launch), and stays
    in registers: keys and values are then the only loads of the loop, and several tiles of them are under way.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row_tile = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2) // kv_heads
    head = tl.program_id(2) % kv_heads
    group_id = tl.program_id(2) * tl.num_programs(0) + row_tile

    entry = tl.arange(0, LIST)
    kept += sequence * kept_batch + head * kept_head + split * share
    chosen = tl.load(kept + entry, mask=(entry < share) & (split * share + entry < budget), other=-1).to(tl.int32)
    count = tl.sum((chosen >= 0).to(tl.int32), 0)
    chosen = tl.where(chosen < sink, chosen, sink + (chosen - sink) % ring)  # slots
    if PDL:
        tl.extra.cuda.gdc_wait()

    queries, token, there, place_out = packed_queries(
        q, q_batch, q_token, q_head, sequence, head, row_tile, tokens, kv_heads, group, ROWS, D
    )
    column = tl.arange(0, D)

    k += sequence.to(tl.int64) * k_batch + head.to(tl.int64) * k_head
    v += sequence.to(tl.int64) * v_batch + head.to(tl.int64) * v_head
    first = tl.load(start + sequence)
    new = tl.arange(0, NEW)
    has_new = split == splits - 1
    new_there = (new < tl.where(has_new, tokens, 0))[:, None]
    new_slot = tl.where(first + new < sink, first + new, sink + (first + new - sink) % ring)
    new_keys = tl.load(k + new_slot[:, None] * k_token + column[None, :], mask=new_there, other=0.0)
    new_values = tl.load(v + new_slot[:, None] * v_token + column[None, :], mask=new_there, other=0.0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    full = count // KEYS * KEYS
    for at in tl.range(0, full, KEYS):
        # Tiles are fetched ahead, so this also runs beyond the end, where its loads do not.
        position = tl.gather(chosen, tl.minimum(at + tl.arange(0, KEYS), LIST - 1), 0)
        keys = tl.load(k + position[:, None] * k_token + column[None, :])
        values = tl.load(v + position[:, None] * v_token + column[None, :])
        top, total, acc = attend_tile(queries, keys, values, None, scale, top, total, acc, MASKED=False)
    if full < count:
        place = full + tl.arange(0, KEYS)
        position = tl.gather(chosen, tl.minimum(place, LIST - 1), 0)
        within = place < count
        keys = tl.load(k + position[:, None] * k_token + column[None, :], mask=within[:, None], other=0.0)
        values = tl.load(v + position[:, None] * v_token + column[None, :], mask=within[:, None], other=0.0)
        top, total, acc = attend_tile(queries, keys, values, within[None, :], scale, top, total, acc, MASKED=True)
    if has_new:
        seen = new[None, :] <= token[:, None]
        top, total, acc = attend_tile(queries, new_keys, new_values, seen, scale, top, total, acc, MASKED=True)

    finish(
        acc, top, total, scale, out, place_out, there,
        group_id, group_id * splits, 1, split, splits, partials, tops, totals, counter, ROWS, D,
    )  # fmt: skip


MOST_LISTED = 1024
"""Entries of a list that one program holds in registers."""


class Tiling(NamedTuple):
    """How the work is cut: rows and listed keys of a tile, programs per KV head."""

    rows: int
    keys: int
    splits: int
    warps: int
    stages: int


def tiling(
    batch: int, kv_heads: int, rows: int, head_size: int, element_bytes: int, budget: int, processors: int
) -> Tiling:
    """Choose by the shape alone: only long lists are split, since a merge costs as much as a few hundred keys."""
    tile = row_tile(rows)
    groups = batch * kv_heads * ceil_div(rows, tile)
    keys = 64 if head_size >= 128 else 128
    splits = max(1, min(processors // groups, budget // 512), ceil_div(budget, MOST_LISTED))
    return Tiling(tile, keys, splits, 4, 2 if element_bytes > 2 or tile > 64 else 3)


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, kept: Tensor, cut: Tiling | None = None, ring: Ring = WHOLE
) -> Tensor:
    """Attend; shapes as in `attention.sparse.sparse_reference`."""
    batch, tokens, query_heads, head_size = q.shape
    kv_heads, budget = k.shape[2], kept.shape[2]
    group = query_heads // kv_heads
    if cut is None:
        cut = tiling(batch, kv_heads, tokens * group, head_size, q.itemsize, budget, processors(q.device))
    tiles = ceil_div(tokens * group, cut.rows)
    groups = batch * kv_heads * tiles
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    slots = groups * cut.splits if cut.splits > 1 else 0
    scratch = torch.empty(slots * cut.rows * (head_size + 2), dtype=torch.float32, device=q.device)
    partials, tops, totals = scratch.split([slots * cut.rows * x for x in (head_size, 1, 1)])
    share = ceil_div(ceil_div(budget, cut.splits), cut.keys) * cut.keys
    lists = kept.expand(batch, kv_heads, budget)  # one list for all heads has stride 0
    _sparse[(tiles, cut.splits, batch * kv_heads)](
        q, k, v, start, lists, out, partials, tops, totals, counters(q.device, groups),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *lists.stride()[:2],
        tokens, head_size**-0.5 * math.log2(math.e), kv_heads, group, cut.splits, share, budget, *ring,
        ROWS=cut.rows, D=head_size, KEYS=cut.keys, LIST=next_power_of_2(share), NEW=max(16, next_power_of_2(tokens)),
        num_warps=cut.warps, num_stages=cut.stages, **dependent_launch(q.device),
    )  # fmt: skip
    return out
