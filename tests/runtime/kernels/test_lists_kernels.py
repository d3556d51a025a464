"""The kernels behind `dustin-layers` give the lists of their references, entry by entry."""

from __future__ import annotations

import itertools

import pytest
import torch

from dustin_runtime.policies.dustin_layers import candidates_reference, merge_reference
from dustin_runtime.selection import select_reference

ON_GPU = torch.cuda.is_available()
SINK, WINDOW = 4, 8
LENGTHS = [5000, 4999, 4096, 2061, 700, 49, 13, 12, 11, 3, 1] if ON_GPU else [5000, 4096, 400, 49, 13, 12, 11, 3, 1]
KINDS = ["distinct", "ties", "equal", "zeros"]
LAYERS, LISTS = (3, 2) if ON_GPU else (2, 1)


def scores(kind: str, *size: int, generator: torch.Generator) -> torch.Tensor:
    """Scores with many ties, or with none, or with zeros of both signs."""
    random = torch.rand(size, generator=generator, device=generator.device)
    if kind == "distinct":
        return random
    if kind == "ties":
        return (random * 6).floor() / 6
    if kind == "equal":
        return torch.full_like(random, 0.25)
    return torch.where(random < 0.9, torch.zeros_like(random), -torch.zeros_like(random) + random.round())


@pytest.mark.parametrize("kind", KINDS if ON_GPU else ["ties", "zeros"])
@pytest.mark.parametrize("count", [1, 36, 300, 1004] if ON_GPU else [1, 300])
def test_candidates_are_ranked_as_by_the_reference(kind: str, count: int, generator: torch.Generator) -> None:
    from dustin_runtime.kernels.ranking import candidates

    mass = scores(kind, 2, len(LENGTHS), LISTS, 5000, generator=generator)
    mass[..., 4990:] = float("nan")  # of no row's business: protected, or behind its prefix
    lengths = torch.tensor(LENGTHS, device=mass.device).clamp(max=4998)
    found = candidates(mass, lengths, count, sink=SINK, window=WINDOW)
    want = candidates_reference(mass.nan_to_num(), lengths, count, sink=SINK, window=WINDOW)
    assert torch.equal(found, want)


@pytest.mark.parametrize(
    ("columns", "count", "sink", "window"),
    [(40, 36, 4, 8), (3000, 64, 0, 0), (9000, 500, 5, 3)] + ([(131072, 1004, 4, 16)] if ON_GPU else []),
)
def test_candidates_of_other_widths(
    columns: int, count: int, sink: int, window: int, generator: torch.Generator
) -> None:
    from dustin_runtime.kernels.ranking import candidates

    lengths = torch.tensor([columns, columns // 2, 7], device=generator.device)
    mass = scores("ties", 3, 1, columns, generator=generator)
    found = candidates(mass, lengths, count, sink=sink, window=window)
    assert torch.equal(found, candidates_reference(mass, lengths, count, sink=sink, window=window))


@pytest.mark.parametrize(
    ("kind", "grown"),
    itertools.product(KINDS, (0, 5, 40)) if ON_GPU else [*((kind, 5) for kind in KINDS), ("ties", 0)],
)
@pytest.mark.parametrize(
    ("budget", "own"),
    [(48, 0), (48, 1), (48, 35), (312, 150)]
    + ([(48, 18), (300, 287), (256, 122), (512, 250), (1024, 506), (1024, 1000), (1016, 753)] if ON_GPU else []),
)
def test_lists_are_merged_as_by_the_reference(
    kind: str, grown: int, budget: int, own: int, generator: torch.Generator
) -> None:
    """Candidates were chosen when prefixes were `grown` tokens shorter."""
    from dustin_runtime.kernels.merging import merge

    free, device = budget - SINK - WINDOW, generator.device
    lengths = torch.tensor(LENGTHS, device=device)
    before = (lengths - grown).clamp(min=1)
    mass = scores(kind, LAYERS, len(LENGTHS), LISTS, 5000, generator=generator)
    ranked = candidates_reference(mass, before, free, sink=SINK, window=WINDOW)
    ahead, back = (scores(kind, len(LENGTHS), 5000, generator=generator) for _ in range(2))
    m = (free - own) // 3
    shared = select_reference(ahead, back, lengths, budget=budget - own, m=m, sink=SINK, window=WINDOW)
    found = merge(shared, ranked, lengths, own, WINDOW)
    assert found.shape == (LAYERS, len(LENGTHS), LISTS, budget)
    assert torch.equal(found, merge_reference(shared, ranked, lengths, own, WINDOW))
    for row, length in enumerate(LENGTHS):
        assert ((found[:, row] >= 0).sum(2) == min(length, budget)).all()


def test_a_list_of_a_row_does_not_depend_on_the_others(generator: torch.Generator) -> None:
    from dustin_runtime.kernels.merging import merge
    from dustin_runtime.kernels.ranking import candidates

    lengths = torch.tensor(LENGTHS, device=generator.device)
    mass = scores("ties", len(LENGTHS), 1, 5000, generator=generator)
    shared = select_reference(mass[:, 0], None, lengths, budget=32, m=20, sink=SINK, window=WINDOW)
    ranked = candidates(mass, lengths, 52, sink=SINK, window=WINDOW)
    whole = merge(shared, ranked.unsqueeze(0), lengths, 32, WINDOW)
    for row in (0, 4, 7):
        one = slice(row, row + 1)
        alone = candidates(mass[one], lengths[one], 52, sink=SINK, window=WINDOW)
        assert torch.equal(alone, ranked[one])
        assert torch.equal(merge(shared[one], alone.unsqueeze(0), lengths[one], 32, WINDOW), whole[:, one])
