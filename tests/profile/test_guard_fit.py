"""The estimate of a step's ARR is the relation that traces have between scores and attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dustin_profile.search.arr import arr, mass
from dustin_profile.search.budget import Budget
from dustin_profile.search.guard import Judged, fit_guard, least_squares, observe
from dustin_profile.traces.windows import Windows
from dustin_runtime.selection import select

BUDGET = Budget(k=40, sink=2, window=4)
CHOSEN = Judged(target_layer=1, draft_layers=(0, 2), m=15, budget=BUDGET)
LENGTHS = (150, 200, 30, 90)


def document(seed: int, by_history: float, by_lookahead: float, noise: float = 0.0) -> Windows:
    """Truth is a mixture of the two scores, the rest lies behind the prefix: ARR is linear in the shares."""
    generator = torch.Generator().manual_seed(seed)
    prefix, columns = torch.tensor(LENGTHS), max(LENGTHS)
    inside = torch.arange(columns) < prefix[:, None]
    history, lookahead = (
        (torch.rand(layers, len(LENGTHS), columns, generator=generator) ** 4 * inside).half() for layers in (2, 3)
    )
    both = history[1].float(), lookahead[0].float() + lookahead[2].float()
    shares = [scores / scores.sum(1, keepdim=True) for scores in both]
    truth = by_history * shares[0] + by_lookahead * shares[1]
    stray = noise * torch.rand(len(LENGTHS), columns, generator=generator) * inside / columns
    truth = truth + stray
    return Windows(f"d{seed}", prefix, truth, 1 - truth.sum(1), history, lookahead)


def test_a_planted_relation_is_found() -> None:
    fitted, checked = ([document(seed, 0.5, 0.2) for seed in seeds] for seeds in (range(5), range(5, 8)))
    found = fit_guard(fitted, checked, CHOSEN, held_out=True, depth=4)
    assert found is not None
    for estimate in (found.estimate, found.across):
        assert (estimate.intercept, estimate.history, estimate.lookahead) == pytest.approx((0.3, 0.5, 0.2), abs=2e-4)
        assert estimate.rms < 1e-4 and abs(estimate.overestimate) < 1e-4
    assert (found.budget, found.sizes, found.documents, found.errors_of) == (40, (40, 128), 5, "held_out")
    assert (found.m, found.depth, found.draft_cache) == (CHOSEN.m, 4, "full")
    assert found.at(40) == found.estimate and found.at(128) == found.across


def test_errors_are_those_of_the_other_documents() -> None:
    fitted, checked = [document(seed, 0.5, 0.2) for seed in range(5)], [document(9, 0.3, 0.2)]
    found = fit_guard(fitted, checked, CHOSEN, held_out=True, depth=4)
    assert found is not None
    rows = observe(checked, CHOSEN, [40])[40][0]
    errors = (0.3 + 0.5 * rows[:, 0] + 0.2 * rows[:, 1]) - rows[:, 2]
    assert found.estimate.rms == pytest.approx(float((errors**2).mean() ** 0.5), abs=1e-3)
    assert found.estimate.overestimate == pytest.approx(float(np.quantile(errors, 0.95)), abs=1e-3)


def test_what_is_observed_is_what_selection_keeps() -> None:
    windows = document(3, 0.4, 0.3, noise=0.2)
    found = observe([windows], CHOSEN, [40, 128])
    history, lookahead = windows.history[1].float(), windows.lookahead[0].float() + windows.lookahead[2].float()
    for size, m, rows in ((40, 15, (0, 1, 3)), (128, 48, (0, 1))):
        kept = select(lookahead, history, windows.prefix, budget=size, m=m, sink=2, window=4)
        want = [mass(scores, kept).sum(1) / scores.double().sum(1) for scores in (history, lookahead)]
        want.append(arr(windows, mass(windows.truth, kept).sum(1)))
        expected = torch.stack(want, 1)[list(rows)].numpy()  # a short prefix is kept whole and says nothing
        np.testing.assert_allclose(found[size][0], expected, rtol=1e-6)


def test_every_document_weighs_the_same() -> None:
    """Many windows of one document do not outvote two others."""
    generator = np.random.default_rng(0)
    many, few = np.tile([[0.5, 0.5, 0.9]], (100, 1)), np.tile([[0.5, 0.5, 0.3]], (2, 1))
    a, b, c = least_squares([many, few, few])
    assert a + 0.5 * b + 0.5 * c == pytest.approx(0.5)
    rows = generator.random((50, 3))
    rows[:, 2] = 0.1 + 0.2 * rows[:, 0] + 0.3 * rows[:, 1]
    assert least_squares([rows[:10], rows[10:], rows[:0]]) == pytest.approx((0.1, 0.2, 0.3))


def test_short_prefixes_give_no_estimate() -> None:
    documents = [document(seed, 0.5, 0.2) for seed in range(3)]
    large = Judged(1, (0, 2), 15, Budget(k=400, sink=2, window=4))
    assert fit_guard(documents, documents, large, held_out=False, depth=4) is None
