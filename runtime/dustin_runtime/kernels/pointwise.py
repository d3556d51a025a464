"""Small operations between the matrix products, fused so that each reads and writes memory once.

References: the plain torch lines of `models.ops`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.cache import WHOLE, Ring
from dustin_runtime.kernels import ceil_div, dependent_launch, next_power_of_2


@triton.jit
def _add_norm(x, delta, weight, total, normed, width, eps, WIDTH: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, WIDTH)
    inside = column < width
    value = tl.load(x + row + column, mask=inside, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(delta + row + column, mask=inside, other=0.0).to(tl.float32)).to(
            value.dtype
        )
        tl.store(total + row + column, value, mask=inside)
    wide = value.to(tl.float32)
    scale = 1 / tl.sqrt_rn(tl.sum(wide * wide, 0) / width + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(normed + row + column, (wide * scale).to(value.dtype) * gain, mask=inside)


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual addition and RMSNorm (arXiv 1910.07467): (x + delta, its norm times weight), all [..., width]."""
    width = x.shape[-1]
    normed = torch.empty_like(x)
    total = torch.empty_like(x) if delta is not None else x
    block = next_power_of_2(width)
    _add_norm[(x.numel() // width,)](
        x, x if delta is None else delta, weight, total, normed, width, eps,
        WIDTH=block, ADD=delta is not None, num_warps=min(16, max(1, block // 512)), **dependent_launch(x.device),
    )  # fmt: skip
    return total, normed


@triton.jit
def _silu_mul(gate_up, out, ffn, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < ffn
    gate = tl.load(gate_up + row * 2 * ffn + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * ffn + ffn + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * ffn + column, silu * up, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU (arXiv 2002.05202): silu of the first half of [..., 2 ffn] times the second half."""
    ffn = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], ffn, dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    _silu_mul[(out.numel() // ffn, ceil_div(ffn, block))](
        gate_up, out, ffn, BLOCK=block, num_warps=4, **dependent_launch(out.device)
    )
    return out


@triton.jit(do_not_specialize=["tokens", "query_heads", "kv_heads", "sink", "ring"])
def _rope_append(
    qkv, q_norm, k_norm, cos, sin, start, out, k_cache, v_cache, more_keys,
    k_batch, k_token, k_head, v_batch, v_token, v_head, m_batch, m_token, m_head,
    tokens, query_heads, kv_heads, sink, ring, eps,
    HALF: tl.constexpr, NORM: tl.constexpr, MORE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one head (query, key or value) of one token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) % tokens
    sequence = tl.program_id(1) // tokens
    heads = query_heads + 2 * kv_heads
    position = tl.load(start + sequence) + token
    slot = tl.where(position < sink, position, sink + (position - sink) % ring)
    half = tl.arange(0, HALF)
    line = qkv + (tl.program_id(1).to(tl.int64) * heads + head) * 2 * HALF
    first = tl.load(line + half)
    second = tl.load(line + HALF + half)
    if head < query_heads + kv_heads:
        if NORM:
            a, b = first.to(tl.float32), second.to(tl.float32)
            scale = 1 / tl.sqrt_rn((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / (2 * HALF) + eps)
            gain = q_norm if head < query_heads else k_norm
            first = (a * scale).to(first.dtype) * tl.load(gain + half)
            second = (b * scale).to(second.dtype) * tl.load(gain + HALF + half)
        c = tl.load(cos + position * HALF + half)
        s = tl.load(sin + position * HALF + half)
        a, b = first.to(tl.float32), second.to(tl.float32)
        turned_first = (a * c - b * s).to(first.dtype)
        turned_second = (b * c + a * s).to(second.dtype)
        if head < query_heads:
            place = out + (tl.program_id(1).to(tl.int64) * query_heads + head) * 2 * HALF
        else:
            place = k_cache + sequence.to(tl.int64) * k_batch + slot * k_token + (head - query_heads) * k_head
            if MORE:
                more = more_keys + sequence.to(tl.int64) * m_batch + position * m_token
                more += (head - query_heads) * m_head
                tl.store(more + half, turned_first)
                tl.store(more + HALF + half, turned_second)
        tl.store(place + half, turned_first)
        tl.store(place + HALF + half, turned_second)
    else:
        place = v_cache + sequence.to(tl.int64) * v_batch + slot * v_token
        place += (head - query_heads - kv_heads) * v_head
        tl.store(place + half, first)
        tl.store(place + HALF + half, second)


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
    """Arguments and result as `models.ops.rope_append`."""
    batch, tokens, _, head_size = qkv.shape
    kv_heads = k_cache.shape[2]
    q = torch.empty(batch, tokens, query_heads, head_size, dtype=qkv.dtype, device=qkv.device)
    norm = q_norm is not None
    more = k_cache if more_keys is None else more_keys
    _rope_append[(query_heads + 2 * kv_heads, batch * tokens)](
        qkv, q_norm if norm else qkv, k_norm if norm else qkv, cos, sin, start, q, k_cache, v_cache, more,
        *k_cache.stride()[:3], *v_cache.stride()[:3], *more.stride()[:3],
        tokens, query_heads, kv_heads, ring.sink, ring.size, eps,
        HALF=head_size // 2, NORM=norm, MORE=more_keys is not None, num_warps=1, **dependent_launch(q.device),
    )  # fmt: skip
    return q
