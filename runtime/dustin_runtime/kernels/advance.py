"""The end of a step in one launch: what is accepted, a sequence's state rolled forward, and what the host wants packed.

Reference: `dustin_runtime.advance.advance_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.kernels import dependent_launch, next_power_of_2


@triton.jit
def _advance(
    ids, tokens, decided, forced, finite, read, queries, heads, active, lengths, recent, history, packed,
    f_row, q_batch, q_token, count, size,
    TOKENS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
    DECIDED: tl.constexpr, FORCED: tl.constexpr, HISTORY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one row."""
    row = tl.program_id(0)
    place = tl.arange(0, TOKENS)
    there = place < count
    on = tl.load(active + row) != 0
    length = tl.load(lengths + row)
    draft = tl.load(ids + row * count + place + 1, mask=place + 1 < count, other=-1)
    if FORCED:
        passed = tl.load(forced + row * f_row + length + 1 + place, mask=place + 1 < count, other=0) != 0
    if PDL:
        tl.extra.cuda.gdc_wait()
    own = tl.load(tokens + row * count + place, mask=there, other=0)
    emitted = own
    if DECIDED:
        taken = tl.load(decided + row).to(tl.int32)
    else:
        if not FORCED:
            passed = draft == own
        # Drafts accepted, so this is also the place of the target's own token.
        taken = tl.min(tl.where(passed & (place + 1 < count), count - 1, tl.minimum(place, count - 1)), 0)
        if FORCED:
            emitted = tl.where(place < taken, draft, own)
    line = packed + row * (count + 3)
    tl.store(line + place, emitted.to(tl.float64), mask=there)
    sound = tl.min(tl.load(finite + row * count + place, mask=there, other=1).to(tl.int32), 0)
    tl.store(line + count, tl.where(on, taken + 1, 0).to(tl.float64))
    tl.store(line + count + 1, tl.load(read + row).to(tl.float64))
    tl.store(line + count + 2, sound.to(tl.float64))
    tl.store(recent + row * 2, tl.load(ids + row * count + taken), mask=on)
    tl.store(recent + row * 2 + 1, tl.sum(tl.where(place == taken, emitted, 0), 0), mask=on)
    tl.store(lengths + row, length + taken + 1, mask=on)
    if HISTORY:
        column = tl.arange(0, SIZE)
        inside = column < tl.where(on, size, 0)
        head = tl.load(heads + column // D, mask=inside, other=0)
        query = queries + row.to(tl.int64) * q_batch + taken * q_token + head * D + column % D
        tl.store(history + row * size + column, tl.load(query, mask=inside, other=0.0), mask=inside)


def advance(
    ids: Tensor,
    tokens: Tensor,
    accepted: Tensor | None,
    forced: Tensor | None,
    finite: Tensor,
    read: Tensor,
    queries: Tensor | None,
    heads: Tensor | None,
    active: Tensor,
    lengths: Tensor,
    recent: Tensor,
    history_query: Tensor | None,
) -> Tensor:
    """Arguments and result as of `advance.advance_reference`; tensors are contiguous."""
    batch, count = ids.shape
    packed = torch.empty(batch, count + 3, dtype=torch.float64, device=ids.device)
    known = queries is not None and heads is not None and history_query is not None
    q, index, saved = (queries, heads, history_query) if known else (ids, ids, ids)
    assert q is not None and index is not None and saved is not None
    size = saved[0].numel()
    _advance[(batch,)](
        ids, tokens, ids if accepted is None else accepted, ids if forced is None else forced, finite, read,
        q, index, active, lengths, recent, saved, packed,
        0 if forced is None else forced.stride(0), q.stride(0), q.stride(1), count, size,
        TOKENS=next_power_of_2(count), D=q.shape[-1], SIZE=next_power_of_2(size),
        DECIDED=accepted is not None, FORCED=forced is not None and accepted is None, HISTORY=known,
        num_warps=4, **dependent_launch(ids.device),
    )  # fmt: skip
    return packed
