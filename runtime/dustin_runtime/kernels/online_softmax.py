"""What dense and sparse attention share: packed queries, one tile of online softmax, the merge of partial results.

Online softmax: arXiv 1805.02867. Splitting over keys with a merge at the end: FlashDecoding (PyTorch blog, 2023-10).
Exponents are base 2, with log2(e) folded into the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_IN_A_TEAM = 8
"""Programs whose parts are merged by one."""
TEAM = tl.constexpr(MOST_IN_A_TEAM)


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
    acc, top, total, scale, out, out_offset, out_seen, group, slot, stride, split, active, groups,
    partials, tops, totals, counters, ROWS: tl.constexpr, D: tl.constexpr, TEAMS: tl.constexpr,
):  # fmt: skip
    """Write the result of a group of programs: at once if it is one program, else by the last of them to arrive.

    Merges run in order of the splits, so results do not depend on which program was last. Of many programs the last of
    each team merges the team's first: one program alone would take longer to merge fifty parts than they to compute.

    Args:
        out_offset, out_seen: [ROWS, D] element offsets of the output, and which of them exist.
        group: index of this group's counter; active: programs in the group; split: of this program in it.
        slot, stride: split s of the group owns the scratch slot `slot + s * stride`.
        groups: how many there are at most; behind their counters is one for each slot.
        partials: [slots, ROWS, D] fp32; tops, totals: [slots, ROWS] fp32.
        TEAMS: whether a group may be larger than a team; where none is, registers are left for other things.
    """
    if active == 1:
        tl.store(out + out_offset, (acc / total[:, None]).to(out.dtype.element_ty), mask=out_seen)
    else:
        _put(acc, top, total, slot + split * stride, out_seen, partials, tops, totals, ROWS, D)
        team = 1
        ends = active > 0
        if TEAMS:
            team = tl.where(active > TEAM, TEAM, 1)
            if team > 1:
                first = slot + split // team * team * stride
                size = tl.minimum(team, active - split // team * team)
                ends = _last(counters + groups + first, size)
                if ends:
                    acc, top, total = _merged(first, stride, size, scale, out_seen, partials, tops, totals, ROWS, D)
                    tl.debug_barrier()  # the first part lies where the team's goes
                    _put(acc, top, total, first, out_seen, partials, tops, totals, ROWS, D)
        teams = tl.cdiv(active, team)
        if ends:  # noqa: SIM102 - what is computed on a device is no condition to join
            if _last(counters + group, teams):
                acc, top, total = _merged(slot, stride * team, teams, scale, out_seen, partials, tops, totals, ROWS, D)
                tl.store(out + out_offset, (acc / total[:, None]).to(out.dtype.element_ty), mask=out_seen)


@triton.jit
def _put(acc, top, total, slot, seen, partials, tops, totals, ROWS: tl.constexpr, D: tl.constexpr):
    """Store a part in its slot."""
    row = tl.arange(0, ROWS)
    tl.store(partials + slot * ROWS * D + row[:, None] * D + tl.arange(0, D)[None, :], acc, mask=seen)
    tl.store(tops + slot * ROWS + row, top)
    tl.store(totals + slot * ROWS + row, total)


@triton.jit
def _last(counter, count):
    """Whether this program is the last of `count` to arrive, which resets the counter."""
    tl.debug_barrier()  # all threads' stores come before the one thread's atomic, which releases them
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _merged(slot, stride, count, scale, seen, partials, tops, totals, ROWS: tl.constexpr, D: tl.constexpr):
    """acc, top and total of `count` parts together, in their order."""
    row = tl.arange(0, ROWS)
    tile = row[:, None] * D + tl.arange(0, D)[None, :]
    best = tl.full([ROWS], float("-inf"), tl.float32)
    merged = tl.zeros([ROWS, D], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    together: tl.constexpr = 4 if ROWS * D <= 2048 else 2
    for begin in range(0, count, together):
        # Unrolled, so that the loads of some parts are under way together: each takes most of a microsecond.
        for ahead in tl.static_range(together):
            there = begin + ahead < count
            at = (slot + tl.minimum(begin + ahead, count - 1) * stride) * ROWS
            high = tl.load(tops + at + row, cache_modifier=".cg")
            mass = tl.load(totals + at + row, cache_modifier=".cg")
            rest = tl.load(partials + at * D + tile, mask=seen, other=0.0, cache_modifier=".cg")
            high = tl.where(there, high, float("-inf"))
            higher = tl.maximum(best, high)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shrink, part = tl.exp2((best - base) * scale), tl.exp2((high - base) * scale)
            weight = weight * shrink + part * mass
            merged = merged * shrink[:, None] + part[:, None] * rest
            best = higher
    return merged, best, weight
