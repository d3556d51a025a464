"""The attention that a sequence's last queries pay in layers of its own choice, summed over the rows of a KV head.

Reference: `dustin_runtime.attention.scoring.layer_mass_reference`. Two launches, each of which reads the keys once: the
first finds every row's softmax normaliser, the second computes the logits again and writes the sums alone. Rows of
logits that are written and read back would be as many bytes as the keys at 64 rows, and more above.

SCALED: keys are to be multiplied by the scale of their KV head: logits are, instead.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.kernels import ceil_div, next_power_of_2
from dustin_runtime.kernels.workspace import counters
from dustin_runtime.scaled import Held, parts

SHARE = 2048
"""Keys of a piece of work. The same for every size of cache, so that no sum depends on how much of it is shown."""


@triton.jit
def _piece(piece, layers, key_scales, chunks, kv_heads, batch, k_layer, k_batch, k_head, s_layer, s_batch, scale,
           SCALED: tl.constexpr):  # fmt: skip
    """What a piece of work is: its share of the keys; the sequence in a turn, the sequence, and the KV head that ask;
    where the head's keys begin; and what its logits are multiplied by."""
    chunk = piece % chunks
    head = piece // chunks % kv_heads
    asking = piece // chunks // kv_heads
    sequence = asking % batch
    layer = tl.load(layers + asking)
    of_head = layer.to(tl.int64) * k_layer + sequence.to(tl.int64) * k_batch + head.to(tl.int64) * k_head
    if SCALED:
        scale *= tl.load(key_scales + layer * s_layer + sequence * s_batch + head)
    return chunk, asking, sequence, head, of_head, scale


@triton.jit
def _queries(q, asking, head, q_asking, q_query, q_head, group, QUERIES: tl.constexpr, ROWS: tl.constexpr,
             D: tl.constexpr):  # fmt: skip
    """The queries of a KV head [ROWS, D], query by query; which query a row is, and whether it is one."""
    row = tl.arange(0, ROWS)
    query = row // group
    exists = query < QUERIES
    place = asking.to(tl.int64) * q_asking + query * q_query + (head * group + row % group) * q_head
    return tl.load(q + place[:, None] + tl.arange(0, D)[None, :], mask=exists[:, None], other=0.0), query, exists


@triton.jit(do_not_specialize=["pieces", "batch", "kv_heads", "chunks"])
def _normalisers(
    q, keys, key_scales, layers, position, tops, totals, normalisers, counter,
    q_asking, q_query, q_head, k_layer, k_batch, k_token, k_head, s_layer, s_batch,
    pieces, batch, kv_heads, chunks, group, scale,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, SHARE: tl.constexpr,
    SLOTS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Pieces of work, one after the other: all rows of one KV head of one sequence, a share of its keys. The last piece
    of a head merges them, in their order. Rows that do not exist get infinity, by which nothing is left of them."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, D)
    for piece in tl.range(tl.program_id(0), pieces, tl.num_programs(0), num_stages=1):
        chunk, asking, sequence, head, of_head, own_scale = _piece(
            piece, layers, key_scales, chunks, kv_heads, batch, k_layer, k_batch, k_head, s_layer, s_batch, scale,
            SCALED,
        )  # fmt: skip
        # Positions ascend: the first query sees least.
        least = tl.load(position + sequence * QUERIES).to(tl.int32) + 1
        length = tl.load(position + sequence * QUERIES + QUERIES - 1).to(tl.int32) + 1
        active = tl.cdiv(length, SHARE)
        if chunk < active:
            queries, query, exists = _queries(q, asking, head, q_asking, q_query, q_head, group, QUERIES, ROWS, D)
            sees = tl.load(position + sequence * QUERIES + query, mask=exists, other=-1).to(tl.int32)
            begin = chunk * SHARE
            end = tl.minimum(begin + SHARE, length)
            top = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            # Keys that every row sees need no mask.
            open_end = begin + tl.maximum(tl.minimum(end, least) - begin, 0) // KEYS * KEYS
            for at in tl.range(begin, open_end, KEYS):
                key = at + tl.arange(0, KEYS)
                tile = tl.load(keys + of_head + key[:, None] * k_token + column[None, :])
                scores = tl.dot(queries, tl.trans(tile.to(queries.dtype)), input_precision="ieee")
                higher = tl.maximum(top, tl.max(scores, 1))
                base = higher * own_scale
                weights = tl.exp2(scores * own_scale - base[:, None])
                total = total * tl.exp2(top * own_scale - base) + tl.sum(weights, 1)
                top = higher
            for at in tl.range(open_end, end, KEYS, num_stages=1):
                key = at + tl.arange(0, KEYS)
                tile = tl.load(
                    keys + of_head + key[:, None] * k_token + column[None, :], mask=(key < length)[:, None], other=0.0
                )
                scores = tl.dot(queries, tl.trans(tile.to(queries.dtype)), input_precision="ieee")
                scores = tl.where(key[None, :] <= sees[:, None], scores, float("-inf"))
                higher = tl.maximum(top, tl.max(scores, 1))
                base = tl.where(higher == float("-inf"), 0.0, higher * own_scale)
                weights = tl.exp2(scores * own_scale - base[:, None])
                total = total * tl.exp2(top * own_scale - base) + tl.sum(weights, 1)
                top = higher

            top *= own_scale
            of_asked = asking * kv_heads + head
            if active == 1:
                normaliser = tl.where(exists, top + tl.log2(tl.where(exists, total, 1.0)), float("inf"))
                tl.store(normalisers + of_asked * ROWS + row, normaliser)
            else:
                slot = of_asked * chunks
                tl.store(tops + (slot + chunk) * ROWS + row, top)
                tl.store(totals + (slot + chunk) * ROWS + row, total)
                tl.debug_barrier()  # all threads' stores come before the one thread's atomic, which releases them
                arrived = tl.atomic_add(counter + of_asked, 1, sem="acq_rel")
                if arrived == active - 1:
                    part = tl.arange(0, SLOTS)
                    at_part = (slot + part)[:, None] * ROWS + row[None, :]
                    there = (part < active)[:, None] & (row < ROWS)[None, :]
                    highs = tl.load(tops + at_part, mask=there, other=float("-inf"), cache_modifier=".cg")
                    sums = tl.load(totals + at_part, mask=there, other=0.0, cache_modifier=".cg")
                    best = tl.max(highs, 0)
                    best = tl.where(best == float("-inf"), 0.0, best)
                    whole = tl.sum(sums * tl.exp2(highs - best[None, :]), 0)
                    normaliser = tl.where(exists, best + tl.log2(tl.where(exists, whole, 1.0)), float("inf"))
                    tl.store(normalisers + of_asked * ROWS + row, normaliser)
                    tl.store(counter + of_asked, 0)


@triton.jit(do_not_specialize=["pieces", "batch", "kv_heads", "chunks"])
def _sums(
    q, keys, key_scales, layers, position, normalisers, out,
    q_asking, q_query, q_head, k_layer, k_batch, k_token, k_head, s_layer, s_batch,
    pieces, batch, kv_heads, chunks, group, scale, columns,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, SHARE: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """The same pieces, the last first, whose keys may still lie in the L2: normalised rows, summed.

    Keys are the rows of the product, so a sum stays within a warp."""
    column = tl.arange(0, D)
    for turn in tl.range(tl.program_id(0), pieces, tl.num_programs(0), num_stages=1):
        piece = pieces - 1 - turn
        chunk, asking, sequence, head, of_head, own_scale = _piece(
            piece, layers, key_scales, chunks, kv_heads, batch, k_layer, k_batch, k_head, s_layer, s_batch, scale,
            SCALED,
        )  # fmt: skip
        least = tl.load(position + sequence * QUERIES).to(tl.int32) + 1
        length = tl.load(position + sequence * QUERIES + QUERIES - 1).to(tl.int32) + 1
        of_asked = asking * kv_heads + head
        of_out = out + of_asked.to(tl.int64) * columns
        begin = chunk * SHARE
        end = tl.minimum(begin + SHARE, columns)
        open_end = begin
        closed_end = begin
        if begin < length:
            queries, query, exists = _queries(q, asking, head, q_asking, q_query, q_head, group, QUERIES, ROWS, D)
            sees = tl.load(position + sequence * QUERIES + query, mask=exists, other=-1).to(tl.int32)
            normaliser = tl.load(normalisers + of_asked * ROWS + tl.arange(0, ROWS))
            open_end += tl.maximum(tl.minimum(end, least) - begin, 0) // KEYS * KEYS
            for at in tl.range(begin, open_end, KEYS):
                key = at + tl.arange(0, KEYS)
                tile = tl.load(keys + of_head + key[:, None] * k_token + column[None, :])
                scores = tl.dot(tile.to(queries.dtype), tl.trans(queries), input_precision="ieee")
                tl.store(of_out + key, tl.sum(tl.exp2(scores * own_scale - normaliser[None, :]), 1))
            closed_end = open_end + tl.cdiv(tl.minimum(end, length) - open_end, KEYS) * KEYS
            for at in tl.range(open_end, closed_end, KEYS, num_stages=1):
                key = at + tl.arange(0, KEYS)
                tile = tl.load(
                    keys + of_head + key[:, None] * k_token + column[None, :], mask=(key < length)[:, None], other=0.0
                )
                scores = tl.dot(tile.to(queries.dtype), tl.trans(queries), input_precision="ieee")
                weights = tl.exp2(scores * own_scale - normaliser[None, :])
                weights = tl.where(key[:, None] <= sees[None, :], weights, 0.0)
                tl.store(of_out + key, tl.sum(weights, 1), mask=key < end)
        for at in tl.range(closed_end, end, KEYS, num_stages=1):
            key = at + tl.arange(0, KEYS)
            tl.store(of_out + key, tl.zeros([KEYS], tl.float32), mask=key < end)


class Tile(NamedTuple):
    """Keys of a tile of one launch, and what its programs take."""

    keys: int
    warps: int
    stages: int


class Tiling(NamedTuple):
    """Rows of a tile, and the rest of it in each launch."""

    rows: int
    normalisers: Tile
    sums: Tile


def tiling(rows: int, element_bytes: int) -> Tiling:
    """Choose by the rows of a KV head and the size of a query's element."""
    if element_bytes > 2:  # not for matrix units: both factors of a tile are held in registers
        return Tiling(max(16, next_power_of_2(rows)), Tile(16, 8, 2), Tile(16, 8, 2))
    if rows <= 64:  # a warp has all keys of a row, or all rows of a key
        return Tiling(64, Tile(128, 4, 3), Tile(128, 8, 3))
    if rows <= 128:
        return Tiling(128, Tile(64, 8, 3), Tile(128, 8, 3))
    return Tiling(next_power_of_2(rows), Tile(64, 8, 3), Tile(64, 8, 3))


def queries_at_once(group: int, element_bytes: int) -> int:
    """Queries of all heads of a KV head whose rows are one tile."""
    return max((256 if element_bytes == 2 else 64) // group, 1)


def layer_mass(
    q: Tensor,
    keys: Held,
    layer: Tensor,
    position: Tensor,
    programs: int | None = None,
    cut: Tiling | None = None,
) -> Tensor:
    """Arguments and result as of `attention.scoring.layer_mass`.

    Args:
        programs: how many read the keys; by default as many as there are pieces of work.
    """
    queries = queries_at_once(q.shape[-2] // keys.shape[3], q.itemsize)
    parted = zip(q.split(queries, dim=-3), position.split(queries, dim=1), strict=True)
    total: Tensor | None = None
    for part, at in parted:
        found = _layer_mass(part, keys, layer.contiguous(), at.contiguous(), programs, cut)
        total = found if total is None else total.add_(found)
    assert total is not None
    return total


def _layer_mass(
    q: Tensor, keys: Held, layer: Tensor, position: Tensor, programs: int | None, cut: Tiling | None
) -> Tensor:
    stored, key_scales = parts(keys)
    batch, queries, query_heads, head_size = q.shape[-4:]
    columns, kv_heads = stored.shape[2:4]
    group = query_heads // kv_heads
    cut = cut or tiling(queries * group, q.itemsize)
    chunks = ceil_div(columns, SHARE)
    asked = layer.numel() * kv_heads
    pieces = asked * chunks
    q = q.flatten(0, -4)
    tops, totals = torch.empty(2, asked * chunks * cut.rows, dtype=torch.float32, device=q.device)
    normalisers = torch.empty(asked * cut.rows, dtype=torch.float32, device=q.device)
    out = torch.empty(*layer.shape, kv_heads, columns, dtype=torch.float32, device=q.device)
    common = (
        *q.stride()[:3], *stored.stride()[:4], *((0, 0) if key_scales is None else key_scales.stride()[:2]),
        pieces, batch, kv_heads, chunks, group, head_size**-0.5 * math.log2(math.e),
    )  # fmt: skip
    sizes = {"QUERIES": queries, "ROWS": cut.rows, "D": head_size, "SHARE": SHARE, "SCALED": key_scales is not None}
    grid = (min(pieces, programs or pieces),)
    _normalisers[grid](
        q, stored, key_scales, layer, position, tops, totals, normalisers, counters(q.device, asked, "scores"), *common,
        SLOTS=next_power_of_2(chunks), KEYS=cut.normalisers.keys, **sizes,
        num_warps=cut.normalisers.warps, num_stages=cut.normalisers.stages,
    )  # fmt: skip
    _sums[grid](
        q, stored, key_scales, layer, position, normalisers, out, *common, columns,
        KEYS=cut.sums.keys, **sizes, num_warps=cut.sums.warps, num_stages=cut.sums.stages,
    )  # fmt: skip
    return out
