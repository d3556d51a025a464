"""The sparse kernel against the plain reference in float64."""

from __future__ import annotations

import itertools

import cases
import pytest
import torch

from dustin_runtime.attention.sparse import sparse_reference


def kept_lists(budget: int, heads: int, generator: torch.Generator) -> torch.Tensor:
    """[batch, heads, budget] ascending positions, -1 at the end where a prefix is shorter."""
    lists = torch.full((len(cases.LENGTHS), heads, budget), -1, device=generator.device)
    for row, length in enumerate(cases.LENGTHS):
        for head in range(heads):
            chosen = torch.randperm(length, generator=generator, device=generator.device)[:budget].sort().values
            lists[row, head, : len(chosen)] = chosen
    return lists


@pytest.mark.parametrize(
    ("dtype", "heads"),
    itertools.product(cases.DTYPES, (1, cases.KV_HEADS))
    if cases.ON_GPU
    else [(torch.float32, cases.KV_HEADS), (torch.float16, 1)],
)
@pytest.mark.parametrize(("size", "group", "tokens"), cases.SHAPES)
def test_ragged_lists_equal_the_reference(
    size: int, group: int, tokens: int, dtype: torch.dtype, heads: int, generator: torch.Generator
) -> None:
    from dustin_runtime.kernels.sparse import sparse_attention

    k, v = cases.cache(cases.LENGTHS, tokens, size, dtype, generator)
    q = cases.queries(len(cases.LENGTHS), tokens, group, size, dtype, generator)
    start = torch.tensor(cases.LENGTHS, device=q.device)
    kept = kept_lists(150, heads, generator)
    found = sparse_attention(q, k, v, start, kept)
    want = sparse_reference(q.double(), k.double().nan_to_num(), v.double().nan_to_num(), start, kept)
    assert cases.error(found, want) < cases.tolerance(dtype)
    assert torch.equal(sparse_attention(q, k, v, start, kept), found)


@pytest.mark.parametrize(
    ("splits", "budget"),
    # Of twenty eight are merged at a time; the middle ones have nothing.
    [*itertools.product([1, 2, 5], [1, 40, 64, 129]), (20, 1), (20, 129)],
)
def test_any_split_and_budget(splits: int, budget: int, generator: torch.Generator) -> None:
    from dustin_runtime.kernels.sparse import Tiling, sparse_attention

    k, v = cases.cache(cases.LENGTHS, 3, 64, torch.float32, generator)
    q = cases.queries(len(cases.LENGTHS), 3, 4, 64, torch.float32, generator)
    start = torch.tensor(cases.LENGTHS, device=q.device)
    kept = kept_lists(budget, 1, generator)
    want = sparse_reference(q.double(), k.double().nan_to_num(), v.double().nan_to_num(), start, kept)
    found = sparse_attention(q, k, v, start, kept, Tiling(16, 32, splits, 4, 2))
    assert cases.error(found, want) < cases.tolerance(torch.float32)


def test_an_empty_list_leaves_the_new_tokens(generator: torch.Generator) -> None:
    from dustin_runtime.kernels.sparse import sparse_attention

    k, v = cases.cache(cases.LENGTHS, 3, 64, torch.float32, generator)
    q = cases.queries(len(cases.LENGTHS), 3, 4, 64, torch.float32, generator)
    start = torch.tensor(cases.LENGTHS, device=q.device)
    kept = torch.full((len(cases.LENGTHS), 1, 8), -1, device=q.device)
    want = sparse_reference(q.double(), k.double().nan_to_num(), v.double().nan_to_num(), start, kept)
    assert cases.error(sparse_attention(q, k, v, start, kept), want) < cases.tolerance(torch.float32)


@pytest.mark.parametrize("tokens", [1, 2])
def test_positions_that_take_turns_in_a_ring(tokens: int, generator: torch.Generator) -> None:
    """First and last tokens out of a small ring are those of a cache that keeps all."""
    from dustin_runtime.attention.window import first_and_last, window_reference
    from dustin_runtime.cache import Ring
    from dustin_runtime.kernels.sparse import Tiling, sparse_attention, window_attention

    ring = Ring(4, 30)
    k, v = (x.nan_to_num() for x in cases.cache(cases.LENGTHS, tokens, 64, torch.float32, generator))
    q = cases.queries(len(cases.LENGTHS), tokens, 4, 64, torch.float32, generator)
    start = torch.tensor(cases.LENGTHS, device=q.device)
    kept = first_and_last(start, 24, 4)[:, None]
    small = [torch.full_like(x[:, :34], float("nan")) for x in (k, v)]
    for row, length in enumerate(cases.LENGTHS):
        for position in range(length + tokens):  # later ones overwrite earlier ones
            slot = int(ring.slots(torch.tensor(position)))
            for ours, whole in zip(small, (k, v), strict=True):
                ours[row, slot] = whole[row, position]
    want = sparse_reference(q.double(), k.double(), v.double(), start, kept)
    assert cases.error(sparse_attention(q, *small, start, kept, ring=ring), want) < cases.tolerance(torch.float32)
    for cut in (None, Tiling(16, 16, 2, 1, 2)):
        found = window_attention(q, *small, start, 24, 4, cut, ring)
        assert cases.error(found, want) < cases.tolerance(torch.float32)
    assert cases.error(window_attention(q, k, v, start, 24, 4), want) < cases.tolerance(torch.float32)
    small = [x.nan_to_num().double() for x in small]
    assert cases.error(window_reference(q.double(), *small, start, 24, 4, ring), want) < 1e-12
    assert cases.error(sparse_reference(q.double(), *small, start, kept, ring), want) < 1e-12
