"""The dense kernel against the plain reference in float64."""

from __future__ import annotations

import cases
import pytest
import torch

from dustin_runtime.attention.dense import dense_reference


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("size", "group", "tokens"), cases.SHAPES)
def test_ragged_rows_equal_the_reference(
    size: int, group: int, tokens: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    from dustin_runtime.kernels.dense import dense_attention

    k, v = cases.cache(cases.LENGTHS, tokens, size, dtype, generator)
    q = cases.queries(len(cases.LENGTHS), tokens, group, size, dtype, generator)
    start = torch.tensor(cases.LENGTHS, device=q.device)
    found = dense_attention(q, k, v, start)
    want = dense_reference(q.double(), k.double().nan_to_num(), v.double().nan_to_num(), start)
    assert cases.error(found, want) < cases.tolerance(dtype)
    assert torch.equal(dense_attention(q, k, v, start), found)  # whichever split comes last


@pytest.mark.parametrize("splits", [1, 2, 7, 9, 100 if cases.ON_GPU else 16])  # the last: more than blocks of keys
def test_any_split_gives_the_same(splits: int, generator: torch.Generator) -> None:
    from dustin_runtime.kernels.dense import Tiling, dense_attention

    k, v = cases.cache(cases.LENGTHS, 3, 64, torch.float32, generator)
    q = cases.queries(len(cases.LENGTHS), 3, 4, 64, torch.float32, generator)
    start = torch.tensor(cases.LENGTHS, device=q.device)
    want = dense_reference(q.double(), k.double().nan_to_num(), v.double().nan_to_num(), start)
    found = dense_attention(q, k, v, start, Tiling(16, 32, splits * 14, 32, 4, 2))
    assert cases.error(found, want) < cases.tolerance(torch.float32)
