"""Intervals over documents, the flat part of the curve, and the split."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dustin_profile.statistics import flat_top, interval, m_interval, per_document, split
from dustin_runtime.errors import NothingMeasuredError


def test_one_document_has_a_mean_and_no_bounds() -> None:
    assert interval([0.9], seed=0) == (0.9, None, None, "none", 1)


def test_few_documents_get_the_t_interval() -> None:
    result = interval([1.0, 2.0, 3.0], seed=0)
    reach = 4.302652729911275 * 1.0 / np.sqrt(3)  # 0.975 quantile of t with 2 degrees of freedom
    assert result.method == "t"
    assert (result.mean, result.documents) == (2.0, 3)
    assert result.low == pytest.approx(2 - reach)
    assert result.high == pytest.approx(2 + reach)


def test_many_documents_are_resampled_with_the_seed() -> None:
    values = np.random.default_rng(3).normal(0.9, 0.02, 64)
    result = interval(values, seed=1)
    assert result.method == "bootstrap"
    assert result == interval(values, seed=1)
    assert result != interval(values, seed=2)
    reach = 1.96 * values.std(ddof=1) / 8
    assert result.low == pytest.approx(result.mean - reach, abs=0.15 * reach)
    assert result.high == pytest.approx(result.mean + reach, abs=0.15 * reach)


def test_the_method_changes_at_sixteen_documents() -> None:
    assert interval(np.arange(15), seed=0).method == "t"
    assert interval(np.arange(16), seed=0).method == "bootstrap"


@pytest.mark.parametrize("documents", [8, 32])
def test_a_higher_level_is_wider(documents: int) -> None:
    values = np.random.default_rng(0).random(documents)
    narrow, wide = interval(values, seed=0, level=0.8), interval(values, seed=0, level=0.99)
    assert None not in (narrow.low, wide.low)
    assert wide.low < narrow.low < narrow.high < wide.high  # type: ignore[operator]


@pytest.mark.parametrize("documents", [8, 32])
def test_nominal_coverage(documents: int) -> None:
    rng = np.random.default_rng(11)
    hits = 0
    for seed in range(200):
        result = interval(rng.normal(0.5, 0.1, documents), seed=seed)
        assert result.low is not None
        assert result.high is not None
        hits += result.low <= 0.5 <= result.high
    assert 176 <= hits <= 199


@pytest.mark.parametrize("values", [[], [0.9, float("nan")], [float("inf")]])
def test_no_interval_without_finite_values(values: list[float]) -> None:
    with pytest.raises(NothingMeasuredError):
        interval(values, seed=0)


def test_m_interval_covers_what_the_documents_choose() -> None:
    curve = -0.01 * np.abs(np.arange(101) - np.array([[20], [40], [60], [80]]))
    low, high = m_interval(curve, seed=0)
    assert 20 <= low < 50 < high <= 80
    assert m_interval(curve, seed=0) == (low, high)


def test_m_interval_is_a_point_where_all_documents_agree_and_none_for_one() -> None:
    curve = np.tile(-np.abs(np.arange(9) - 6.0), (5, 1)) + np.arange(5)[:, None]  # what all m share does not matter
    assert m_interval(curve, seed=0) == (6, 6)
    assert m_interval(np.ones((3, 7)), seed=0) == (0, 0)  # ties: smaller m
    assert m_interval([[0.1, 0.9, 0.2]], seed=0) is None


def test_interval_of_shares_stays_between_0_and_1() -> None:
    assert interval([0.99, 0.90], seed=0).high > 1
    found = interval([0.99, 0.90], seed=0, share=True)
    assert (found.low, found.high) == (pytest.approx(interval([0.99, 0.90], seed=0).low), 1.0)


def test_items_are_clustered_by_document() -> None:
    # Two items of b, one of a and of c: the mean is that of the items, the error that of a ratio of sums.
    scores, documents = [1.0, 0.0, 1.0, 1.0], ["b", "b", "a", "c"]
    values = per_document(scores, documents)
    # mean 0.75; per document (sum - count * mean) * 3 / 4: a 0.1875, b -0.375, c 0.1875
    assert values.tolist() == pytest.approx([0.9375, 0.375, 0.9375])
    assert per_document([0.2, 0.4, 0.9], ["x", "y", "z"]).tolist() == pytest.approx([0.2, 0.4, 0.9])
    # Items that repeat within their document say nothing more than one each: the interval does not shrink.
    once, often = interval([0.2, 0.4, 0.9], seed=0), per_document([0.2, 0.4, 0.9] * 5, ["x", "y", "z"] * 5)
    assert interval(often, seed=0).low == pytest.approx(once.low)


def test_flat_top_is_the_run_around_the_best() -> None:
    assert flat_top([0.5, 0.8, 0.8995, 0.9, 0.8991, 0.898, 0.8999]) == (2, 4)
    assert flat_top([0.9, 0.9, 0.9]) == (0, 2)
    assert flat_top([0.1, 0.2, 0.9]) == (2, 2)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 30), st.integers(1, 7), st.floats(0.01, 0.99), st.integers(0, 1000))
def test_split_is_stable_and_leaves_both_sides(documents: int, books: int, share: float, seed: int) -> None:
    rng = Random(seed)
    pairs = [(f"{seed}/{index}", f"{seed}/book {rng.randrange(books)}") for index in range(documents)]
    ids, sources = zip(*pairs, strict=True)
    held = split(ids, sources, share)
    assert 0 < len(held) < len(ids)
    rng.shuffle(pairs)
    assert split([pair[0] for pair in pairs], [pair[1] for pair in pairs], share) == held
    if len(set(sources)) >= 4:
        assert len({(source, document in held) for document, source in pairs}) == len(set(sources))


def test_split_size_and_dependence_on_the_hash_alone() -> None:
    ids = [f"document {index}" for index in range(40)]
    held = split(ids, ["one"] * 40)
    assert len(held) == 12
    assert held != set(ids[:12])
    assert split(ids, ids) == held


def test_one_document_stays_for_the_search() -> None:
    assert split(["a"], ["s"]) == set()
