"""Attention mass of chosen heads on every position, for several layers, heads and queries at once.

Reference: `dustin_runtime.attention.scoring.ScoredHeads.reference`. Two launches: the first reads each key once, keeps
the logits (fp32) and finds every row's softmax normaliser; the second sums the normalised rows.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.kernels import ceil_div, next_power_of_2, processors
from dustin_runtime.kernels.workspace import counters


@triton.jit
def _logits(
    q, keys, groups, members, position, logits, tops, totals, normalisers, counter,
    q_batch, q_query, q_entry, k_layer, k_batch, k_token, k_head,
    entries, capacity, scale,
    QUERIES: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
    SHARE: tl.constexpr, CHUNKS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One program: one KV head of one layer of one sequence, a share of its keys, all rows that ask it."""
    chunk = tl.program_id(0)
    group = tl.program_id(1)
    sequence = tl.program_id(2)
    layer = tl.load(groups + group * 2)
    head = tl.load(groups + group * 2 + 1)

    row = tl.arange(0, ROWS)
    query = row // MEMBERS
    entry = tl.load(members + group * MEMBERS + row % MEMBERS)
    exists = (query < QUERIES) & (entry >= 0)
    at_position = tl.load(position + sequence * QUERIES + query, mask=exists, other=-1)
    length = tl.max(at_position, 0) + 1
    active = tl.cdiv(length, SHARE)
    if chunk >= active:
        return
    column = tl.arange(0, D)
    q_offset = sequence * q_batch + query[:, None] * q_query + entry[:, None] * q_entry + column[None, :]
    queries = tl.load(q + q_offset, mask=exists[:, None], other=0.0)

    keys += layer.to(tl.int64) * k_layer + sequence.to(tl.int64) * k_batch + head.to(tl.int64) * k_head
    line = (sequence * entries + entry) * QUERIES + query  # this row's place in `logits` and `normalisers`
    logits_row = logits + line.to(tl.int64)[:, None] * capacity
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for at in tl.range(chunk * SHARE, tl.minimum(chunk * SHARE + SHARE, length), KEYS):
        key = at + tl.arange(0, KEYS)
        tile = tl.load(keys + key[:, None] * k_token + column[None, :], mask=(key < length)[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(tile), input_precision="ieee") * scale
        scores = tl.where(key[None, :] <= at_position[:, None], scores, float("-inf"))
        tl.store(logits_row + key[None, :], scores, mask=exists[:, None] & (key < capacity)[None, :])
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
        top = higher

    group_id = sequence * tl.num_programs(1) + group
    slot = group_id * CHUNKS
    tl.store(tops + (slot + chunk) * ROWS + row, top)
    tl.store(totals + (slot + chunk) * ROWS + row, total)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter + group_id, 1, sem="acq_rel")
    if arrived == active - 1:
        part = tl.arange(0, SLOTS)
        at_part = (slot + part)[:, None] * ROWS + row[None, :]
        there = (part < active)[:, None] & (row < ROWS)[None, :]
        highs = tl.load(tops + at_part, mask=there, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(totals + at_part, mask=there, other=0.0, cache_modifier=".cg")
        best = tl.max(highs, 0)
        best = tl.where(best == float("-inf"), 0.0, best)
        whole = tl.sum(sums * tl.exp2(highs - best[None, :]), 0)
        tl.store(normalisers + line, best + tl.log2(tl.where(exists, whole, 1.0)), mask=exists)
        tl.store(counter + group_id, 0)


@triton.jit
def _sum_rows(
    logits, normalisers, position, out, lines, capacity, out_columns, QUERIES: tl.constexpr, KEYS: tl.constexpr
):
    """One program: KEYS positions of one sequence, summed over all rows."""
    sequence = tl.program_id(1)
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    length = tl.load(position + sequence * QUERIES + QUERIES - 1) + 1
    total = tl.zeros([KEYS], tl.float32)
    if tl.program_id(0) * KEYS < length:
        for row in range(lines):
            line = sequence * lines + row
            log_sum = tl.load(normalisers + line)
            score = tl.load(logits + line.to(tl.int64) * capacity + key, mask=key < length, other=float("-inf"))
            total += tl.exp2(score - log_sum)
    tl.store(out + sequence.to(tl.int64) * out_columns + key, total, mask=key < out_columns)


def attention_scores(
    q: Tensor,
    keys: Tensor,
    groups: Tensor,
    members: Tensor,
    position: Tensor,
    columns: int | None = None,
    programs: int | None = None,
) -> Tensor:
    """Rows of softmax attention, summed over heads and queries (arXiv 2606.24957, Eq. 5).

    Args:
        q: [batch, queries, entries, head_size]: the queries of all scored heads, layer by layer.
        keys: [layers, batch, capacity, kv_heads, head_size].
        groups: [groups, 2] int32, (layer, KV head) pairs that are asked.
        members: [groups, most] int32, which entries ask a group, -1 padded.
        position: [batch, queries] int64, ascending. A row covers the positions [0, position].
        columns: width of the result; the capacity if not given.
        programs: about how many read the keys at a time; by default as many as use the whole GPU.

    Returns:
        [batch, columns] fp32, zero beyond a sequence's last query.
    """
    batch, queries, entries, head_size = q.shape
    capacity = keys.shape[2]
    columns = capacity if columns is None else columns
    most = members.shape[1]
    rows = max(16, next_power_of_2(queries * most))
    wide = 64 if rows > 64 or q.itemsize > 2 else 128 if head_size >= 128 else 256
    count = len(groups)
    # Several waves of programs, each with several tiles to stream.
    share = next_power_of_2(ceil_div(capacity * batch * count, programs or 4 * processors(q.device)))
    share = max(2 * wide, share if programs else min(share, 4096))
    chunks = ceil_div(capacity, share)
    at_once = max(1, min(batch, programs // (count * chunks))) if programs else batch
    lines = entries * queries
    logits = torch.empty(batch, lines * capacity, dtype=torch.float32, device=q.device)
    tops, totals = torch.empty(2, batch, count * chunks * rows, dtype=torch.float32, device=q.device)
    normalisers = torch.empty(batch, lines, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, columns, dtype=torch.float32, device=q.device)
    for begin in range(0, batch, at_once):
        part = slice(begin, begin + at_once)
        _logits[(chunks, count, len(position[part]))](
            q[part], keys[:, part], groups, members, position[part], logits[part], tops[part], totals[part],
            normalisers[part], counters(q.device, batch * count, "scores"),
            *q.stride()[:3], *keys.stride()[:4],
            entries, capacity, head_size**-0.5 * math.log2(math.e),
            QUERIES=queries, MEMBERS=most, ROWS=rows, D=head_size, KEYS=wide, SHARE=share, CHUNKS=chunks,
            SLOTS=next_power_of_2(chunks), num_warps=4, num_stages=2,
        )  # fmt: skip
    _sum_rows[(ceil_div(columns, 512), batch)](
        logits, normalisers, position, out, lines, capacity, columns, QUERIES=queries, KEYS=512, num_warps=4
    )
    return out
