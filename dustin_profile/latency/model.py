"""The time of a step as a sum of terms, none of which shrinks it.

Depths and budgets have a term each, since the time of products of few rows is not linear in their number: every depth
is timed with both caches of the draft, and every budget once. The model is asked about other combinations of the same
values, at the batch and context that were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Step(NamedTuple):
    """What decides how long a step takes."""

    depth: int
    """Draft tokens."""
    budget: int
    """k: prefix tokens that verification reads; a windowed draft too."""
    windowed: bool
    """Whether the draft keeps its first and last tokens alone."""
    layers: int
    """Draft layers whose scores are computed; 0 if history chooses all."""
    history: bool
    """Whether the target's scores are computed."""


def features(step: Step) -> dict[str, float]:
    """The terms of a step, by name, and how often it has each.

    `step CACHE DEPTH`: passes of draft and target, and all else that every step does. `read K`: what verification
    gathers and reads. `read_drafted`, `windowed_read_drafted`: the same and what a windowed draft reads, per draft
    token and token of k. `history`: the target's scores. `lookahead`, `lookahead_drafted`: those of a draft layer, per
    layer, and per layer and draft token.
    """
    depth, k = step.depth, step.budget
    return {
        f"step {'windowed' if step.windowed else 'full'} {depth}": 1.0,
        f"read {k}": 1.0,
        "read_drafted": float(depth * k),
        "windowed_read_drafted": float(depth * k * step.windowed),
        "history": float(step.history),
        "lookahead": float(step.layers),
        "lookahead_drafted": float(step.layers * depth),
    }


def fit(steps: Sequence[Step], milliseconds: Sequence[float]) -> dict[str, float]:
    """Coefficients in milliseconds, by least squares of the relative error; none is negative."""
    from scipy.optimize import nnls

    terms = [features(step) for step in steps]
    names = list(dict.fromkeys(name for one in terms for name in one))
    times = np.asarray(milliseconds, dtype=np.float64)
    rows = np.asarray([[one.get(name, 0.0) for name in names] for one in terms]) / times[:, None]
    scale = np.where(rows.any(0), np.abs(rows).max(0), 1.0)
    found, _ = nnls(rows / scale, np.ones(len(times)))
    return dict(zip(names, (found / scale).tolist(), strict=True))


def predict(coefficients: Mapping[str, float], step: Step) -> float:
    """Milliseconds of a step whose depth and budget are among those fitted."""
    return float(sum(coefficients[name] * times for name, times in features(step).items()))


def steps_to_fit(budgets: Sequence[int], depths: Sequence[int], layers: int) -> list[Step]:
    """The steps that the model is fitted to.

    Args:
        budgets, depths: what may be chosen, ascending.
        layers: draft layers that may be scored, at most.
    """
    least, most, shallow, deep = budgets[0], budgets[-1], depths[0], depths[-1]
    found = [Step(depth, most, windowed, layers, True) for windowed in (False, True) for depth in depths]
    found += [Step(deep, k, False, layers, True) for k in budgets]
    found += [Step(depth, least, windowed, layers, True) for windowed in (False, True) for depth in (shallow, deep)]
    found += [Step(depth, most, False, fewer, True) for fewer in (1, 0) for depth in (shallow, deep)]
    return list(dict.fromkeys([*found, Step(deep, most, False, layers, False)]))


def steps_left_out(budgets: Sequence[int], depths: Sequence[int], layers: int) -> list[Step]:
    """Steps that the model is tested on, as far from those as they can be. Arguments as of `steps_to_fit`."""
    k, depth = budgets[(len(budgets) - 1) // 2], depths[(len(depths) - 1) // 2]
    return [
        Step(depth, k, False, layers, True),
        Step(depth, k, True, layers, True),
        Step(depths[0], k, False, max(layers - 1, 1), True),
        Step(depth, budgets[0], True, 0, True),
    ]
