"""ARR against budget, window by window (arXiv 2606.24957, Figures 3 and 11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dustin_profile.evaluation.arr.policies import ORACLE, Rule, kept
from dustin_profile.search.arr import arr, mass, prefix_arr
from dustin_profile.search.signals import TraceSignals
from dustin_profile.statistics import interval
from dustin_profile.traces.windows import Windows
from dustin_runtime.config import Selection

Row = dict[str, Any]


def window_rows(windows: Windows, selections: Sequence[Selection], chosen: Sequence[Rule]) -> list[Row]:
    """One row per window, policy and budget: ARR, ARR of the prefix alone, and prefix tokens read."""
    rows: list[Row] = []
    for selection in selections:
        for name, positions in kept(TraceSignals(windows, selection), chosen).items():
            recovered = mass(windows.truth, positions).sum(-1)
            columns = {
                "prefix": windows.prefix,
                "read": (positions >= 0).sum(-1),
                "arr": arr(windows, recovered),
                "prefix_arr": prefix_arr(windows, recovered),
            }
            for index, values in enumerate(zip(*(column.tolist() for column in columns.values()), strict=True)):
                rows.append(
                    {"document": windows.document, "window": index, "policy": name, "budget": selection.budget}
                    | dict(zip(columns, values, strict=True))
                )
    return rows


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """An entry per policy and budget: means over documents with their intervals, and what it lacks to the oracle."""
    documents: dict[tuple[str, int], dict[str, list[Row]]] = {}
    for row in rows:
        documents.setdefault((row["policy"], row["budget"]), {}).setdefault(row["document"], []).append(row)
    means = {
        cell: {
            name: np.asarray([np.mean([row[name] for row in theirs]) for theirs in found.values()])
            for name in ("arr", "prefix_arr", "read")
        }
        for cell, found in documents.items()
    }
    entries = []
    for (policy, budget), found in means.items():
        bound = means[ORACLE, budget]["arr"]
        entries.append(
            {
                "policy": policy,
                "budget": budget,
                "read": float(found["read"].mean()),
                "arr": interval(found["arr"], seed=0, share=True)._asdict(),
                "prefix_arr": interval(found["prefix_arr"], seed=0, share=True)._asdict(),
                "below_oracle": None if policy == ORACLE else interval(bound - found["arr"], seed=0)._asdict(),
            }
        )
    return entries
