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
    from scipy.stats import kendalltau

    tops = [
        len(set(left[:used]) & set(right[:used])) / min(used, len(left))
        for left, right in zip(rank(first), rank(second), strict=True)
    ]
    taus = [kendalltau(left, right).statistic for left, right in zip(first, second, strict=True)]
    finite = [float(tau) for tau in taus if np.isfinite(tau)]  # undefined where a layer has one score throughout
    return Stability(float(np.mean(tops)), float(np.mean(finite)) if finite else 0.0, tops)
