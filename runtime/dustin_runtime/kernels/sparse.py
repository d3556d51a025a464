"""Attention of a few new tokens over listed positions of the cache: gathered, split, merged, in one launch.

References: `dustin_runtime.attention.sparse.sparse_reference`, and `attention.window.window_reference` for the list
that needs not be written down: the first positions and the last.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.attention.rest import RestTokens
from dustin_runtime.cache import WHOLE, Ring
from dustin_runtime.kernels import ceil_div, dependent_launch, next_power_of_2, processors, row_tile
from dustin_runtime.kernels.online_softmax import MOST_IN_A_TEAM, attend_tile, finish, packed_queries
from dustin_runtime.kernels.workspace import counters
from dustin_runtime.scaled import Held, parts


@triton.jit
def _slots(position, sink, ring):
    """Where positions lie, see `cache.Ring`."""
    return tl.where(position < sink, position, sink + (position - sink) % ring)


@triton.jit
def _window_slots(place, first_kept, skipped, sink, ring):
    """Slots of the first positions and the last, by their place in the list that is not written down."""
    return _slots(tl.where(place < first_kept, place, place + skipped), sink, ring)


_VARYING = [
    "tokens", "kv_heads", "group", "splits", "share", "budget", "first_kept", "sink", "ring", "slots",
]  # fmt: skip


@triton.jit(do_not_specialize=_VARYING)  # one binary serves all
def _sparse(
    q, k, v, k_scale, v_scale, start, kept, full, rest_keys, rest_values, rest_bias, saved,
    out, partials, tops, totals, counter,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, kept_batch, kept_head,
    tokens, scale, kv_heads, group, splits, share, budget, first_kept, sink, ring, slots,
    ROWS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, LIST: tl.constexpr, NEW: tl.constexpr,
    WINDOW: tl.constexpr, SCALED: tl.constexpr, GUARDED: tl.constexpr, REST: tl.constexpr,
    SAVED: tl.constexpr, TEAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one KV head of one sequence, ROWS of its queries, a share of the list; the last has the new tokens,
    and each row's own token that stands in for the rest, if REST.

    What older kernels wrote is read before the wait for the kernel that wrote the queries (programmatic dependent
    launch): the list, which stays in registers, so that keys and values are the only loads of the loop and several
    tiles of them are under way; and keys and values themselves, where a share is one tile.

    WINDOW: there is no list; the first `first_kept` and the last `budget - first_kept` positions are attended to.
    SCALED: as of `dense._dense`.
    GUARDED: nothing is attended to by the sequences that `full` names.
    SAVED: queries are also put where their positions have their turns in `slots` of `saved`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row_tile = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2) // kv_heads
    head = tl.program_id(2) % kv_heads
    group_id = tl.program_id(2) * tl.num_programs(0) + row_tile

    k += sequence.to(tl.int64) * k_batch + head.to(tl.int64) * k_head
    v += sequence.to(tl.int64) * v_batch + head.to(tl.int64) * v_head
    column = tl.arange(0, D)
    first = tl.load(start + sequence).to(tl.int32)
    entry = tl.arange(0, LIST)
    skipped = 0
    if GUARDED:
        left_out = tl.load(full + sequence) != 0
        budget = tl.where(left_out, 0, budget)
    if WINDOW:
        skipped = tl.maximum(first - budget, 0)  # positions between the first and the last
        count = tl.maximum(tl.minimum(tl.minimum(first, budget) - split * share, share), 0)
        chosen = _window_slots(split * share + entry, first_kept, skipped, sink, ring)
    else:
        listed = kept + sequence * kept_batch + head * kept_head + split * share + entry
        chosen = tl.load(listed, mask=(entry < share) & (split * share + entry < budget), other=-1).to(tl.int32)
        count = tl.sum((chosen >= 0).to(tl.int32), 0)
        chosen = _slots(chosen, sink, ring)
    if LIST == KEYS:
        within = entry < count
        keys = tl.load(k + chosen[:, None] * k_token + column[None, :], mask=within[:, None], other=0.0)
        values = tl.load(v + chosen[:, None] * v_token + column[None, :], mask=within[:, None], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    queries, token, there, place_out = packed_queries(
        q, q_batch, q_token, q_head, sequence, head, row_tile, tokens, kv_heads, group, ROWS, D
    )
    if SAVED:  # noqa: SIM102 - as below
        if split == 0:
            of_slot = sequence.to(tl.int64) * slots + (first + token) % slots
            of_head = head * group + (row_tile * ROWS + tl.arange(0, ROWS)) % group
            place = (of_slot * (kv_heads * group) + of_head)[:, None] * D + column[None, :]
            tl.store(saved + place, queries, mask=there)
    if GUARDED:  # noqa: SIM102 - it is known when the kernel is compiled
        # Not before the wait: once all programs have ended, the next kernel takes everything before it as done.
        if left_out:
            return

    own_scale = scale  # of keys that are not scaled
    if SCALED:
        scale *= tl.load(k_scale + tl.program_id(2))
    new = tl.arange(0, NEW)
    has_new = split == splits - 1
    new_there = (new < tl.where(has_new, tokens, 0))[:, None]
    new_slot = _slots(first + new, sink, ring)
    new_keys = tl.load(k + new_slot[:, None] * k_token + column[None, :], mask=new_there, other=0.0)
    new_values = tl.load(v + new_slot[:, None] * v_token + column[None, :], mask=new_there, other=0.0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    if LIST == KEYS:
        top, total, acc = attend_tile(queries, keys, values, within[None, :], scale, top, total, acc, MASKED=True)
    else:
        full = count // KEYS * KEYS
        for at in tl.range(0, full, KEYS):
            # Tiles are fetched ahead, so this also runs beyond the end, where its loads do not.
            turn = tl.minimum(at + tl.arange(0, KEYS), LIST - 1)
            if WINDOW:
                slot = _window_slots(split * share + turn, first_kept, skipped, sink, ring)
            else:
                slot = tl.gather(chosen, turn, 0)
            keys = tl.load(k + slot[:, None] * k_token + column[None, :])
            values = tl.load(v + slot[:, None] * v_token + column[None, :])
            top, total, acc = attend_tile(queries, keys, values, None, scale, top, total, acc, MASKED=False)
        if full < count:
            within = full + tl.arange(0, KEYS) < count
            turn = tl.minimum(full + tl.arange(0, KEYS), LIST - 1)
            if WINDOW:
                slot = _window_slots(split * share + turn, first_kept, skipped, sink, ring)
            else:
                slot = tl.gather(chosen, turn, 0)
            keys = tl.load(k + slot[:, None] * k_token + column[None, :], mask=within[:, None], other=0.0)
            values = tl.load(v + slot[:, None] * v_token + column[None, :], mask=within[:, None], other=0.0)
            top, total, acc = attend_tile(queries, keys, values, within[None, :], scale, top, total, acc, MASKED=True)
    if has_new:
        seen = new[None, :] <= token[:, None]
        top, total, acc = attend_tile(queries, new_keys, new_values, seen, scale, top, total, acc, MASKED=True)
        if REST:
            row = row_tile * ROWS + tl.arange(0, ROWS)
            of_rest = sequence * (kv_heads * group) + head * group + row % group
            rest_place = of_rest[:, None] * D + column[None, :]
            wanted = row < tokens * group
            rest_key = tl.load(rest_keys + rest_place, mask=wanted[:, None], other=0.0)
            rest_value = tl.load(rest_values + rest_place, mask=wanted[:, None], other=0.0)
            bias = tl.load(rest_bias + of_rest, mask=wanted, other=0.0)
            logit = tl.sum(queries.to(tl.float32) * rest_key.to(tl.float32), 1) * own_scale
            logit = (logit + bias * 1.4426950408889634) / scale  # as `attend_tile` has it
            higher = tl.maximum(top, logit)
            base = tl.where(higher == float("-inf"), 0.0, higher * scale)
            shrink = tl.exp2(top * scale - base)
            weight = tl.exp2(logit * scale - base)
            value = rest_value.to(tl.float32)
            if SCALED:
                value /= tl.load(v_scale + tl.program_id(2))
            total = total * shrink + weight
            acc = acc * shrink[:, None] + weight[:, None] * value
            top = higher

    if SCALED:
        acc *= tl.load(v_scale + tl.program_id(2))
    finish(
        acc, top, total, scale, out, place_out, there,
        group_id, group_id * splits, 1, split, splits, tl.num_programs(0) * tl.num_programs(2),
        partials, tops, totals, counter, ROWS, D, TEAMS,
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
    """Choose by the shape alone.

    A list is split until the processors are busy, where tiles are small. The merge of large ones costs as much as a few
    hundred keys.
    """
    tile = row_tile(rows)
    groups = batch * kv_heads * ceil_div(rows, tile)
    keys = 64 if head_size >= 128 else 128
    most = (
        min(2 * processors // groups, ceil_div(budget, 64)) if tile == 16 else min(processors // groups, budget // 512)
    )
    splits = max(1, most, ceil_div(budget, MOST_LISTED))
    keys = min(keys, max(16, next_power_of_2(ceil_div(budget, splits))))
    return Tiling(tile, keys, splits, 4, 2 if element_bytes > 2 or tile > 64 else 3)


def sparse_attention(
    q: Tensor,
    k: Held,
    v: Held,
    start: Tensor,
    kept: Tensor,
    cut: Tiling | None = None,
    ring: Ring = WHOLE,
    full: Tensor | None = None,
    rest: RestTokens | None = None,
    saved: Tensor | None = None,
) -> Tensor:
    """Attend; shapes as in `attention.sparse.sparse_reference`.

    Args:
        full: [batch] bool, rows of the result that are left as they are, for `dense.dense_rows` to write; or None.
        rest: contiguous, or None.
        saved: as of `attention.rest.save_queries`, which is done besides; contiguous, or None.
    """
    lists = kept.expand(len(q), k.shape[2], -1)  # one list for all heads has stride 0
    return _launch(q, k, v, start, lists, lists.shape[2], None, cut, ring, full, rest, saved)


def window_attention(
    q: Tensor,
    k: Held,
    v: Held,
    start: Tensor,
    budget: int,
    sink: int,
    cut: Tiling | None = None,
    ring: Ring = WHOLE,
) -> Tensor:
    """Attend; arguments as of `attention.window.window_reference`."""
    return _launch(q, k, v, start, None, budget, min(sink, budget - 1), cut, ring)


def _launch(
    q: Tensor,
    k: Held,
    v: Held,
    start: Tensor,
    lists: Tensor | None,
    budget: int,
    first_kept: int | None,
    cut: Tiling | None,
    ring: Ring,
    full: Tensor | None = None,
    rest: RestTokens | None = None,
    saved: Tensor | None = None,
) -> Tensor:
    (k, k_scale), (v, v_scale) = parts(k), parts(v)
    batch, tokens, query_heads, head_size = q.shape
    kv_heads = k.shape[2]
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
    _sparse[(tiles, cut.splits, batch * kv_heads)](
        q, k, v, k_scale, v_scale, start, start if lists is None else lists,
        start if full is None else full, *(rest or (q, q, q)), q if saved is None else saved,
        out, partials, tops, totals, counters(q.device, groups + slots),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *((0, 0) if lists is None else lists.stride()[:2]),
        tokens, head_size**-0.5 * math.log2(math.e), kv_heads, group, cut.splits, share, budget, first_kept or 0, *ring,
        1 if saved is None else saved.shape[1],
        ROWS=cut.rows, D=head_size, KEYS=cut.keys, LIST=next_power_of_2(share), NEW=max(16, next_power_of_2(tokens)),
        WINDOW=lists is None, SCALED=k_scale is not None, GUARDED=full is not None,
        REST=rest is not None, SAVED=saved is not None, TEAMS=cut.splits > MOST_IN_A_TEAM,
        num_warps=cut.warps, num_stages=cut.stages, **dependent_launch(q.device),
    )  # fmt: skip
    return out
