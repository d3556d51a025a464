"""Needles found by length and depth, a grid for the methods that found the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from dustin_profile.method_styles import label
from dustin_profile.reporting.blocks import Block, Content, Figure, Figures
from dustin_profile.reporting.charts import heatmap
from dustin_profile.reporting.documents.evaluation import Evaluation, Row
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.titles import pair_of
from dustin_profile.reporting.wording import count, listed


def is_grid(group: Mapping[str, str]) -> bool:
    """Whether items are grouped as this section shows them."""
    return group.keys() == {"length", "depth"}


def build(evidence: Evidence) -> Content | None:
    blocks: list[Block] = []
    number = 0
    for source in evidence.of(Evaluation):
        cells: dict[tuple[str, int | None], list[Row]] = {}
        for entry in source.data.entries:
            if is_grid(entry.group):
                cells.setdefault((entry.method, entry.budget), []).append(entry)
        alike: dict[tuple[float, ...], list[tuple[str, int | None]]] = {}
        for one, rows in cells.items():
            alike.setdefault(_shares(rows), []).append(one)
        figures = []
        for ones in alike.values():
            number += 1
            figures.append(_figure(cells[ones[0]], f"needle-{number}", _names(ones), pair_of(source.data) or ""))
        if figures:
            blocks.append(Figures(figures))
    if not blocks:
        return None
    return Content(
        "Share of facts found, by the length of the text and where in it the fact stands (0: at its beginning). A"
        " policy that keeps only first and last tokens loses the middle; dark is good. Methods that found the same have"
        " one picture.",
        blocks,
    )


def _shares(rows: Sequence[Row]) -> tuple[float, ...]:
    """What a grid shows, place by place."""
    ordered = sorted(rows, key=lambda row: (float(row.group["length"]), float(row.group["depth"])))
    return tuple(next(iter(row.scores.values())).mean for row in ordered)


def _names(ones: Sequence[tuple[str, int | None]]) -> str:
    """Methods, each with all its budgets."""
    budgets: dict[str, list[int]] = {}
    for method, budget in ones:
        budgets.setdefault(method, []).extend([budget] if budget else [])
    return "; ".join(
        label(method) + (f", k = {listed([str(k) for k in ks])}" if ks else "") for method, ks in budgets.items()
    )


def _figure(rows: Sequence[Row], name: str, methods: str, pair: str) -> Figure:
    lengths = sorted({row.group["length"] for row in rows}, key=float)
    depths = sorted({row.group["depth"] for row in rows}, key=float)
    found = {(row.group["depth"], row.group["length"]): next(iter(row.scores.values())).mean for row in rows}
    table = [[found.get((depth, length), math.nan) for length in lengths] for depth in depths]
    return Figure(
        name,
        f"{methods}: {pair}.",
        f"Share of needles found by length and depth: {methods}: {pair}",
        partial(
            heatmap,
            table=table,
            xlabel="tokens of the prompt",
            ylabel="depth of the needle",
            bar_label="found",
            x_names=[count(float(length)) for length in lengths],
            y_names=depths,
            limits=(0.0, 1.0),
            written=len(lengths) <= 8,
        ),
        height=1.3 + 0.32 * len(depths),
    )


SECTION = Section("needle", "Needles by length and depth", "dustin-profile eval needle", build)
