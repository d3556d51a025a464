"""Products of a few rows with a weight matrix: bound by reading the weights, which cuBLAS does less well for few rows.

References: `torch.nn.functional.linear`, and `silu_mul` of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_runtime.kernels import ceil_div, dependent_launch, next_power_of_2
from dustin_runtime.kernels.workspace import counters


@triton.jit(do_not_specialize=["rows", "splits", "tiles"])
def _linear(
    x, weight, bias, out, partials, counter, rows, outputs, inputs, splits, tiles,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: OUT outputs of all rows, over a share of the inputs."""
    block = tl.program_id(0)
    split = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, ROWS)
    output = block * OUT + tl.arange(0, OUT)
    there = output < outputs
    # Rows beyond the last are read again from its place, so that whole tiles need no mask.
    w_row = weight + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * inputs
    x_row = x + tl.minimum(row, rows - 1)[:, None] * inputs
    acc = tl.zeros([ROWS, OUT], tl.float32)
    up = tl.zeros([ROWS, OUT], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    second = w_row + outputs.to(tl.int64) * inputs
    for turn in tl.range(split * tiles, tl.minimum((split + 1) * tiles, tl.cdiv(inputs, IN))):
        column = turn * IN + tl.arange(0, IN)  # in multiples of IN, so that loads are known to be aligned
        inside = (column < inputs)[None, :]
        values = tl.load(x_row + column[None, :], mask=inside, other=0.0)
        acc = tl.dot(values, tl.trans(tl.load(w_row + column[None, :], mask=inside, other=0.0)), acc)
        if GATED:
            up = tl.dot(values, tl.trans(tl.load(second + column[None, :], mask=inside, other=0.0)), up)

    mask = (row < rows)[:, None] & there[None, :]
    tile = row[:, None] * OUT + tl.arange(0, OUT)[None, :]
    if splits > 1:
        size: tl.constexpr = ROWS * OUT * (2 if GATED else 1)
        mine = partials + (block * splits + split) * size
        tl.store(mine + tile, acc)
        if GATED:
            tl.store(mine + ROWS * OUT + tile, up)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter + block, 1, sem="acq_rel")
        if arrived < splits - 1:
            return
        acc = tl.zeros([ROWS, OUT], tl.float32)
        up = tl.zeros([ROWS, OUT], tl.float32)
        for other in range(splits):  # in order, whoever came last
            part = partials + (block * splits + other) * size
            acc += tl.load(part + tile, cache_modifier=".cg")
            if GATED:
                up += tl.load(part + ROWS * OUT + tile, cache_modifier=".cg")
        tl.store(counter + block, 0)
    kind = out.dtype.element_ty
    if BIAS:
        acc += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate = acc.to(kind).to(tl.float32)
        acc = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    tl.store(out + row[:, None] * outputs + output[None, :], acc.to(kind), mask=mask)


class Tiling(NamedTuple):
    """How the work is cut: outputs and inputs of a tile, programs per block of outputs."""

    out: int
    inputs: int
    splits: int
    warps: int
    stages: int


MOST_ROWS = 64
"""Beyond them the product is no longer bound by reading the weights alone, and cuBLAS does it well."""


def worthwhile(rows: int, outputs: int, inputs: int, gated: bool) -> bool:
    """Whether this kernel beats cuBLAS, as measured on an H200 over the shapes of 0.5B and 7B models.

    It does where it saves a launch (gated), where few outputs make cuBLAS split and reduce in a second launch, and
    for the head. For square matrices of some ten megabytes cuBLAS is as fast or faster.
    """
    if rows > MOST_ROWS:
        return False
    small = outputs * inputs <= 1 << 21 and rows <= 32
    return gated or small or inputs > outputs or outputs >= 1 << 16


def tiling(rows: int, outputs: int, inputs: int, gated: bool) -> Tiling:
    """Choose by the shape alone: the best of a sweep on an H200 for shapes like this."""
    if gated:
        if rows <= 16:
            return Tiling(32, 128, 1, 4, 4) if outputs < 8192 else Tiling(32, 64, 1, 4, 3)
        return Tiling(64, 128, 1, 4, 4) if rows <= 32 else Tiling(64, 64, 1, 4, 3)
    if outputs >= 1 << 16:
        return Tiling(128, 128, 1, 4, 3 if rows <= 16 else 4)
    if inputs > outputs:
        if outputs < 2048:
            return Tiling(32, 256, 8 if rows <= 16 else 4, 4, 5 if rows <= 32 else 3)
        return Tiling(64, 256, 2, 4, 4) if rows <= 32 else Tiling(64, 128, 2, 4, 5)
    return Tiling(16, 128, 1, 4, 5 if rows <= 16 else 4)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, cut: Tiling | None = None
) -> Tensor:
    """x [..., inputs] times weight [outputs, inputs], plus bias [outputs]; fp32 sums.

    Args:
        x: up to `MOST_ROWS` rows, 16-bit.
        gated: weight holds the rows of a gate, then as many of an up projection; the result is silu(gate) * up.
    """
    inputs = x.shape[-1]
    rows = x.numel() // inputs
    outputs = weight.shape[0] // (2 if gated else 1)
    if cut is None:
        cut = tiling(rows, outputs, inputs, gated)
    tile = max(16, next_power_of_2(rows))
    blocks = ceil_div(outputs, cut.out)
    tiles = ceil_div(ceil_div(inputs, cut.inputs), cut.splits)
    splits = ceil_div(ceil_div(inputs, cut.inputs), tiles)
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    scratch = blocks * splits * tile * cut.out * (2 if gated else 1) if splits > 1 else 0
    partials = torch.empty(scratch, dtype=torch.float32, device=x.device)
    _linear[(blocks, splits)](
        x, weight, x if bias is None else bias, out, partials, counters(x.device, blocks),
        rows, outputs, inputs, splits, tiles,
        ROWS=tile, OUT=cut.out, IN=cut.inputs, GATED=gated, BIAS=bias is not None,
        num_warps=cut.warps, num_stages=cut.stages, **dependent_launch(x.device),
    )  # fmt: skip
    return out
