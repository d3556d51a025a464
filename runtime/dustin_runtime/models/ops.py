"""The small operations of a decoder layer: a fused kernel on a GPU, the plain reference beside it elsewhere."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dustin_runtime.cache import Append
from dustin_runtime.kernels import usable
from dustin_runtime.scaled import narrowed, scale_for


class Unscaled(NamedTuple):
    """What RMSNorm makes of x, short of the division by its root mean square, which the product after it makes up for.

    Attributes:
        gained: [..., width], x times the norm's gain.
        squares: [parts, rows] fp32, sums of x's squares over parts of a row.
    """

    gained: Tensor
    squares: Tensor
    eps: float


Normed = Tensor | Unscaled
"""A normalised input of `linear` or `gated_linear`."""


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of a table [vocab, width]: [..., width]."""
    # Flat indices: of few rows in more dimensions torch makes a slow selection.
    return table[ids.reshape(-1)].view(*ids.shape, table.shape[1])


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


def linear(x: Normed, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., inputs], contiguous, times weight [outputs, inputs], plus bias [outputs]."""
    if isinstance(x, Unscaled):
        from dustin_runtime.kernels.linear import linear as kernel

        return kernel(x.gained, weight, bias, squares=x.squares, eps=x.eps)
    if _few_rows(x, weight, gated=False):
        from dustin_runtime.kernels.linear import linear as kernel

        return kernel(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_into(out: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    """`linear` without a bias into a contiguous tensor [..., outputs]; None is a new one."""
    if out is None:
        return linear(x, weight)
    if _few_rows(x, weight, gated=False):
        from dustin_runtime.kernels.linear import linear as kernel

        return kernel(x, weight, out=out)
    torch.mm(x.view(-1, x.shape[-1]), weight.t(), out=out.view(-1, len(weight)))
    return out


def gated_linear(x: Normed, weight: Tensor) -> Tensor:
    """SwiGLU (arXiv 2002.05202): weight [2 ffn, inputs] holds the gate, which silu is applied to, then its factor."""
    if isinstance(x, Unscaled):
        from dustin_runtime.kernels.linear import linear as kernel

        return kernel(x.gained, weight, gated=True, squares=x.squares, eps=x.eps)
    if _few_rows(x, weight, gated=True):
        from dustin_runtime.kernels.linear import linear as kernel

        return kernel(x, weight, gated=True)
    gate_up = F.linear(x, weight)
    if usable(gate_up):
        from dustin_runtime.kernels.pointwise import silu_mul

        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def add_linear_norm(residual: Tensor, x: Tensor, weight: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Normed]:
    """Product, residual addition, RMSNorm: what ends a block of a decoder layer and begins the next.

    Args:
        residual: [..., outputs], contiguous; x: [..., inputs], contiguous; weight: [outputs, inputs]; gain: [outputs].

    Returns:
        residual + x weight^T, and its norm times gain.
    """
    # fp16 could overflow before the division, and fp32 is there to be exact.
    if usable(x) and x.dtype == torch.bfloat16:
        from dustin_runtime.kernels.linear import add_linear, joined

        if joined(x.numel() // x.shape[-1], len(weight)):
            total, gained, squares = add_linear(residual, x, weight, gain)
            return total, Unscaled(gained, squares, eps)
    return add_rms_norm(residual, linear(x, weight), gain, eps)


def _few_rows(x: Tensor, weight: Tensor, gated: bool) -> bool:
    if x.dtype == torch.float32 or not usable(x):
        return False
    from dustin_runtime.kernels.linear import worthwhile

    outputs, inputs = weight.shape
    return worthwhile(x.numel() // inputs, outputs // (2 if gated else 1), inputs, gated)


def project_append(
    x: Normed,
    weight: Tensor,
    bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    query_heads: int,
    to: Append,
) -> Tensor:
    """`rope_append` of the projection to queries, keys and values.

    Args:
        x: [batch, tokens, hidden]; weight: [(query_heads + 2 kv_heads) head_size, hidden]; bias: of its rows, or None.
    """
    head_size = to.keys.shape[3]
    if to.first and to.key_scale is not None:
        qkv = linear(x, weight, bias)
        qkv = qkv.view(*qkv.shape[:2], -1, head_size)
        set_scales(qkv, q_norm, k_norm, eps, query_heads, to)
        return rope_append(qkv, q_norm, k_norm, eps, query_heads, to)
    if isinstance(x, Unscaled) and q_norm is None and head_size >= 32 and usable(x.gained, heads_of=head_size):
        from dustin_runtime.kernels.linear import linear_rope_append

        return linear_rope_append(x.gained, weight, bias, x.squares, x.eps, query_heads, to)
    qkv = linear(x, weight, bias)
    return rope_append(qkv.view(*qkv.shape[:2], -1, head_size), q_norm, k_norm, eps, query_heads, to)


def rope_append(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, query_heads: int, to: Append
) -> Tensor:
    """Norm of queries and keys (Qwen3), RoPE, and the new keys and values into the cache.

    Args:
        qkv: [batch, tokens, query_heads + 2 kv_heads, head_size], contiguous.
        q_norm, k_norm: [head_size] or None.

    Returns:
        [batch, tokens, query_heads, head_size] rotated queries.
    """
    if usable(qkv, heads_of=qkv.shape[3]):
        from dustin_runtime.kernels.pointwise import rope_append as kernel

        return kernel(qkv, q_norm, k_norm, eps, query_heads, to)
    return rope_append_reference(qkv, q_norm, k_norm, eps, query_heads, to)


def rope_append_reference(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, query_heads: int, to: Append
) -> Tensor:
    """`rope_append` in plain torch."""
    q, k, v, positions = _rotated(qkv, q_norm, k_norm, eps, query_heads, to)
    rows = torch.arange(len(to.start), device=to.start.device).unsqueeze(1)
    slots = to.ring.slots(positions)
    to.keys.index_put_((rows, slots), k if to.key_scale is None else narrowed(k, to.key_scale))
    to.values.index_put_((rows, slots), v if to.value_scale is None else narrowed(v, to.value_scale))
    if to.more_keys is not None:
        to.more_keys.index_put_((rows, positions), k)
    return q


def set_scales(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, query_heads: int, to: Append
) -> None:
    """Set the scales of `to` by the largest key and value that `rope_append` would write; arguments as there."""
    assert to.key_scale is not None and to.value_scale is not None
    _, k, v, _ = _rotated(qkv, q_norm, k_norm, eps, query_heads, to)
    to.key_scale.copy_(scale_for(k.abs().amax(dim=(1, 3))))
    to.value_scale.copy_(scale_for(v.abs().amax(dim=(1, 3))))


def _rotated(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, query_heads: int, to: Append
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values [batch, tokens, heads, head_size] and positions [batch, tokens]."""
    kv_heads = to.keys.shape[2]
    q, k, v = qkv.split((query_heads, kv_heads, kv_heads), dim=2)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    positions = to.start.unsqueeze(1) + torch.arange(qkv.shape[1], device=to.start.device)
    q, k = (rotate(x, to.cos[positions], to.sin[positions]) for x in (q, k))
    return q, k, v, positions


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
