"""From scores to heads: a ranking within every layer, and how far it can be trusted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

USED = 4
"""Heads per layer that are used (CompressKV; arXiv 2606.24957, Appendix A)."""


class Stability(NamedTuple):
    """Agreement of two rankings, per layer and then averaged."""

    top: float
    """Heads in both top fours, of four."""
    kendall: float
    """Kendall's tau of the whole rankings."""
    per_layer: list[float]
    """Top overlap of each layer."""


def rank(scores: Array) -> list[list[int]]:
    """Heads of every layer from best to worst, equal scores by the lower head.

    Args:
        scores: [layers, query_heads].
    """
    return [[int(head) for head in np.argsort(-layer, kind="stable")] for layer in scores]


def top_heads(ranking: list[list[int]], used: int = USED) -> dict[int, list[int]]:
    """The first heads of every layer, ascending by rank."""
    return {layer: order[:used] for layer, order in enumerate(ranking)}


def agreement(first: Array, second: Array, used: int = USED) -> Stability:
    """Compare two score tables [layers, query_heads] of the same model."""
    tops = top_overlap(first, second, used)
    taus = kendall(first, second)
    finite = taus[np.isfinite(taus)]  # undefined where a layer has one score throughout
    return Stability(float(np.mean(tops)), float(finite.mean()) if len(finite) else 0.0, tops)


def top_overlap(first: Array, second: Array, used: int = USED) -> list[float]:
    """Share of each layer's first heads that two score tables [layers, query_heads] have in common."""
    return [
        len(set(left[:used]) & set(right[:used])) / min(used, len(left))
        for left, right in zip(rank(first), rank(second), strict=True)
    ]


def kendall(first: Array, second: Array) -> Array:
    """Kendall's tau-b of every layer, [layers]; NaN where one side has one score throughout.

    All layers at once: resampling asks for it thousands of times.
    """
    left, right = (np.sign(scores[:, :, None] - scores[:, None, :]) for scores in (first, second))
    norms = np.sqrt((left**2).sum((1, 2)) * (right**2).sum((1, 2)))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((left * right).sum((1, 2)) / norms)
