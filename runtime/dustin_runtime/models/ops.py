"""The small operations of a decoder layer: a fused kernel on a GPU, the plain reference beside it elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dustin_runtime.cache import WHOLE, Ring
from dustin_runtime.kernels import usable


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual addition and RMSNorm (arXiv 1910.07467).

    Args:
        x: [..., width], contiguous; delta: the same or None; weight: [width].

    Returns:
        x + delta, and its norm times weight.
    """
    if usable(x):
        from dustin_runtime.kernels.pointwise import add_rms_norm as kernel

        return kernel(x, delta, weight, eps)
    return add_rms_norm_reference(x, delta, weight, eps)


def add_rms_norm_reference(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in plain torch."""
    total = x if delta is None else x + delta
    return total, rms_norm(total, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise over the last axis in fp32 (float64 is normalised as fp32 too, as transformers does)."""
    return F.rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype) * weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., inputs], contiguous, times weight [outputs, inputs], plus bias [outputs]."""
    if _few_rows(x, weight, gated=False):
        from dustin_runtime.kernels.linear import linear as kernel

        return kernel(x, weight, bias)
    return F.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """SwiGLU (arXiv 2002.05202): weight [2 ffn, inputs] holds the gate, which silu is applied to, then its factor."""
    if _few_rows(x, weight, gated=True):
        from dustin_runtime.kernels.linear import linear as kernel

        return kernel(x, weight, gated=True)
    gate_up = F.linear(x, weight)
    if usable(gate_up):
        from dustin_runtime.kernels.pointwise import silu_mul

        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _few_rows(x: Tensor, weight: Tensor, gated: bool) -> bool:
    if x.dtype == torch.float32 or not usable(x):
        return False
    from dustin_runtime.kernels.linear import worthwhile

    outputs, inputs = weight.shape
    return worthwhile(x.numel() // inputs, outputs // (2 if gated else 1), inputs, gated)


def rope_append(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    start: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_heads: int,
    eps: float,
    ring: Ring = WHOLE,
    more_keys: Tensor | None = None,
) -> Tensor:
    """Norm of queries and keys (Qwen3), RoPE (arXiv 2104.09864), and the new keys and values into the cache.

    Args:
        qkv: [batch, tokens, query_heads + 2 kv_heads, head_size], contiguous.
        q_norm, k_norm: [head_size] or None.
        cos, sin: [positions, head_size / 2] fp32.
        start: [batch] int64, position of each row's first token.
        k_cache, v_cache: [batch, slots, kv_heads, head_size] of one layer, where `ring` says.
        more_keys: [batch, capacity, kv_heads, head_size], the keys once more, at their positions; or None.

    Returns:
        [batch, tokens, query_heads, head_size] rotated queries.
    """
    if usable(qkv, heads_of=qkv.shape[3]):
        from dustin_runtime.kernels.pointwise import rope_append as kernel

        return kernel(qkv, q_norm, k_norm, cos, sin, start, k_cache, v_cache, query_heads, eps, ring, more_keys)
    return rope_append_reference(
        qkv, q_norm, k_norm, cos, sin, start, k_cache, v_cache, query_heads, eps, ring, more_keys
    )


def rope_append_reference(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    start: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_heads: int,
    eps: float,
    ring: Ring = WHOLE,
    more_keys: Tensor | None = None,
) -> Tensor:
    """`rope_append` in plain torch."""
    kv_heads = k_cache.shape[2]
    q, k, v = qkv.split((query_heads, kv_heads, kv_heads), dim=2)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    positions = start.unsqueeze(1) + torch.arange(qkv.shape[1], device=start.device)
    q, k = (rotate(x, cos[positions], sin[positions]) for x in (q, k))
    rows = torch.arange(len(start), device=start.device).unsqueeze(1)
    slots = ring.slots(positions)
    k_cache.index_put_((rows, slots), k)
    v_cache.index_put_((rows, slots), v)
    if more_keys is not None:
        more_keys.index_put_((rows, positions), k)
    return q


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, rotate-half layout: x [batch, tokens, heads, size]; cos, sin [batch, tokens, size / 2]."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def argmax_finite(logits: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """The most probable id below `vocab`, and whether all logits below it are finite.

    Args:
        logits: [..., columns], contiguous.

    Returns:
        ids [...] int64; finite [...] bool.
    """
    if usable(logits):
        from dustin_runtime.kernels.argmax import argmax_finite as kernel

        return kernel(logits, vocab)
    logits = logits[..., :vocab]
    return logits.argmax(dim=-1), logits.isfinite().all(dim=-1)
