"""The two averages over LongBench's tasks that papers print, and the categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dustin_profile.evaluation.longbench.table import load_table


def averages(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per method and budget, over the tasks that were run.

    Returns:
        Entries with `tasks` (how many), `plain` (every task counts once), `weighted` (a task counts as many times as it
        has rows in LongBench, whatever was run of it) and `categories` (weighted in the same way).
    """
    means: dict[tuple[str, int | None], dict[str, float]] = {}
    for entry in results["entries"]:
        scores = means.setdefault((entry["method"], entry["budget"]), {})
        if entry["group"]:
            scores[entry["group"]["task"]] = entry["scores"]["score"]["mean"]
    table = load_table()
    found = []
    for (method, budget), scores in means.items():
        categories = dict.fromkeys(table[task].category for task in scores)
        found.append(
            {
                "method": method,
                "budget": budget,
                "tasks": len(scores),
                "plain": sum(scores.values()) / len(scores),
                "weighted": _weighted(scores, list(scores)),
                "categories": {
                    name: _weighted(scores, [task for task in scores if table[task].category == name])
                    for name in categories
                },
            }
        )
    return found


def _weighted(scores: Mapping[str, float], tasks: Sequence[str]) -> float:
    weights = {task: load_table()[task].samples for task in tasks}
    return sum(scores[task] * weights[task] for task in tasks) / sum(weights.values())
