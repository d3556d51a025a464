"""What estimates a step's ARR at run time: the scores that a list holds, calibrated on traces.

A step knows its scores and its list, not what the target will attend to. Windows of traces have all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dustin_profile.search.arr import arr, mass
from dustin_profile.search.budget import Budget
from dustin_profile.search.curve import lookahead_sum
from dustin_profile.search.phases import usable
from dustin_profile.traces.windows import Documents, Windows
from dustin_runtime.config import ADAPTIVE_SIZES, Estimate, Guard
from dustin_runtime.judge import on_prefix, share_on
from dustin_runtime.selection import select

QUANTILE = 0.95
"""Of the overestimates that `Estimate.overestimate` reports."""
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Judged:
    """The configuration whose lists are judged."""

    target_layer: int
    draft_layers: Sequence[int]
    m: int
    budget: Budget

    def at(self, size: int) -> tuple[int, int]:
        """Another budget and its m, in proportion as `config.changed` has it."""
        room = max(self.budget._replace(k=size).free, 0)
        return size, min(self.m * size // self.budget.k, room)


def fit_guard(searched: Documents, reported: Documents, chosen: Judged, held_out: bool, depth: int) -> Guard | None:
    """Fit at the budget, and at all sizes of an adaptive one together; None if no prefix is longer than the budget.

    Args:
        searched: documents to fit on, each of which counts as one; reported: to measure errors on.
        held_out: whether these are others.
        depth: of the traces, whose draft reads its whole cache.
    """
    k, protected = chosen.budget.k, chosen.budget.sink + chosen.budget.window
    sizes = sorted({k, *(size for size in ADAPTIVE_SIZES if size > protected)})
    fitted, checked = observe(searched, chosen, sizes), observe(reported, chosen, sizes)
    if not (_documents(fitted[k]) and _documents(checked[k])):
        return None
    sizes = [size for size in sizes if _documents(fitted[size]) and _documents(checked[size])]
    return Guard(
        budget=k,
        m=chosen.m,
        depth=depth,
        draft_cache="full",
        estimate=_fit(fitted[k], checked[k]),
        sizes=tuple(sizes),
        across=_fit(_together(fitted, sizes), _together(checked, sizes)),
        documents=_documents(fitted[k]),
        errors_of="held_out" if held_out else "in_sample",
    )


def observe(documents: Documents, chosen: Judged, sizes: Sequence[int]) -> dict[int, list[Array]]:
    """By size and document, [windows, 3]: shares of history and lookahead on the list, and its ARR.

    Windows whose prefix is no longer than the size are left out: their lists hold everything.
    """
    found: dict[int, list[Array]] = {size: [] for size in sizes}
    for windows in usable(documents):
        history = windows.history[chosen.target_layer].float()
        lookahead = lookahead_sum(windows, chosen.draft_layers)
        for size in sizes:
            rows = _rows(windows, history, lookahead, chosen, size)
            found[size].append(rows[(windows.prefix > size).cpu()].numpy())
    return found


def least_squares(documents: Sequence[Array]) -> tuple[float, float, float]:
    """Intercept, and coefficients of the first two columns for the third; every document weighs the same."""
    weights = np.concatenate([np.full(len(rows), len(rows) ** -0.5) for rows in documents if len(rows)])
    rows = np.concatenate([rows for rows in documents if len(rows)])
    design = np.column_stack([np.ones(len(rows)), rows[:, :2]])
    found = np.linalg.lstsq(design * weights[:, None], rows[:, 2] * weights, rcond=None)[0]
    return float(found[0]), float(found[1]), float(found[2])


def _rows(windows: Windows, history: torch.Tensor, lookahead: torch.Tensor, chosen: Judged, size: int) -> torch.Tensor:
    budget, m = chosen.at(size)
    sink, window = chosen.budget.sink, chosen.budget.window
    kept = select(lookahead, history, windows.prefix, budget=budget, m=m, sink=sink, window=window)
    held = [share_on(kept[None, :, None], scores, on_prefix(scores, windows.prefix)) for scores in (history, lookahead)]
    recovered = arr(windows, mass(windows.truth, kept).sum(-1))
    return torch.stack([*held, recovered], dim=1).cpu()


def _fit(fitted: Sequence[Array], checked: Sequence[Array]) -> Estimate:
    intercept, history, lookahead = least_squares(fitted)
    errors = [
        (intercept + history * rows[:, 0] + lookahead * rows[:, 1]).clip(0, 1) - rows[:, 2]
        for rows in checked
        if len(rows)
    ]
    return Estimate(
        intercept=round(intercept, 6),
        history=round(history, 6),
        lookahead=round(lookahead, 6),
        rms=round(float(np.mean([np.mean(error**2) for error in errors]) ** 0.5), 6),
        overestimate=round(float(np.quantile(np.concatenate(errors), QUANTILE)), 6),
    )


def _together(found: dict[int, list[Array]], sizes: Sequence[int]) -> list[Array]:
    """Of each document what all sizes say."""
    return [np.concatenate(rows) for rows in zip(*(found[size] for size in sizes), strict=True)]


def _documents(found: Sequence[Array]) -> int:
    return sum(len(rows) > 0 for rows in found)
