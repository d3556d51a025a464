"""Prefill: many new tokens of one sequence, with the flash kernel of flash-attn if it is installed, else of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def usable(q: Tensor) -> bool:
    """Whether flash attention can serve: 16-bit on a GPU, one sequence, head sizes of multiples of 8 up to 256."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and half and q.shape[0] == 1 and q.shape[3] % 8 == 0 and q.shape[3] <= 256


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last `tokens` positions of `k`.

    Args:
        q: [1, tokens, query_heads, head_size]; k, v: [1, extent, kv_heads, head_size], where the new tokens are the
            last of the extent: query t sees the positions <= extent - tokens + t.

    Returns:
        [1, tokens, query_heads, head_size].
    """
    return _implementation()(q, k, v)


@functools.cache
def _implementation() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    try:
        from flash_attn_interface import flash_attn_func as version_3

        return lambda q, k, v: _first(version_3(q, k, v, causal=True))
    except ImportError:
        pass
    try:
        from flash_attn import flash_attn_func as version_2

        return lambda q, k, v: _first(version_2(q, k, v, causal=True))
    except ImportError:
        return _torch


def _torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # The public call cannot align a causal mask to the last key; the operation behind it does.
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False, scale=q.shape[3] ** -0.5
    )
    return _first(out)


def _first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]
