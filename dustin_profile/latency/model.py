"""The time of a step as a sum of terms, none of which shrinks it: more work never takes less time.

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


class Range(NamedTuple):
    """What may be chosen, and is timed: each ascending."""

    budgets: Sequence[int]
    depths: Sequence[int]


def features(step: Step, among: Range) -> dict[str, float]:
    """The terms of a step, by name, and how often it has each.

    `CACHE`: what every step does. `CACHE DEPTH`: what passes of draft and target take longer from this depth on.
    `read K`: what verification gathers and reads longer from this budget on. `read_drafted`, `windowed_read_drafted`:
    what verification and a windowed draft read longer per draft token and token of k. `history`: the target's scores.
    `lookahead`, `lookahead_drafted`: those of a draft layer, per layer, and per layer and draft token.
    """
    cache = "windowed" if step.windowed else "full"
    further = float((step.depth - among.depths[0]) * (step.budget - among.budgets[0]))
    return (
        {name: float(name == cache) for name in ("full", "windowed")}
        | {
            f"{name} {depth}": float(name == cache and step.depth >= depth)
            for name in ("full", "windowed")
            for depth in among.depths[1:]
        }
        | {f"read {k}": float(step.budget >= k) for k in among.budgets[1:]}
        | {
            "read_drafted": further,
            "windowed_read_drafted": step.windowed * float(step.depth * (step.budget - among.budgets[0])),
            "history": float(step.history),
            "lookahead": float(step.layers),
            "lookahead_drafted": float(step.layers * step.depth),
        }
    )


def fit(steps: Sequence[Step], milliseconds: Sequence[float], among: Range) -> dict[str, float]:
    """Coefficients in milliseconds, by least squares of the relative error; none is negative."""
    from scipy.optimize import nnls

    terms = [features(step, among) for step in steps]
    times = np.asarray(milliseconds, dtype=np.float64)
    rows = np.asarray([list(one.values()) for one in terms]) / times[:, None]
    scale = np.where(rows.any(0), np.abs(rows).max(0), 1.0)
    found, _ = nnls(rows / scale, np.ones(len(times)))
    return dict(zip(terms[0], (found / scale).tolist(), strict=True))


def predict(coefficients: Mapping[str, float], step: Step, among: Range) -> float:
    """Milliseconds of a step whose depth and budget are in the range."""
    return float(sum(coefficients[name] * times for name, times in features(step, among).items()))


def steps_to_fit(among: Range, layers: int) -> list[Step]:
    """The steps that the model is fitted to.

    Args:
        layers: draft layers that may be scored, at most.
    """
    budgets, depths = among
    least, most, shallow, deep = budgets[0], budgets[-1], depths[0], depths[-1]
    found = [Step(depth, most, windowed, layers, True) for windowed in (False, True) for depth in depths]
    found += [Step(deep, k, False, layers, True) for k in budgets]
    found += [Step(depth, least, windowed, layers, True) for windowed in (False, True) for depth in (shallow, deep)]
    found += [Step(depth, most, False, fewer, True) for fewer in (1, 0) for depth in (shallow, deep)]
    found += [Step(depth, most, False, layers, False) for depth in (shallow, deep)]
    return list(dict.fromkeys(found))


def steps_left_out(among: Range, layers: int) -> list[Step]:
    """Steps that the model is tested on, none of those, and as far from them as can be; arguments as there. At least
    one: no step of a windowed draft that is not scored is fitted."""
    budgets, depths = among
    k, depth = budgets[(len(budgets) - 1) // 2], depths[(len(depths) - 1) // 2]
    found = [
        Step(depth, k, False, layers, True),
        Step(depth, k, True, layers, True),
        Step(depths[0], k, False, max(layers - 1, 1), True),
        Step(depth, budgets[0], True, 0, True),
    ]
    fitted = steps_to_fit(among, layers)
    return [step for step in dict.fromkeys(found) if step not in fitted]
