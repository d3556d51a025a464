"""What a step knows about itself, and how far that tells its KL to full verification (`tools/study_tells.py`).

A guard sends steps to full verification, an adaptive budget gives them more tokens: both are worth what foretells a
step's KL. A step is a mapping of such signs, and of its `kl`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dustin_profile.statistics import percentile, spearman

Step = Mapping[str, float]
SETS: dict[str, tuple[str, ...]] = {
    "estimate": ("estimate",),
    "drafted": ("drafted",),
    "estimate, drafted": ("estimate", "drafted"),
    "estimate, served": ("estimate", "served"),
    "all that a step knows": ("estimate", "drafted", "served", "apart", "rest"),
    "unread, served": ("unread", "served"),
}
"""Signs that are fitted together; the last has what no step knows."""
HINDSIGHT = "the KL itself"
SHARE = 0.1
"""Of steps that a guard sends to full verification."""
_LEAST_SIGN, _LEAST_KL = 1e-4, 1e-3


class Told(NamedTuple):
    """What a guard by some signs would leave if the steps that it sends to full verification had a KL of 0."""

    signs: str
    rank: float | None
    """Spearman's correlation with the KL; None where a side does not vary."""
    mean: float
    """Of the mean KL, the share that is left."""
    tail: float
    """The same of the 99th percentile of steps."""


def told(documents: Sequence[Sequence[Step]]) -> list[Told]:
    """One for each of `SETS` whose signs all steps have above 0, and one for the KL itself.

    Args:
        documents: the steps of each, one at least. Of a single document nothing is foretold.
    """
    kl = [step["kl"] for one in documents for step in one]
    orders = {
        name: foretold(documents, signs)
        for name, signs in SETS.items()
        if len(documents) > 1 and all(step.get(sign, 0) > 0 for sign in signs for one in documents for step in one)
    }
    return [
        Told(name, spearman(list(zip(order, kl, strict=True))), *left_by(kl, order))
        for name, order in (orders | {HINDSIGHT: kl}).items()
    ]


def foretold(documents: Sequence[Sequence[Step]], signs: Sequence[str]) -> list[float]:
    """KL of every step, by least squares of logarithms over the steps of the other documents."""
    logs = [np.log(np.array([[step[sign] for sign in signs] for step in one]).clip(_LEAST_SIGN)) for one in documents]
    design = [np.column_stack([np.ones(len(one)), one]) for one in logs]
    wanted = [np.log(np.array([step["kl"] for step in one]) + _LEAST_KL) for one in documents]
    found: list[float] = []
    for held, rows in enumerate(design):
        x, y = (np.concatenate([*of[:held], *of[held + 1 :]]) for of in (design, wanted))
        found += np.exp(rows @ np.linalg.lstsq(x, y, rcond=None)[0]).tolist()
    return found


def left_by(kl: Sequence[float], order: Sequence[float]) -> tuple[float, float]:
    """Shares of the mean and of the 99th percentile that are left without the KL of the steps that stand highest."""
    highest = sorted(range(len(kl)), key=lambda step: order[step], reverse=True)[: round(SHARE * len(kl))]
    left = list(kl)
    for step in highest:
        left[step] = 0.0
    return _share(sum(left), sum(kl)), _share(percentile(left), percentile(kl))


def _share(part: float, whole: float) -> float:
    """Of nothing, nothing is left."""
    return part / whole if whole else 0.0
