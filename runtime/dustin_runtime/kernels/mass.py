"""The attention that many queries pay to every position, without their softmax rows ever existing.

Reference: `dustin_runtime.attention.scoring.received_mass_reference`. Two launches: the first finds every row's softmax
normaliser, the second computes the scores again, tile by tile, and sums the normalised columns.

SCALED: keys are to be multiplied by the scale of their KV head: scores are, instead.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.kernels import ceil_div
from dustin_runtime.scaled import Held, parts


@triton.jit
def _normalisers(
    q, k, k_scale, normalisers, q_batch, q_token, q_head, k_batch, k_token, k_head, tokens, keys, group, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One program: ROWS queries of one head of one sequence, and all keys that they see."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    if SCALED:
        scale *= tl.load(k_scale + (sequence * tl.num_programs(1) + head) // group)
    begin = tl.program_id(0) * ROWS
    row, column = begin + tl.arange(0, ROWS), tl.arange(0, D)
    of_q = q + sequence.to(tl.int64) * q_batch + head * q_head
    queries = tl.load(of_q + row[:, None] * q_token + column[None, :], mask=(row < tokens)[:, None], other=0.0)
    of_k = k + sequence.to(tl.int64) * k_batch + (head // group).to(tl.int64) * k_head
    before = keys - tokens
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    everyone = (before + begin + 1) // KEYS * KEYS  # keys in front of it are seen by every row
    for at in tl.range(0, everyone, KEYS):
        key = at + tl.arange(0, KEYS)
        tile = tl.load(of_k + key[:, None] * k_token + column[None, :])
        scores = tl.dot(queries, tl.trans(tile.to(queries.dtype)), input_precision="ieee")
        higher = tl.maximum(top, tl.max(scores, 1))
        total = total * tl.exp2((top - higher) * scale) + tl.sum(tl.exp2((scores - higher[:, None]) * scale), 1)
        top = higher
    for at in tl.range(everyone, before + tl.minimum(begin + ROWS, tokens), KEYS):
        key = at + tl.arange(0, KEYS)
        tile = tl.load(of_k + key[:, None] * k_token + column[None, :], mask=(key < keys)[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(tile.to(queries.dtype)), input_precision="ieee")
        scores = tl.where(key[None, :] <= (before + row)[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))  # finite: the first tile of a row holds position 0
        total = total * tl.exp2((top - higher) * scale) + tl.sum(tl.exp2((scores - higher[:, None]) * scale), 1)
        top = higher
    line = (sequence * tl.num_programs(1) + head).to(tl.int64) * tokens
    tl.store(normalisers + line + row, top * scale + tl.log2(total), mask=row < tokens)


@triton.jit
def _received(
    q, k, k_scale, normalisers, out, q_batch, q_token, q_head, k_batch, k_token, k_head, tokens, keys, group, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One program: KEYS positions under one head of one sequence, and all queries that see them."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    if SCALED:
        scale *= tl.load(k_scale + (sequence * tl.num_programs(1) + head) // group)
    begin = tl.program_id(0) * KEYS
    key, column = begin + tl.arange(0, KEYS), tl.arange(0, D)
    of_q = q + sequence.to(tl.int64) * q_batch + head * q_head
    of_k = k + sequence.to(tl.int64) * k_batch + (head // group).to(tl.int64) * k_head
    tile = tl.load(of_k + key[:, None] * k_token + column[None, :], mask=(key < keys)[:, None], other=0.0)
    line = (sequence * tl.num_programs(1) + head).to(tl.int64)
    before = keys - tokens
    mass = tl.zeros([ROWS, KEYS], tl.float32)  # rows apart until the end: threads have to agree only once
    first = tl.maximum(begin - before, 0) // ROWS * ROWS
    for at in tl.range(first, tokens, ROWS):
        row = at + tl.arange(0, ROWS)
        queries = tl.load(of_q + row[:, None] * q_token + column[None, :], mask=(row < tokens)[:, None], other=0.0)
        normaliser = tl.load(normalisers + line * tokens + row, mask=row < tokens, other=float("inf"))
        scores = tl.dot(queries, tl.trans(tile.to(queries.dtype)), input_precision="ieee") * scale - normaliser[:, None]
        mass += tl.where(key[None, :] <= (before + row)[:, None], tl.exp2(scores), 0.0)
    tl.store(out + line * keys + key, tl.sum(mass, 0), mask=key < keys)


def received_mass(q: Tensor, k: Held) -> Tensor:
    """See `scoring.received_mass`.

    Args:
        q: [batch, tokens, query_heads, head_size], of a sequence's last tokens.
        k: [batch, keys, kv_heads, head_size].

    Returns:
        [batch, kv_heads, group, keys] fp32.
    """
    k, k_scale = parts(k)
    batch, tokens, query_heads, head_size = q.shape
    keys, kv_heads = k.shape[1:3]
    rows, wide = (64, 128) if q.itemsize == 2 else (16, 32)  # fp32 products keep whole tiles in registers
    normalisers = torch.empty(batch, query_heads, tokens, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, kv_heads, query_heads // kv_heads, keys, dtype=torch.float32, device=q.device)
    common = (*q.stride()[:3], *k.stride()[:3], tokens, keys, query_heads // kv_heads)
    scale = head_size**-0.5 * math.log2(math.e)
    sizes = {"ROWS": rows, "KEYS": wide, "D": head_size, "SCALED": k_scale is not None, "num_warps": 4, "num_stages": 2}
    _normalisers[(ceil_div(tokens, rows), query_heads, batch)](q, k, k_scale, normalisers, *common, scale, **sizes)
    _received[(ceil_div(keys, wide), query_heads, batch)](q, k, k_scale, normalisers, out, *common, scale, **sizes)
    return out
