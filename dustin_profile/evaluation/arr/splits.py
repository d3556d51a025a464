"""ARR against m by kind of document, and what choosing m anew could gain (arXiv 2606.24957, Figure 13, Table 14)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dustin_profile.search.arr import first_best
from dustin_profile.search.budget import Budget
from dustin_profile.search.curve import arr_curve
from dustin_profile.statistics import flat_top, interval
from dustin_profile.traces.windows import Windows
from dustin_runtime.config import Selection

FIXED = ("dustin-t", "dustin-d", "dustin")
"""m = 0, all that is free, and the configured one."""
ALL = "all documents"


class SplitCurve(NamedTuple):
    """One document."""

    document: str
    group: str
    arr: Tensor
    """[W, m] fp64, ARR at m = 0, 1, ..."""


def split_curve(windows: Windows, group: str, selection: Selection) -> SplitCurve:
    """The exact curve of a document under the configured layers."""
    budget = Budget(selection.budget, selection.sink, selection.window)
    layers = [entry.layer for entry in selection.lookahead]
    return SplitCurve(windows.document, group, arr_curve(windows, selection.history.layer, layers, budget))


def summarise(curves: Sequence[SplitCurve], m: int) -> list[dict[str, Any]]:
    """An entry per group and, where there are several, one for all: fixed policies, and bounds of dynamic ones.

    Every bound chooses with the truth at hand, so it is what a perfect chooser would reach, not an estimate of one.

    Args:
        m: the configured one.
    """
    names = list(dict.fromkeys(curve.group for curve in curves))
    groups = {name: [curve for curve in curves if curve.group == name] for name in names}
    if len(groups) > 1:
        groups[ALL] = list(curves)
    return [_entry(name, found, m) for name, found in groups.items()]


def _entry(name: str, curves: Sequence[SplitCurve], m: int) -> dict[str, Any]:
    per_document = torch.stack([curve.arr.mean(0) for curve in curves])
    mean = per_document.mean(0)
    places = dict(zip(FIXED, (0, len(mean) - 1, m), strict=True))
    fixed = {policy: per_document[:, place] for policy, place in places.items()}
    best = first_best(mean)
    three = max(FIXED, key=lambda policy: round(float(fixed[policy].mean()), 12))  # the first of equals
    chosen = list(places.values())
    dynamic = {
        "best_of_three": fixed[three],
        "best_m": per_document[:, best],
        "best_m_per_document": per_document.amax(1),
        "best_of_three_per_window": torch.stack([curve.arr[:, chosen].amax(1).mean() for curve in curves]),
        "best_m_per_window": torch.stack([curve.arr.amax(1).mean() for curve in curves]),
    }
    return {
        "group": name,
        "documents": len(curves),
        "windows": sum(len(curve.arr) for curve in curves),
        "m": m,
        "best_m": best,
        "flat": list(flat_top(mean.tolist())),
        "best_of_three": three,
        "arr": {key: _interval(values, share=True) for key, values in (fixed | dynamic).items()},
        "minus_dustin": {
            key: _interval(values - fixed["dustin"]) for key, values in (fixed | dynamic).items() if key != "dustin"
        },
        "curve": [round(value, 6) for value in mean.tolist()],
    }


def _interval(values: Tensor, share: bool = False) -> dict[str, Any]:
    return interval(values.numpy(), seed=0, share=share)._asdict()
