"""What dense and sparse attention share: packed queries, one tile of online softmax, the merge of partial results.

Online softmax: arXiv 1805.02867. Splitting over keys with a merge at the end: FlashDecoding (PyTorch blog, 2023-10).
Exponents are base 2, with log2(e) folded into the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def packed_queries(
    q, q_batch, q_token, q_head, sequence, head, row_tile, tokens, kv_heads, group, ROWS: tl.constexpr, D: tl.constexpr
):
    """The queries of a KV head as rows of one tile: token by token, the query heads of its group together.

    Returns:
        queries [ROWS, D]; token [ROWS], which new token a row belongs to; there [ROWS, D], whether the row exists;
        place [ROWS, D], where it lies in a contiguous [batch, tokens, query_heads, D].
    """
    row = row_tile * ROWS + tl.arange(0, ROWS)
    token = row // group
    column = tl.arange(0, D)
    there = (token < tokens)[:, None] & (column < D)[None, :]
    heads = head * group + row % group
    row_of = sequence.to(tl.int64) * q_batch + token * q_token + heads * q_head
    queries = tl.load(q + row_of[:, None] + column[None, :], mask=there, other=0.0)
    place = ((sequence.to(tl.int64) * tokens + token) * (kv_heads * group) + heads)[:, None] * D + column[None, :]
    return queries, token, there, place


@triton.jit
def attend_tile(q, k, v, seen, scale, top, total, acc, MASKED: tl.constexpr):
    """One tile of keys.

    Args:
        q: [ROWS, D]; k, v: [KEYS, D], of another dtype if an 8-bit cache has them; seen: [ROWS, KEYS] which keys
            a row sees, if MASKED.
        scale: head_size^-1/2 log2(e).
        top, total: [ROWS] fp32 running maximum of the unscaled scores, and sum of exponentials; acc: [ROWS, D] fp32.
    """
    k, v = k.to(q.dtype), v.to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = higher * scale
    if MASKED:
        base = tl.where(higher == float("-inf"), 0.0, base)  # a row that has seen nothing yet: avoid inf - inf
    shrink = tl.exp2(top * scale - base)
    weights = tl.exp2(scores * scale - base[:, None])  # one fused multiply-add per score
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def finish(
    acc, top, total, scale, out, out_offset, out_seen, group, slot, stride, split, active,
    partials, tops, totals, counters, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write the result of a group of programs: at once if it is one program, else by the last of them to arrive.

    The merge runs in order of the splits, so results do not depend on which program was last.

    Args:
        out_offset, out_seen: [ROWS, D] element offsets of the output, and which of them exist.
        group: index of this group's counter; active: programs in the group; split: of this program in it.
        slot, stride: split s of the group owns the scratch slot `slot + s * stride`.
        partials: [slots, ROWS, D] fp32; tops, totals: [slots, ROWS] fp32.
    """
    row = tl.arange(0, ROWS)
    tile = row[:, None] * D + tl.arange(0, D)[None, :]
    if active == 1:
        tl.store(out + out_offset, (acc / total[:, None]).to(out.dtype.element_ty), mask=out_seen)
    else:
        mine = (slot + split * stride) * ROWS
        tl.store(partials + mine * D + tile, acc, mask=out_seen)
        tl.store(tops + mine + row, top)
        tl.store(totals + mine + row, total)
        tl.debug_barrier()  # all threads' stores come before the one thread's atomic, which releases them
        arrived = tl.atomic_add(counters + group, 1, sem="acq_rel")
        if arrived == active - 1:
            best = tl.full([ROWS], float("-inf"), tl.float32)
            merged = tl.zeros([ROWS, D], tl.float32)
            weight = tl.zeros([ROWS], tl.float32)
            together: tl.constexpr = 4 if ROWS * D <= 2048 else 2
            for begin in range(0, active, together):
                # Unrolled, so that the loads of some parts are under way together: each takes most of a microsecond.
                for ahead in tl.static_range(together):
                    there = begin + ahead < active
                    at = (slot + tl.minimum(begin + ahead, active - 1) * stride) * ROWS
                    high = tl.load(tops + at + row, cache_modifier=".cg")
                    mass = tl.load(totals + at + row, cache_modifier=".cg")
                    rest = tl.load(partials + at * D + tile, mask=out_seen, other=0.0, cache_modifier=".cg")
                    high = tl.where(there, high, float("-inf"))
                    higher = tl.maximum(best, high)
                    base = tl.where(higher == float("-inf"), 0.0, higher)
                    shrink, part = tl.exp2((best - base) * scale), tl.exp2((high - base) * scale)
                    weight = weight * shrink + part * mass
                    merged = merged * shrink[:, None] + part[:, None] * rest
                    best = higher
            tl.store(out + out_offset, (merged / weight[:, None]).to(out.dtype.element_ty), mask=out_seen)
            tl.store(counters + group, 0)
