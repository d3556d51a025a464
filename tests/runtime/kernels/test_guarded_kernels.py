"""Rows of one batch that read everything among rows that read a list: two launches, one result."""

from __future__ import annotations

import itertools

import cases
import pytest
import torch

from dustin_runtime.attention.dense import dense_reference
from dustin_runtime.attention.sparse import mixed_reference, sparse_reference

PATTERNS = ("none", "all", "first", "last", "every other")


def guarded_rows(pattern: str, device: torch.device) -> torch.Tensor:
    rows = torch.arange(len(cases.LENGTHS), device=device)
    found: torch.Tensor = {
        "none": rows < 0,
        "all": rows >= 0,
        "first": rows == 0,
        "last": rows == len(rows) - 1,
        "every other": rows % 2 == 1,
    }[pattern]
    return found


def some_list(budget: int, generator: torch.Generator) -> torch.Tensor:
    """[batch, 1, budget], -1 at the end where a prefix is shorter."""
    lists = torch.full((len(cases.LENGTHS), 1, budget), -1, device=generator.device)
    for row, length in enumerate(cases.LENGTHS):
        chosen = torch.randperm(length, generator=generator, device=generator.device)[:budget].sort().values
        lists[row, 0, : len(chosen)] = chosen
    return lists


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(
    ("pattern", "size", "group", "tokens"),
    [
        (pattern, *shape)
        for pattern, shape in itertools.product(PATTERNS, cases.SHAPES[:3])
        if cases.ON_GPU or pattern == "every other" or shape == cases.SHAPES[1]
    ],
)
def test_both_launches_equal_the_reference(
    pattern: str, size: int, group: int, tokens: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    from dustin_runtime.kernels.dense import dense_rows
    from dustin_runtime.kernels.sparse import sparse_attention

    k, v = cases.cache(cases.LENGTHS, tokens, size, dtype, generator)
    q = cases.queries(len(cases.LENGTHS), tokens, group, size, dtype, generator)
    start, kept = torch.tensor(cases.LENGTHS, device=q.device), some_list(150, generator)
    full = guarded_rows(pattern, q.device)
    found = sparse_attention(q, k, v, start, kept, full=full)
    dense_rows(q, k, v, start, full, found)
    want = mixed_reference(q.double(), k.double().nan_to_num(), v.double().nan_to_num(), start, kept, full)
    assert cases.error(found, want) < cases.tolerance(dtype)


@pytest.mark.parametrize(
    ("splits", "pattern"),
    [*((3, pattern) for pattern in PATTERNS), *((1, pattern) for pattern in (PATTERNS if cases.ON_GPU else ["last"]))],
)
def test_each_launch_writes_its_rows_alone(splits: int, pattern: str, generator: torch.Generator) -> None:
    from dustin_runtime.kernels import dense, sparse

    k, v = cases.cache(cases.LENGTHS, 3, 64, torch.float32, generator)
    q = cases.queries(len(cases.LENGTHS), 3, 4, 64, torch.float32, generator)
    start, kept = torch.tensor(cases.LENGTHS, device=q.device), some_list(100, generator)
    full = guarded_rows(pattern, q.device)
    out = torch.full_like(q, 7.0)
    dense.dense_rows(q, k, v, start, full, out, dense.Tiling(16, 32, splits * 14, 32, 4, 2))
    assert (out[~full] == 7).all()
    want = dense_reference(q.double(), k.double().nan_to_num(), v.double().nan_to_num(), start)
    # One program adds all tiles of a row one after the other, which rounds more often than the sums of three.
    assert cases.error(out[full], want[full]) < cases.tolerance(torch.float32) * (2 if splits == 1 else 1)
    cut = sparse.Tiling(16, 32, splits, 4, 2)
    found = sparse.sparse_attention(q, k, v, start, kept, cut, full=full)
    # Not bit for bit: that a compiler contracts the same operations in a kernel with and without a branch is up to it.
    want = sparse.sparse_attention(q, k, v, start, kept, cut)[~full].double()
    assert cases.error(found[~full], want) < cases.tolerance(torch.float32)


def test_padding_behind_a_rows_own_count_is_not_read(generator: torch.Generator) -> None:
    """Lists of several sizes are padded to the largest: a position of -1 would read what lies before the cache."""
    from dustin_runtime.kernels.sparse import Tiling, sparse_attention

    k, v = cases.cache(cases.LENGTHS, 3, 64, torch.float32, generator)
    q = cases.queries(len(cases.LENGTHS), 3, 4, 64, torch.float32, generator)
    start = torch.tensor(cases.LENGTHS, device=q.device)
    kept = some_list(40, generator)
    padded = torch.nn.functional.pad(kept, (0, 216), value=-1)
    want = sparse_reference(q.double(), k.double().nan_to_num(), v.double().nan_to_num(), start, kept)
    for splits in (1, 4, 8):
        found = sparse_attention(q, k, v, start, padded, Tiling(16, 32, splits, 4, 2))
        assert cases.error(found, want) < cases.tolerance(torch.float32)
