"""Shapes that every attention kernel is tested on, and how close it must come."""

from __future__ import annotations

import itertools

import torch

ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32, torch.float16]
"""The interpreter has no bfloat16 products."""

# (head size, query heads per KV head, new tokens): all pairs of extremes, and what real models have.
SHAPES = (
    [
        (size, group, tokens)
        for size, group, tokens in itertools.product((64, 128), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 5, 9, 16, 17))
    ]
    if ON_GPU
    else [(64, 1, 1), (64, 7, 2), (128, 8, 5), (64, 8, 17), (128, 3, 4)]
)
LENGTHS = [5000, 1, 63, 64, 65, 3000] if ON_GPU else [300, 1, 63, 65]
"""Tokens in each row's cache before the new ones."""
KV_HEADS = 2


def tolerance(dtype: torch.dtype) -> float:
    """On the norm of the error over the norm of the reference."""
    return {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]


def error(found: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error by norms; NaN never passes a comparison with it."""
    return float((found.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def cache(
    lengths: list[int], tokens: int, size: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [batch, capacity, KV_HEADS, size] as views of head-major memory; NaN where no token lies."""
    device = generator.device
    capacity = max(lengths) + tokens + 7
    pair = torch.randn(2, len(lengths), KV_HEADS, capacity, size, generator=generator, device=device).to(dtype)
    for row, length in enumerate(lengths):
        pair[:, row, :, length + tokens :] = float("nan")
    keys, values = pair.transpose(2, 3)
    return keys, values


def queries(
    batch: int, tokens: int, group: int, size: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Queries [batch, tokens, query heads, size] that make attention far from uniform."""
    shape = (batch, tokens, KV_HEADS * group, size)
    return (2 * torch.randn(shape, generator=generator, device=generator.device)).to(dtype)
