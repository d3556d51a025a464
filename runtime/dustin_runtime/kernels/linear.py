"""Products of a few rows with a weight matrix: bound by reading the weights, which cuBLAS does less well for few rows.

References: `torch.nn.functional.linear`, `silu_mul` of it, and `models.ops.add_rms_norm_reference` of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.cache import Append
from dustin_runtime.kernels import ceil_div, dependent_launch, next_power_of_2
from dustin_runtime.kernels.pointwise import narrowed
from dustin_runtime.kernels.prefetch import LINE, to_l2
from dustin_runtime.kernels.workspace import counters


@triton.jit(do_not_specialize=["rows", "tiles", "blocks_before", "tokens", "query_heads", "kv_heads", "sink", "ring"])
def _linear(
    x, weight, bias, squares, residual, gain, out, gained, squares_out, partials, counter,
    rows, outputs, inputs, tiles, blocks_before, eps,
    cos, sin, start, k_cache, v_cache, more_keys, k_scale, v_scale,
    k_batch, k_token, k_head, v_batch, v_token, v_head, m_batch, m_token, m_head,
    tokens, query_heads, kv_heads, sink, ring,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, BEFORE: tl.constexpr, ADD: tl.constexpr, HALF: tl.constexpr, MORE: tl.constexpr,
    SCALED: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: OUT outputs of all rows, over a share of the inputs.

    BEFORE: 0, or places for the sums of squares that x still has to be divided by. ADD: add `residual`, and also write
    what the next norm makes of the sum, short of the division. HALF: 0, or half of a head's size: outputs are queries,
    keys and values, rotated and put where `pointwise._rope_append` puts them; a block has equal parts of both halves of
    a head. AHEAD: cache lines of each weight row that are sent for while the kernel before still runs; the next kernel
    is then let start, and send for its own, meanwhile.
    """
    block = tl.program_id(0)
    split = tl.program_id(1)
    if AHEAD > 0:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, ROWS)
    output = block * OUT + tl.arange(0, OUT)
    if HALF > 0:
        PART: tl.constexpr = OUT // 2
        head = block * PART // HALF
        within = block * PART % HALF + tl.arange(0, PART)[None, :]  # the first half of the head
        output = head * 2 * HALF + block * PART % HALF + tl.arange(0, OUT) // PART * HALF + tl.arange(0, OUT) % PART
        sequence = tl.minimum(row, rows - 1).to(tl.int64)[:, None] // tokens
        position = tl.load(start + sequence) + row[:, None] % tokens
        c = tl.load(cos + position * HALF + within)
        s = tl.load(sin + position * HALF + within)
    there = output < outputs
    # Rows beyond the last are read again from its place, so that whole tiles need no mask.
    w_row = weight + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * inputs
    second = w_row + outputs.to(tl.int64) * inputs
    x_row = x + tl.minimum(row, rows - 1)[:, None] * inputs
    if AHEAD > 0:
        line = tl.minimum(split * tiles * IN + tl.arange(0, AHEAD) * LINE, inputs - 1)[None, :]
        to_l2(w_row + line)
        if GATED:
            to_l2(second + line)
    acc = tl.zeros([ROWS, OUT], tl.float32)
    up = tl.zeros([ROWS, OUT], tl.float32)
    mask = (row < rows)[:, None] & there[None, :]
    place = row[:, None] * outputs + output[None, :]
    if ADD:
        factor = tl.load(gain + output, mask=there, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # What the end needs is asked for at the beginning.
    if ADD:
        before = tl.load(residual + place, mask=mask, other=0.0)
    if BEFORE > 0:
        part = tl.arange(0, BEFORE)[:, None]
        parts = tl.load(
            squares + part * rows + row[None, :], mask=(part < blocks_before) & (row < rows)[None, :], other=0.0
        )
    for turn in tl.range(split * tiles, tl.minimum((split + 1) * tiles, tl.cdiv(inputs, IN))):
        column = turn * IN + tl.arange(0, IN)  # in multiples of IN, so that loads are known to be aligned
        inside = (column < inputs)[None, :]
        values = tl.load(x_row + column[None, :], mask=inside, other=0.0)
        acc = tl.dot(values, tl.trans(tl.load(w_row + column[None, :], mask=inside, other=0.0)), acc)
        if GATED:
            up = tl.dot(values, tl.trans(tl.load(second + column[None, :], mask=inside, other=0.0)), up)

    if PDL and AHEAD == 0:
        tl.extra.cuda.gdc_launch_dependents()
    tile = row[:, None] * OUT + tl.arange(0, OUT)[None, :]
    if SPLITS > 1:
        size: tl.constexpr = ROWS * OUT * (2 if GATED else 1)
        mine = partials + (block * SPLITS + split) * size
        tl.store(mine + tile, acc)
        if GATED:
            tl.store(mine + ROWS * OUT + tile, up)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter + block, 1, sem="acq_rel")
        if arrived < SPLITS - 1:
            return
        acc = tl.zeros([ROWS, OUT], tl.float32)
        up = tl.zeros([ROWS, OUT], tl.float32)
        for other in tl.static_range(SPLITS):  # in order, whoever came last; unrolled, so that loads run together
            part_of = partials + (block * SPLITS + other) * size
            acc += tl.load(part_of + tile, cache_modifier=".cg")
            if GATED:
                up += tl.load(part_of + ROWS * OUT + tile, cache_modifier=".cg")
        tl.store(counter + block, 0)
    kind = out.dtype.element_ty
    if BEFORE > 0:
        norm = 1 / tl.sqrt_rn(tl.sum(parts, 0) / inputs + eps)
        acc *= norm[:, None]
        up *= norm[:, None]
    if BIAS:
        acc += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate = acc.to(kind).to(tl.float32)
        acc = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    result = acc.to(kind)
    if ADD:
        result = (result.to(tl.float32) + before.to(tl.float32)).to(kind)
        wide = tl.where(mask, result.to(tl.float32), 0.0)
        tl.store(gained + place, (wide * factor[None, :]).to(kind), mask=mask)
        tl.store(squares_out + block * rows + row, tl.sum(wide * wide, 1), mask=row < rows)
    if HALF > 0:
        a, b = tl.split(tl.permute(tl.reshape(result.to(tl.float32), [ROWS, 2, PART]), (0, 2, 1)))
        first, other = a.to(kind), b.to(kind)
        if head < query_heads + kv_heads:
            first, other = (a * c - b * s).to(kind), (b * c + a * s).to(kind)
        exists = (row < rows)[:, None] & (within < HALF)
        slot = tl.where(position < sink, position, sink + (position - sink) % ring)
        if head < query_heads:
            to_query = out + (row[:, None] * query_heads + head) * 2 * HALF + within
            tl.store(to_query, first, mask=exists)
            tl.store(to_query + HALF, other, mask=exists)
        elif head < query_heads + kv_heads:
            to_key = k_cache + sequence * k_batch + slot * k_token + (head - query_heads) * k_head + within
            if SCALED:
                of_key = tl.load(k_scale + sequence * kv_heads + head - query_heads)
                tl.store(to_key, narrowed(first, of_key), mask=exists)
                tl.store(to_key + HALF, narrowed(other, of_key), mask=exists)
            else:
                tl.store(to_key, first, mask=exists)
                tl.store(to_key + HALF, other, mask=exists)
            if MORE:
                to_more = more_keys + sequence * m_batch + position * m_token + (head - query_heads) * m_head + within
                tl.store(to_more, first, mask=exists)
                tl.store(to_more + HALF, other, mask=exists)
        else:
            to_value = v_cache + sequence * v_batch + slot * v_token + (head - query_heads - kv_heads) * v_head + within
            if SCALED:
                of_value = tl.load(v_scale + sequence * kv_heads + head - query_heads - kv_heads)
                tl.store(to_value, narrowed(first, of_value), mask=exists)
                tl.store(to_value + HALF, narrowed(other, of_value), mask=exists)
            else:
                tl.store(to_value, first, mask=exists)
                tl.store(to_value + HALF, other, mask=exists)
    else:
        tl.store(out + place, result, mask=mask)


class Tiling(NamedTuple):
    """How the work is cut: outputs and inputs of a tile, programs per block of outputs."""

    out: int
    inputs: int
    splits: int
    warps: int
    stages: int


MOST_ROWS = 64
"""Beyond them the product is no longer bound by reading the weights alone, and cuBLAS does it well."""
NARROW = 2048
"""Width of a model up to which products and norms are joined: in a wide one, cuBLAS gains more than launches cost."""
PREFETCHED = 34 << 20
"""Bytes of weights that a launch may send for ahead: they have to stay in the L2, of which an H200 has 50 MB."""


ROTATED = Tiling(32, 256, 1, 4, 4)
"""Of products that are rotated: a block lies within a head."""


def worthwhile(rows: int, outputs: int, inputs: int, gated: bool) -> bool:
    """Whether this kernel beats cuBLAS, as measured on an H200 over the shapes of 0.5B and 7B models.

    It does where it saves a launch (gated), where few outputs make cuBLAS split and reduce in a second launch, where
    the weights can be sent for while sparse attention runs (the square one, in verification), and for the head.
    """
    if rows > MOST_ROWS:
        return False
    small = outputs * inputs <= 1 << 21 and rows <= 32
    return gated or small or inputs > outputs or (inputs == outputs and rows > 32) or outputs >= 1 << 16


def joined(rows: int, width: int) -> bool:
    """Whether products of a model leave their norms to the next product (`add_linear`)."""
    return rows <= MOST_ROWS and width <= NARROW


def tiling(rows: int, outputs: int, inputs: int, gated: bool) -> Tiling:
    """Choose by the shape alone: the best of a sweep on an H200 for shapes like this."""
    narrow = inputs <= NARROW
    if gated:
        if rows <= 16:
            return Tiling(32, 128, 1, 4, 4) if narrow else Tiling(32, 64, 1, 4, 3)
        return Tiling(64, 128, 1, 4, 4) if narrow or rows <= 32 else Tiling(64, 64, 1, 4, 3)
    if outputs >= 1 << 16:
        return Tiling(128, 128, 1, 4, 3 if rows <= 16 else 4)
    if inputs > outputs:
        if outputs <= NARROW:
            return Tiling(32, 256, 8, 4, 5 if rows <= 16 else 4) if rows <= 32 else Tiling(32, 256, 4, 4, 3)
        return Tiling(64, 256, 2, 4, 4) if rows <= 32 else Tiling(64, 128, 2, 4, 5)
    return Tiling(32, 256, 1, 4, 4)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    squares: Tensor | None = None,
    eps: float = 0.0,
    cut: Tiling | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [..., inputs] times weight [outputs, inputs], plus bias [outputs]; fp32 sums.

    Args:
        x: up to `MOST_ROWS` rows, 16-bit.
        gated: weight holds the rows of a gate, then as many of an up projection; the result is silu(gate) * up.
        squares: [parts, rows] fp32 as of `add_linear`: x is yet to be divided by the root of their mean plus `eps`.
        out: [..., outputs], contiguous: where the result is to lie.
    """
    return _launch(x, weight, bias, gated, squares, eps, None, None, None, cut, out)[0]


def linear_rope_append(
    x: Tensor, weight: Tensor, bias: Tensor | None, squares: Tensor, eps: float, query_heads: int, to: Append
) -> Tensor:
    """`linear` and `models.ops.rope_append` of it, in one launch.

    Args:
        x: [batch, tokens, inputs]; squares: as of `linear`.

    Returns:
        [batch, tokens, query_heads, head_size] rotated queries.
    """
    return _launch(x, weight, bias, False, squares, eps, None, None, (query_heads, to), ROTATED)[0]


def add_linear(
    residual: Tensor, x: Tensor, weight: Tensor, gain: Tensor, cut: Tiling | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Residual addition of a product, and all that a norm needs of the sum but the division.

    Args:
        residual: [..., outputs]; x: [..., inputs]; weight: [outputs, inputs]; gain: [outputs], of the norm.

    Returns:
        The sum [..., outputs]; the sum times gain; the sums of its squares by parts of a row [parts, rows] fp32.
    """
    total, gained, squares = _launch(x, weight, None, False, None, 0.0, residual, gain, None, cut)
    return total, gained, squares


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
    squares: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gain: Tensor | None,
    rotate: tuple[int, Append] | None,
    cut: Tiling | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = x.shape[-1]
    rows = x.numel() // inputs
    outputs = weight.shape[0] // (2 if gated else 1)
    if cut is None:
        cut = tiling(rows, outputs, inputs, gated)
    tile = max(16, next_power_of_2(rows))
    blocks = ceil_div(outputs, cut.out)
    tiles = ceil_div(ceil_div(inputs, cut.inputs), cut.splits)
    splits = ceil_div(ceil_div(inputs, cut.inputs), tiles)
    shape, device, add = (*x.shape[:-1], outputs), x.device, residual is not None
    rotated: tuple[Any, ...] = (*(x,) * 6, None, None, *(0,) * 14)
    half, more, scaled = 0, None, False
    if rotate is not None:
        query_heads, to = rotate
        k, v, more, scaled = to.keys, to.values, to.more_keys, to.key_scale is not None
        half, shape = k.shape[3] // 2, (*x.shape[:2], query_heads, k.shape[3])
        rotated = (
            to.cos, to.sin, to.start, k, v, k if more is None else more, to.key_scale, to.value_scale,
            *k.stride()[:3], *v.stride()[:3], *(k if more is None else more).stride()[:3],
            x.shape[1], query_heads, k.shape[2], *to.ring,
        )  # fmt: skip
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=device)
    gained = torch.empty(shape, dtype=x.dtype, device=device) if add else out
    sums = torch.empty(blocks if add else 0, rows, dtype=torch.float32, device=device)
    scratch = blocks * splits * tile * cut.out * (2 if gated else 1) if splits > 1 else 0
    partials = torch.empty(scratch, dtype=torch.float32, device=device)
    launch = dependent_launch(device)
    sent_for = launch["PDL"] and weight.numel() * weight.itemsize <= PREFETCHED
    ahead = next_power_of_2(ceil_div(tiles * cut.inputs, LINE.value)) if sent_for else 0
    _linear[(blocks, splits)](
        x, weight, x if bias is None else bias, x if squares is None else squares,
        x if residual is None else residual, x if gain is None else gain,
        out, gained, sums, partials, counters(device, blocks),
        rows, outputs, inputs, tiles, 0 if squares is None else len(squares), eps, *rotated,
        ROWS=tile, OUT=cut.out, IN=cut.inputs, SPLITS=splits, GATED=gated, BIAS=bias is not None,
        BEFORE=0 if squares is None else next_power_of_2(len(squares)), ADD=add,
        HALF=half, MORE=more is not None, SCALED=scaled, AHEAD=ahead,
        num_warps=cut.warps, num_stages=cut.stages, **launch,
    )  # fmt: skip
    return out, gained, sums
