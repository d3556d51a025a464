"""Small operations between the matrix products, fused so that each reads and writes memory once.

References: the plain torch lines of `models.ops`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.cache import Append
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
    block = 2048
    _silu_mul[(out.numel() // ffn, ceil_div(ffn, block))](
        gate_up, out, ffn, BLOCK=block, num_warps=8, **dependent_launch(out.device)
    )
    return out


@triton.jit
def narrowed(x, scale):
    """x as an 8-bit cache stores it, see `scaled.narrowed`."""
    x = tl.clamp(tl.div_rn(x.to(tl.float32), scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(tl.float8e4nv)


@triton.jit(do_not_specialize=["tokens", "query_heads", "kv_heads", "sink", "ring"])
def _rope_append(
    qkv, q_norm, k_norm, cos, sin, start, out, k_cache, v_cache, more_keys, k_scale, v_scale,
    k_batch, k_token, k_head, v_batch, v_token, v_head, m_batch, m_token, m_head,
    tokens, query_heads, kv_heads, sink, ring, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, MORE: tl.constexpr, SCALED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: HEADS heads (queries, then keys, then values) of one token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    line = tl.program_id(1).to(tl.int64)  # of all tokens
    sequence = line // tokens
    heads = query_heads + 2 * kv_heads
    position = tl.load(start + sequence) + line % tokens
    slot = tl.where(position < sink, position, sink + (position - sink) % ring)
    half = tl.arange(0, HALF)[None, :]
    inside = (head < heads)[:, None] & (half < HALF)
    query = (head < query_heads)[:, None] & inside
    key = (head < query_heads + kv_heads)[:, None] & inside & ~query
    value = inside & ~query & ~key
    place = qkv + (line * heads + head)[:, None] * 2 * HALF + half
    first = tl.load(place, mask=inside, other=0.0)
    second = tl.load(place + HALF, mask=inside, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        scale = 1 / tl.sqrt_rn((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a = (a * scale).to(first.dtype) * tl.where(query, tl.load(q_norm + half), tl.load(k_norm + half))
        b = (b * scale).to(first.dtype) * tl.where(query, tl.load(q_norm + HALF + half), tl.load(k_norm + HALF + half))
        a, b = a.to(tl.float32), b.to(tl.float32)
    c = tl.load(cos + position * HALF + half)
    s = tl.load(sin + position * HALF + half)
    turned_first = (a * c - b * s).to(first.dtype)
    turned_second = (b * c + a * s).to(first.dtype)
    to_query = out + (line * query_heads + head)[:, None] * 2 * HALF + half
    tl.store(to_query, turned_first, mask=query)
    tl.store(to_query + HALF, turned_second, mask=query)
    kv_head = head.to(tl.int64)[:, None] - query_heads
    to_key = k_cache + sequence * k_batch + slot * k_token + kv_head * k_head + half
    if SCALED:
        of_key = tl.load(k_scale + sequence * kv_heads + kv_head, mask=(kv_head >= 0) & (kv_head < kv_heads), other=1.0)
        tl.store(to_key, narrowed(turned_first, of_key), mask=key)
        tl.store(to_key + HALF, narrowed(turned_second, of_key), mask=key)
    else:
        tl.store(to_key, turned_first, mask=key)
        tl.store(to_key + HALF, turned_second, mask=key)
    if MORE:
        to_more = more_keys + sequence * m_batch + position * m_token + kv_head * m_head + half
        tl.store(to_more, turned_first, mask=key)
        tl.store(to_more + HALF, turned_second, mask=key)
    to_value = v_cache + sequence * v_batch + slot * v_token + (kv_head - kv_heads) * v_head + half
    if SCALED:
        behind = kv_head - kv_heads
        of_value = tl.load(v_scale + sequence * kv_heads + behind, mask=(behind >= 0) & (behind < kv_heads), other=1.0)
        tl.store(to_value, narrowed(first, of_value), mask=value)
        tl.store(to_value + HALF, narrowed(second, of_value), mask=value)
    else:
        tl.store(to_value, first, mask=value)
        tl.store(to_value + HALF, second, mask=value)


def rope_append(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, query_heads: int, to: Append
) -> Tensor:
    """Arguments and result as `models.ops.rope_append`."""
    batch, tokens, _, head_size = qkv.shape
    kv_heads = to.keys.shape[2]
    q = torch.empty(batch, tokens, query_heads, head_size, dtype=qkv.dtype, device=qkv.device)
    norm = q_norm is not None
    more = to.keys if to.more_keys is None else to.more_keys
    heads = query_heads + 2 * kv_heads
    together = min(16, next_power_of_2(heads))
    _rope_append[(ceil_div(heads, together), batch * tokens)](
        qkv, q_norm if norm else qkv, k_norm if norm else qkv, to.cos, to.sin, to.start, q,
        to.keys, to.values, more, to.key_scale, to.value_scale,
        *to.keys.stride()[:3], *to.values.stride()[:3], *more.stride()[:3],
        tokens, query_heads, kv_heads, *to.ring, eps,
        HEADS=together, HALF=head_size // 2, NORM=norm, MORE=to.more_keys is not None, SCALED=to.key_scale is not None,
        num_warps=max(1, together * head_size // 256), **dependent_launch(q.device),
    )  # fmt: skip
    return q
