"""The end of a step in one launch: a sequence's state rolls forward, and what the host wants is packed.

Reference: `dustin_runtime.step.advance_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.kernels import next_power_of_2


@triton.jit
def _advance(
    ids, tokens, accepted, finite, read, queries, active, lengths, recent, history, packed,
    q_batch, q_token, count, size,
    TOKENS: tl.constexpr, SIZE: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """One program: one row."""
    row = tl.program_id(0)
    on = tl.load(active + row) != 0
    taken = tl.load(accepted + row)  # drafts, so this is also the place of the target's own token
    place = tl.arange(0, TOKENS)
    there = place < count
    line = packed + row * (count + 3)
    tl.store(line + place, tl.load(tokens + row * count + place, mask=there).to(tl.float64), mask=there)
    sound = tl.min(tl.load(finite + row * count + place, mask=there, other=1).to(tl.int32), 0)
    tl.store(line + count, tl.where(on, taken + 1, 0).to(tl.float64))
    tl.store(line + count + 1, tl.load(read + row).to(tl.float64))
    tl.store(line + count + 2, sound.to(tl.float64))
    tl.store(recent + row * 2, tl.load(ids + row * count + taken), mask=on)
    tl.store(recent + row * 2 + 1, tl.load(tokens + row * count + taken), mask=on)
    tl.store(lengths + row, tl.load(lengths + row) + taken + 1, mask=on)
    if HISTORY:
        column = tl.arange(0, SIZE)
        query = tl.load(queries + row.to(tl.int64) * q_batch + taken * q_token + column, mask=column < size, other=0.0)
        tl.store(history + row * size + column, query, mask=column < tl.where(on, size, 0))


def advance(
    ids: Tensor,
    tokens: Tensor,
    accepted: Tensor,
    finite: Tensor,
    read: Tensor,
    queries: Tensor | None,
    active: Tensor,
    lengths: Tensor,
    recent: Tensor,
    history_query: Tensor | None,
) -> Tensor:
    """Arguments and result as of `step.advance_reference`; tensors are contiguous."""
    batch, count = ids.shape
    packed = torch.empty(batch, count + 3, dtype=torch.float64, device=ids.device)
    known = queries is not None and history_query is not None
    size = history_query[0].numel() if history_query is not None else 1
    _advance[(batch,)](
        ids, tokens, accepted, finite, read, queries if known else ids, active, lengths, recent,
        history_query if known else ids, packed, count * size, size, count, size,
        TOKENS=next_power_of_2(count), SIZE=next_power_of_2(size), HISTORY=known, num_warps=4,
    )  # fmt: skip
    return packed
