"""Sending for memory before it is needed: into the L2, from where it is read in a third of the time."""

from __future__ import annotations

import triton
import triton.language as tl

LINE = tl.constexpr(64)
"""16-bit elements of a cache line, 128 bytes."""


@triton.jit
def to_l2(places):
    """Start to bring the cache lines at `places` (pointers, of any shape) into the L2; needs no answer.

    The L2 is where all processors' writes meet, so what another kernel is still writing may be sent for as well.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
