"""The selection kernels keep exactly what the reference keeps."""

from __future__ import annotations

import itertools

import pytest
import torch

from dustin_runtime.selection import select_reference

ON_GPU = torch.cuda.is_available()
KINDS = ["distinct", "ties", "equal", "tiny", "zeros"]
SIZES = [(48, 12), (300, 100), (48, 0), (48, 36), (21, 1), (1000, 500)]
"""Budgets and m; in the interpreter only the first two meet every kind of scores."""
LENGTHS = [5000, 4999, 2048, 2061, 700, 49, 11, 3, 1] if ON_GPU else [5000, 2061, 49, 11, 3, 1]


def scores(kind: str, batch: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Score lists [batch, columns] with ties, zeros, denormals or none of them."""
    random = torch.rand(batch, columns, generator=generator, device=generator.device)
    if kind == "distinct":
        return random
    if kind == "ties":
        return (random * 6).floor() / 6
    if kind == "equal":
        return torch.full_like(random, 0.25)
    if kind == "tiny":
        return random**30 * 1e-20
    return torch.where(random < 0.9, torch.zeros_like(random), -torch.zeros_like(random) + random.round())


@pytest.mark.parametrize(
    ("kind", "budget", "m"),
    [
        (kind, budget, m)
        for kind, (budget, m) in itertools.product(KINDS, SIZES)
        if ON_GPU or kind == "ties" or (budget, m) in SIZES[:2]
    ],
)
def test_equals_the_reference(kind: str, budget: int, m: int, generator: torch.Generator) -> None:
    from dustin_runtime.kernels.selection import select

    columns = 5000
    lengths = torch.tensor(LENGTHS, device=generator.device)
    lookahead, history = (scores(kind, len(lengths), columns, generator) for _ in range(2))
    sizes = {"budget": budget, "m": m, "sink": 4, "window": 8}
    found = select(lookahead if m else None, history if m < budget - 12 else None, lengths, **sizes)
    assert torch.equal(found, select_reference(lookahead, history, lengths, **sizes))


@pytest.mark.parametrize(
    ("columns", "budget", "sink", "window"),
    [(40, 48, 4, 8), (3000, 64, 0, 8), (3000, 64, 5, 0), (3000, 70, 0, 0)] + ([(131072, 512, 4, 16)] if ON_GPU else []),
)
def test_widths_and_protections(columns: int, budget: int, sink: int, window: int, generator: torch.Generator) -> None:
    from dustin_runtime.kernels.selection import select

    lengths = torch.tensor([columns, columns // 2, 7], device=generator.device)
    lookahead, history = (scores("ties", 3, columns, generator) for _ in range(2))
    sizes = {"budget": budget, "m": 20, "sink": sink, "window": window}
    assert torch.equal(
        select(lookahead, history, lengths, **sizes), select_reference(lookahead, history, lengths, **sizes)
    )


def test_lengths_may_be_one_for_all_rows(generator: torch.Generator) -> None:
    """Expanded, they have one element in memory."""
    from dustin_runtime.kernels.selection import select

    history = torch.rand(5, 300, generator=generator, device=generator.device)
    lengths = torch.tensor([260], device=generator.device).expand(5)
    sizes = {"budget": 40, "m": 0, "sink": 4, "window": 8}
    assert torch.equal(select(None, history, lengths, **sizes), select_reference(None, history, lengths, **sizes))
