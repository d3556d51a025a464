"""What may be claimed from a sample of documents. Windows of one document resemble each other, so documents are the
unit of every split, mean and interval (clustered errors, arXiv 2411.00640)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from dustin_runtime.errors import NothingMeasuredError
from dustin_runtime.files import digest_text

if TYPE_CHECKING:
    import numpy.typing as npt

_BOOTSTRAP_DOCUMENTS = 16
"""Fewest documents to resample; below that a percentile bootstrap is too narrow and the t interval holds better."""
_RESAMPLES = 10_000
_CURVE_RESAMPLES = 2_000
FLAT = 0.001
"""ARR that nobody would choose an m for."""
_SPLIT_SOURCES = 4
"""Fewest distinct sources to split by source rather than by document."""
_DECIMALS = 12
"""Differences of ARR below this are rounding."""


class Interval(NamedTuple):
    """A mean over documents and how far it may be off."""

    mean: float
    low: float | None
    """None if one document alone was measured."""
    high: float | None
    method: Literal["bootstrap", "t", "none"]
    documents: int


def interval(values: npt.ArrayLike, seed: int, level: float = 0.95, share: bool = False) -> Interval:
    """Mean of one value per document, with a two-sided interval for the mean over documents of this kind.

    Percentile bootstrap over 16 documents or more, Student's t below, none for a single one. The interval of the
    elementwise difference of two policies on the same documents is the paired one.

    Args:
        values: [documents].
        seed: of the bootstrap.
        level: coverage, such as 0.95.
        share: the values are shares, so bounds beyond 0 and 1 are cut there.

    Raises:
        NothingMeasuredError: there is no value, or one is not finite.
    """
    from scipy.special import stdtrit

    sample = np.asarray(values, dtype=np.float64)
    count = len(sample)
    if not count or not np.isfinite(sample).all():
        raise NothingMeasuredError(f"{count} documents, not all with a finite value: no interval can be given")
    mean = float(sample.mean())
    if count == 1:
        return Interval(mean, None, None, "none", 1)
    tail = (1 - level) / 2
    if count < _BOOTSTRAP_DOCUMENTS:
        reach = float(stdtrit(count - 1, 1 - tail) * sample.std(ddof=1) / np.sqrt(count))
        low, high = mean - reach, mean + reach
        return Interval(mean, max(low, 0.0) if share else low, min(high, 1.0) if share else high, "t", count)
    drawn = np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))
    low, high = np.quantile(sample[drawn].mean(1), (tail, 1 - tail))
    return Interval(mean, float(low), float(high), "bootstrap", count)


def per_document(values: npt.ArrayLike, documents: Sequence[str]) -> npt.NDArray[np.float64]:
    """One value per document, for `interval`, whose mean is that of all values.

    Documents with more values weigh more in that mean. Each gets the mean plus its own part in the deviation from it,
    so that the interval is that of a ratio of two sums over documents (clustered errors).

    Args:
        values: [items].
        documents: which document each belongs to.
    """
    sample = np.asarray(values, dtype=np.float64)
    names, places = np.unique(np.asarray(documents), return_inverse=True)
    sums, counts = np.bincount(places, weights=sample), np.bincount(places)
    mean = sample.mean()
    return np.asarray(mean + (sums - counts * mean) * len(names) / len(sample))


def upper_ends(values: npt.ArrayLike, seed: int, level: float = 0.95) -> npt.NDArray[np.float64]:
    """Upper ends of the intervals of many means over the same documents, each by the method of `interval`.

    Args:
        values: [documents, choices], finite, of two documents or more.
        seed: of the bootstrap, which draws the same documents for all choices.

    Returns:
        [choices].
    """
    from scipy.special import stdtrit

    sample: npt.NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    count, tail = len(sample), (1 - level) / 2
    if count < _BOOTSTRAP_DOCUMENTS:
        reach = float(stdtrit(count - 1, 1 - tail)) * sample.std(0, ddof=1) / np.sqrt(count)
        return np.asarray(sample.mean(0) + reach)
    return np.asarray(np.quantile(_drawn(count, seed) @ sample / count, 1 - tail, axis=0))


def _drawn(documents: int, seed: int) -> npt.NDArray[np.int64]:
    """How often each document is drawn, [resamples, documents]."""
    return np.random.default_rng(seed).multinomial(documents, [1 / documents] * documents, _CURVE_RESAMPLES)


def m_interval(per_document_curve: npt.ArrayLike, seed: int, level: float = 0.95) -> tuple[int, int] | None:
    """How far the best m moves when the documents are drawn anew: percentile bootstrap of the arg-max.

    Args:
        per_document_curve: [documents, m] ARR at m = 0, 1, ...

    Returns:
        Bounds of m; None for one document, which says nothing about others.
    """
    curve: npt.NDArray[np.float64] = np.asarray(per_document_curve, dtype=np.float64)
    documents = len(curve)
    if documents < 2:
        return None
    best = (_drawn(documents, seed) @ curve / documents).round(_DECIMALS).argmax(1)
    low, high = np.quantile(best, ((1 - level) / 2, (1 + level) / 2), method="nearest")
    return int(low), int(high)


def flat_top(curve: Sequence[float], tolerance: float = FLAT) -> tuple[int, int]:
    """First and last m of the run around the best whose mean ARR lies within `tolerance` of it.

    The top of the curve is flat: within this run the choice of m hardly matters.
    """
    mean = np.asarray(curve, dtype=np.float64)
    best = int(mean.round(_DECIMALS).argmax())
    below = np.flatnonzero(mean < mean[best] - tolerance)
    return int(below[below < best].max(initial=-1) + 1), int(below[below > best].min(initial=len(mean)) - 1)


def spearman(points: Sequence[tuple[float, float]]) -> float | None:
    """Rank correlation of pairs; None where one side does not vary."""
    from scipy.stats import spearmanr

    if len({x for x, _ in points}) < 2 or len({y for _, y in points}) < 2:
        return None
    return float(spearmanr(points).statistic)


def percentile(values: Sequence[float], of: float = 0.99) -> float:
    """The value that so many are not above."""
    ordered = sorted(values)
    return ordered[min(math.ceil(of * len(ordered)), len(ordered)) - 1]


def split(ids: Sequence[str], sources: Sequence[str], held_out: float = 0.3) -> set[str]:
    """Ids of the documents to report on: nothing is chosen on them.

    The hash of a document's id decides, or of its source if there are four or more of those, so that segments of one
    book do not lie on both sides. The order of the documents does not matter.

    Args:
        ids: one per document, distinct.
        sources: where each document was taken from.
        held_out: share of the hashed names held out, rounded; at least one of them is held out and at least one left.

    Returns:
        The held-out ids; empty for a single document.
    """
    names = sources if len(set(sources)) >= _SPLIT_SOURCES else ids
    ordered = sorted(set(names), key=digest_text)
    held = set(ordered[: held_out_names(len(ordered), held_out)])
    return {document for document, name in zip(ids, names, strict=True) if name in held}


def held_out_names(names: int, held_out: float) -> int:
    """How many of so many distinct names `split` holds out."""
    return min(max(round(held_out * names), 1), names - 1)
