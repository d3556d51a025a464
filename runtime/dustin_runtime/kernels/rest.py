"""The tokens that stand in for what sparse verification does not read: a layer read once, and merged.

Reference: `dustin_runtime.attention.rest.update_rest_reference`. The first launch attends from a KV head's queries to a
share of the unread keys, and sums keys and values alike under the weights. The second joins the shares, in their order,
and makes of the queries' means the tokens.

SCALED: keys and values are to be multiplied by the scale of their KV head: logits and sums are, instead.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.attention.rest import RestTokens
from dustin_runtime.kernels import ceil_div, next_power_of_2
from dustin_runtime.scaled import Held, parts

SHARE = 2048
"""Keys of a piece of work. The same for every size of cache, so that no sum depends on how much of it is shown."""


@triton.jit(do_not_specialize=["pieces", "batch", "kv_heads", "chunks", "columns"])
def _sums(
    q, keys, values, key_scales, value_scales, unread, layers, position, key_sums, value_sums, tops, totals,
    q_asking, q_query, q_head, k_layer, k_batch, k_token, k_head, v_layer, v_batch, v_token, v_head, s_layer, s_batch,
    pieces, batch, kv_heads, chunks, columns, group, scale,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, SHARE: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Pieces of work, one after the other: all queries of one KV head of one sequence, a share of its keys."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, D)
    tile = row[:, None] * D + column[None, :]
    query = row // group
    exists = query < QUERIES
    for piece in tl.range(tl.program_id(0), pieces, tl.num_programs(0), num_stages=1):
        chunk = piece % chunks
        head = piece // chunks % kv_heads
        asking = piece // chunks // kv_heads
        sequence = asking % batch
        layer = tl.load(layers + asking).to(tl.int64)
        length = tl.load(position + sequence * QUERIES + QUERIES - 1).to(tl.int32) + 1
        begin = chunk * SHARE
        end = tl.minimum(begin + SHARE, length)
        if (layer >= 0) & (begin < length):
            of_keys = keys + layer * k_layer + sequence.to(tl.int64) * k_batch + head.to(tl.int64) * k_head
            of_values = values + layer * v_layer + sequence.to(tl.int64) * v_batch + head.to(tl.int64) * v_head
            key_scale, value_scale = 1.0, 1.0
            if SCALED:
                key_scale = tl.load(key_scales + layer * s_layer + sequence * s_batch + head)
                value_scale = tl.load(value_scales + layer * s_layer + sequence * s_batch + head)
            own_scale = scale * key_scale
            place = asking.to(tl.int64) * q_asking + query * q_query + (head * group + row % group) * q_head
            queries = tl.load(q + place[:, None] + column[None, :], mask=exists[:, None], other=0.0)
            sees = tl.load(position + sequence * QUERIES + query, mask=exists, other=-1).to(tl.int32)
            top = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            key_sum = tl.zeros([ROWS, D], tl.float32)
            value_sum = tl.zeros([ROWS, D], tl.float32)
            for at in tl.range(begin, end, KEYS):
                key = at + tl.arange(0, KEYS)
                # Where nothing is unread nothing is loaded: it may be anything, NaN too.
                wanted = tl.load(unread + sequence.to(tl.int64) * columns + key, mask=key < end, other=0) != 0
                k = tl.load(of_keys + key[:, None] * k_token + column[None, :], mask=wanted[:, None], other=0.0)
                v = tl.load(of_values + key[:, None] * v_token + column[None, :], mask=wanted[:, None], other=0.0)
                k, v = k.to(queries.dtype), v.to(queries.dtype)
                scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
                scores = tl.where(wanted[None, :] & (key[None, :] <= sees[:, None]), scores, float("-inf"))
                higher = tl.maximum(top, tl.max(scores, 1))
                base = tl.where(higher == float("-inf"), 0.0, higher * own_scale)
                shrink = tl.exp2(top * own_scale - base)
                weights = tl.exp2(scores * own_scale - base[:, None])
                total = total * shrink + tl.sum(weights, 1)
                weights = weights.to(queries.dtype)
                key_sum = tl.dot(weights, k, key_sum * shrink[:, None], input_precision="ieee")
                value_sum = tl.dot(weights, v, value_sum * shrink[:, None], input_precision="ieee")
                top = higher
            slot = ((asking * kv_heads + head) * chunks + chunk).to(tl.int64) * ROWS
            tl.store(tops + slot + row, top * own_scale)
            tl.store(totals + slot + row, total)
            tl.store(key_sums + slot * D + tile, key_sum * key_scale)
            tl.store(value_sums + slot * D + tile, value_sum * value_scale)


@triton.jit(do_not_specialize=["batch", "kv_heads", "chunks"])
def _tokens(
    q, layers, position, key_sums, value_sums, tops, totals, out_keys, out_values, out_bias,
    q_asking, q_query, q_head, batch, kv_heads, chunks, group, scale, log_weight,
    QUERIES: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """One program: one query head of one sequence. Exponents are base 2."""
    asking = tl.program_id(0)
    query_head = tl.program_id(1)
    sequence = asking % batch
    layer = tl.load(layers + asking).to(tl.int64)
    if layer >= 0:
        query = tl.arange(0, PADDED)
        column = tl.arange(0, D)
        exists = query < QUERIES
        row = query * group + query_head % group
        first = ((asking * kv_heads + query_head // group) * chunks).to(tl.int64) * ROWS
        length = tl.load(position + sequence * QUERIES + QUERIES - 1).to(tl.int32) + 1
        best = tl.full([PADDED], float("-inf"), tl.float32)
        total = tl.zeros([PADDED], tl.float32)
        key = tl.zeros([PADDED, D], tl.float32)
        value = tl.zeros([PADDED, D], tl.float32)
        for chunk in range(0, tl.cdiv(length, SHARE)):
            at = first + chunk * ROWS + row
            tile = at[:, None] * D + column[None, :]
            top = tl.load(tops + at, mask=exists, other=float("-inf"))
            mass = tl.load(totals + at, mask=exists, other=0.0)
            of_keys = tl.load(key_sums + tile, mask=exists[:, None], other=0.0)
            of_values = tl.load(value_sums + tile, mask=exists[:, None], other=0.0)
            higher = tl.maximum(best, top)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            before, now = tl.exp2(best - base), tl.exp2(top - base)
            total = total * before + mass * now
            key = key * before[:, None] + of_keys * now[:, None]
            value = value * before[:, None] + of_values * now[:, None]
            best = higher
        divisor = tl.where(total > 0, total, 1.0)[:, None]
        key = (tl.sum(key / divisor, 0) / QUERIES).to(out_keys.dtype.element_ty)
        value = tl.sum(value / divisor, 0) / QUERIES
        place = asking.to(tl.int64) * q_asking + query[:, None] * q_query + query_head * q_head + column[None, :]
        asked = tl.load(q + place, mask=exists[:, None], other=0.0).to(tl.float32)
        tangent = tl.sum(tl.sum(asked, 0) / QUERIES * key.to(tl.float32), 0) * scale
        held = best + tl.log2(tl.where(total > 0, total, 1.0))
        bias = (tl.sum(tl.where(exists, held, 0.0), 0) / QUERIES - tangent) * 0.6931471805599453 + log_weight
        out = (layer * batch + sequence) * tl.num_programs(1) + query_head
        tl.store(out_keys + out * D + column, key)
        tl.store(out_values + out * D + column, value.to(out_values.dtype.element_ty))
        tl.store(out_bias + out, bias)


class Tiling(NamedTuple):
    """Rows and keys of a tile of the first launch, and what its programs take."""

    rows: int
    keys: int
    warps: int
    stages: int


def tiling(rows: int, head_size: int, element_bytes: int) -> Tiling:
    """Choose by the rows of a KV head, its size and the size of a query's element."""
    rows = max(16, next_power_of_2(rows))
    if element_bytes > 2:  # not for matrix units: both factors of a tile are held in registers
        return Tiling(rows, 16, 8, 2)
    return Tiling(rows, 64, 8 if rows * head_size > 8192 else 4, 3)


def update_rest(
    out: RestTokens,
    q: Tensor,
    k: Held,
    v: Held,
    layer: Tensor,
    position: Tensor,
    unread: Tensor,
    weight: float = 1.0,
    programs: int | None = None,
    cut: Tiling | None = None,
) -> None:
    """Arguments as of `attention.rest.update_rest`; `out`, `position` and `unread` are contiguous.

    Args:
        programs: how many read keys and values; by default as many as there are pieces of work.
    """
    (k, key_scales), (v, value_scales) = parts(k), parts(v)
    turns, batch, queries, query_heads, head_size = q.shape
    columns, kv_heads = k.shape[2:4]
    group = query_heads // kv_heads
    cut = cut or tiling(queries * group, head_size, q.itemsize)
    chunks = ceil_div(columns, SHARE)
    asked = turns * batch
    pieces = asked * kv_heads * chunks
    q, layer = q.flatten(0, 1), layer.contiguous()
    slots = pieces * cut.rows
    scratch = torch.empty(slots * (2 * head_size + 2), dtype=torch.float32, device=q.device)
    sums = scratch.split([slots * size for size in (head_size, head_size, 1, 1)])
    scale = head_size**-0.5 * math.log2(math.e)
    _sums[(min(pieces, programs or pieces),)](
        q, k, v, key_scales, value_scales, unread, layer, position, *sums,
        *q.stride()[:3], *k.stride()[:4], *v.stride()[:4],
        *((0, 0) if key_scales is None else key_scales.stride()[:2]),
        pieces, batch, kv_heads, chunks, columns, group, scale,
        QUERIES=queries, ROWS=cut.rows, D=head_size, KEYS=cut.keys, SHARE=SHARE, SCALED=key_scales is not None,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    _tokens[(asked, query_heads)](
        q, layer, position, *sums, *out, *q.stride()[:3], batch, kv_heads, chunks, group, scale,
        math.log(weight), QUERIES=queries, PADDED=next_power_of_2(queries), ROWS=cut.rows, D=head_size, SHARE=SHARE,
    )  # fmt: skip
