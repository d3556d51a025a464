"""Attention recovery rate of kept tokens (arXiv 2606.24957, Eq. 1 and 2), in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from dustin_profile.traces.windows import Windows

_DECIMALS = 12
"""ARRs that differ less differ by the order of summation only: they count as equal."""


def mass(truth: Tensor, positions: Tensor) -> Tensor:
    """Attention at each listed position.

    Args:
        truth: [W, N] fp32.
        positions: [..., W, k] int64, -1 where there is none.

    Returns:
        [..., W, k] fp64; 0 where there is no position.
    """
    rows = truth.expand(*positions.shape[:-1], truth.shape[-1])
    return rows.gather(-1, positions.clamp_min(0)).double().masked_fill(positions < 0, 0)


def arr(windows: Windows, recovered: Tensor) -> Tensor:
    """Windowed ARR, [..., W] fp64, of the prefix mass recovered. Verification always has the tokens after the prefix.

    Args:
        recovered: [..., W] fp64.
    """
    return recovered + windows.tail.double()


def prefix_arr(windows: Windows, recovered: Tensor) -> Tensor:
    """Share recovered of the mass on the prefix, [..., W] fp64. Arguments as of `arr`."""
    return recovered / windows.truth.double().sum(-1)


def first_best(values: Tensor) -> int:
    """Index of the largest of [n] values, the first of equals: the lower layer, the smaller m. NaN never wins."""
    rounded = [round(value, _DECIMALS) for value in values.nan_to_num(nan=-torch.inf).tolist()]
    return rounded.index(max(rounded))


def gains(value: float, over: float) -> bool:
    """Whether an ARR is above another one by more than rounding."""
    return round(value, _DECIMALS) > round(over, _DECIMALS)
