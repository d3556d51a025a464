"""Triton kernels, each the equal of a plain torch reference named in its docstring. Nothing here is needed on a CPU."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(x: Tensor, heads_of: int | None = None) -> bool:
    """Whether a kernel can serve this tensor; its torch reference does otherwise (CPU, float64, odd head sizes)."""
    size = heads_of is None or (heads_of >= 16 and heads_of & (heads_of - 1) == 0)
    return x.is_cuda and x.dtype in _DTYPES and size and _triton_installed()


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def row_tile(rows: int) -> int:
    """Rows of a tile that holds `rows` packed query rows: Hopper's matrix units work on 64, below 16 its older ones."""
    if rows <= 16:
        return 16
    return 64 if rows <= 64 or rows > 128 else 128


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; some small number for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch arguments of a kernel that may start while the one before it ends (Hopper and later), if it is let."""
    if not _launches_dependents(device) or device in _fenced:
        _fenced.discard(device)
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


_fenced: set[torch.device] = set()


def fence(device: torch.device) -> None:
    """Launch the next of our kernels only when the one just launched has ended.

    Attention over a long cache reads at three quarters of its speed if another kernel is to follow dependently, even if
    that starts no earlier (measured on an H200).
    """
    _fenced.add(device)


@functools.cache
def _launches_dependents(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
