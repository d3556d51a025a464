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
from dustin_runtime.scaled import Held, parts


@triton.jit(do_not_specialize=["batch", "groups_count", "queries_count"])  # nor by the depth of a step
def _logits(
    q, keys, key_scales, groups, members, position, logits, tops, totals, normalisers, counter,
    q_batch, q_query, q_entry, k_layer, k_batch, k_token, k_head, s_layer, s_batch,
    batch, groups_count, queries_count, entries, pitch, scale,
    MEMBERS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
    SHARE: tl.constexpr, CHUNKS: tl.constexpr, SLOTS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Pieces of work, one after the other: one KV head of one layer of one sequence, a share of its keys, all rows that
    ask it. As many programs as there are pieces take one each.

    SCALED: keys are to be multiplied by the scale of their KV head: logits are, instead.
    """
    row = tl.arange(0, ROWS)
    query = row // MEMBERS
    column = tl.arange(0, D)
    for piece in tl.range(tl.program_id(0), batch * groups_count * CHUNKS, tl.num_programs(0), num_stages=1):
        chunk = piece % CHUNKS
        group_id = piece // CHUNKS
        group = group_id % groups_count
        sequence = group_id // groups_count
        layer = tl.load(groups + group * 2)
        head = tl.load(groups + group * 2 + 1)
        entry = tl.load(members + group * MEMBERS + row % MEMBERS)
        exists = (query < queries_count) & (entry >= 0)
        at_position = tl.load(position + sequence * queries_count + query, mask=exists, other=-1)
        length = tl.max(at_position, 0) + 1
        active = tl.cdiv(length, SHARE)
        if chunk < active:
            q_offset = sequence * q_batch + query[:, None] * q_query + entry[:, None] * q_entry + column[None, :]
            queries = tl.load(q + q_offset, mask=exists[:, None], other=0.0)
            of_head = layer.to(tl.int64) * k_layer + sequence.to(tl.int64) * k_batch + head.to(tl.int64) * k_head
            own_scale = scale
            if SCALED:
                own_scale *= tl.load(key_scales + layer * s_layer + sequence * s_batch + head)
            line = (sequence * entries + entry) * queries_count + query  # of `logits` and `normalisers`
            logits_row = logits + line.to(tl.int64)[:, None] * pitch
            begin = chunk * SHARE
            end = tl.minimum(begin + SHARE, length)
            # Maxima and sums are kept column by column of a tile: threads have to agree only once, at the end.
            top = tl.full([ROWS, KEYS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS, KEYS], tl.float32)
            # Keys that every row sees need no mask.
            least = tl.min(tl.where(exists, at_position, 0x7FFFFFFF), 0) + 1
            open_end = begin + tl.maximum(tl.minimum(end, least) - begin, 0).to(tl.int32) // KEYS * KEYS
            for at in tl.range(begin, open_end, KEYS):
                key = at + tl.arange(0, KEYS)
                tile = tl.load(keys + of_head + key[:, None] * k_token + column[None, :])
                scores = tl.dot(queries, tl.trans(tile.to(queries.dtype)), input_precision="ieee") * own_scale
                tl.store(logits_row + key[None, :], scores, mask=exists[:, None])
                higher = tl.maximum(top, scores)
                total = total * tl.exp2(top - higher) + tl.exp2(scores - higher)
                top = higher
            for at in tl.range(open_end, end, KEYS, num_stages=1):
                key = at + tl.arange(0, KEYS)
                tile = tl.load(
                    keys + of_head + key[:, None] * k_token + column[None, :], mask=(key < length)[:, None], other=0.0
                )
                scores = tl.dot(queries, tl.trans(tile.to(queries.dtype)), input_precision="ieee") * own_scale
                scores = tl.where(key[None, :] <= at_position[:, None], scores, float("-inf"))
                tl.store(logits_row + key[None, :], scores, mask=exists[:, None])
                higher = tl.maximum(top, scores)
                base = tl.where(higher == float("-inf"), 0.0, higher)
                total = total * tl.exp2(top - base) + tl.exp2(scores - base)
                top = higher

            row_top = tl.max(top, 1)
            base = tl.where(row_top == float("-inf"), 0.0, row_top)
            row_total = tl.sum(total * tl.exp2(top - base[:, None]), 1)
            slot = group_id * CHUNKS
            tl.store(tops + (slot + chunk) * ROWS + row, row_top)
            tl.store(totals + (slot + chunk) * ROWS + row, row_total)
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


@triton.jit(do_not_specialize=["queries_count"])
def _sum_rows(logits, normalisers, position, out, lines, pitch, out_columns, queries_count, KEYS: tl.constexpr):
    """One program: KEYS positions of one sequence, summed over all rows."""
    sequence = tl.program_id(1)
    begin = tl.program_id(0) * KEYS
    key = begin + tl.arange(0, KEYS)
    length = tl.load(position + sequence * queries_count + queries_count - 1) + 1
    total = tl.zeros([KEYS], tl.float32)
    first = (sequence * lines).to(tl.int64)
    if begin + KEYS <= length:  # without a mask, loads are wide
        for line in range(lines):
            log_sum = tl.load(normalisers + first + line)
            total += tl.exp2(tl.load(logits + (first + line) * pitch + key) - log_sum)
    elif begin < length:
        for line in range(lines):
            log_sum = tl.load(normalisers + first + line)
            score = tl.load(logits + (first + line) * pitch + key, mask=key < length, other=float("-inf"))
            total += tl.exp2(score - log_sum)
    tl.store(out + sequence.to(tl.int64) * out_columns + key, total, mask=key < out_columns)


def attention_scores(
    q: Tensor,
    keys: Held,
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
        programs: how many read the keys; by default as many as use the whole GPU.

    Returns:
        [batch, columns] fp32, zero beyond a sequence's last query.
    """
    keys, key_scales = parts(keys)
    batch, queries, entries, head_size = q.shape
    capacity = keys.shape[2]
    columns = capacity if columns is None else columns
    most = members.shape[1]
    rows = max(16, next_power_of_2(queries * most))
    wide = 64 if rows > 64 or q.itemsize > 2 else 128
    pitch = ceil_div(capacity, wide) * wide
    count = len(groups)
    # By default several waves of programs, each with several tiles to stream.
    share = 4096
    if programs is None:
        share = max(2 * wide, min(share, next_power_of_2(ceil_div(capacity * batch * count, 4 * processors(q.device)))))
    chunks = ceil_div(capacity, share)
    pieces = batch * count * chunks
    lines = entries * queries
    logits = torch.empty(batch, lines * pitch, dtype=torch.float32, device=q.device)
    tops, totals = torch.empty(2, batch, count * chunks * rows, dtype=torch.float32, device=q.device)
    normalisers = torch.empty(batch, lines, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, columns, dtype=torch.float32, device=q.device)
    _logits[(min(pieces, programs or pieces),)](
        q, keys, key_scales, groups, members, position, logits, tops, totals, normalisers,
        counters(q.device, batch * count, "scores"), *q.stride()[:3], *keys.stride()[:4],
        *((0, 0) if key_scales is None else key_scales.stride()[:2]),
        batch, count, queries, entries, pitch, head_size**-0.5 * math.log2(math.e),
        MEMBERS=most, ROWS=rows, D=head_size, KEYS=wide, SHARE=share, CHUNKS=chunks,
        SLOTS=next_power_of_2(chunks), SCALED=key_scales is not None,
        num_warps=8 if rows > 16 else 4, num_stages=2 if rows > 64 or q.itemsize > 2 else 3,
    )  # fmt: skip
    _sum_rows[(ceil_div(columns, 512), batch)](
        logits, normalisers, position, out, lines, pitch, columns, queries, KEYS=512, num_warps=4
    )
    return out
