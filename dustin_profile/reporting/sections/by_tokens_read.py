"""Quality against the tokens that are read: the comparison at equal cost, where methods of one budget differ in it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from dustin_profile.reporting.blocks import Figure
from dustin_profile.reporting.charts import lines
from dustin_profile.reporting.measured import Task
from dustin_profile.reporting.sections.budget import curves_of, ticks

HEIGHT = 4.2
"""Inches: room for the name of every method at the end of its line."""


def kl_figure(cells: Iterable[tuple[str, float, float]], name: str, title: str) -> Figure | None:
    """KL by tokens read; None where no method was measured at two budgets.

    Args:
        cells: method, tokens read and KL in nats, each method as often as it has budgets.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for method, read, kl in cells:
        points.setdefault(method, []).append((read, kl))
    if not any(len(found) > 1 for found in points.values()):
        return None
    return Figure(
        name,
        "KL against full verification by tokens read; lower is better, grey lines are bounds.",
        f"KL by tokens read, a line per policy: {title}",
        partial(
            lines,
            curves=curves_of(points),
            xlabel="prefix tokens read",
            ylabel="KL(full ‖ policy), nats",
            log_x=True,
            log_y=all(y > 0 for found in points.values() for _, y in found),
            x_ticks=ticks([x for found in points.values() for x, _ in found]),
        ),
        height=HEIGHT,
    )


def score_figure(task: Task, name: str, title: str) -> Figure | None:
    """Score by tokens read, vanilla's as the point at the right; None where no method has two budgets."""
    points: dict[str, list[tuple[float, float]]] = {}
    for (method, budget), score in task.scores.items():
        if score.read is not None and (budget is not None or method == "vanilla"):
            points.setdefault(method, []).append((score.read, score.value))
    if not any(len(found) > 1 for found in points.values()):
        return None
    return Figure(
        name,
        f"{task.title} by tokens read; higher is better. Vanilla reads everything.",
        f"{task.title} by tokens read, a line per method: {title}",
        partial(
            lines,
            curves=curves_of(points),
            xlabel="prefix tokens read",
            ylabel=task.title,
            log_x=True,
            x_ticks=ticks([x for found in points.values() for x, _ in found]),
        ),
        height=HEIGHT,
    )
