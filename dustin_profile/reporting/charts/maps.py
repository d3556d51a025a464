"""Tables as colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dustin_profile.method_styles import INK
from dustin_profile.reporting.charts.axes import SMALL, frame, whole_numbers


def heatmap(
    figure: Any,
    table: Sequence[Sequence[float]],
    xlabel: str,
    ylabel: str,
    bar_label: str,
    *,
    marks: Sequence[tuple[int, int]] = (),
    chosen: Sequence[int] = (),
    x_names: Sequence[str] = (),
    y_names: Sequence[str] = (),
    limits: tuple[float, float] | None = None,
    written: bool = False,
    colours: str = "Blues",
) -> None:
    """A table as colours.

    Args:
        table: [rows][columns].
        bar_label: of the scale; none is drawn without it.
        marks: (column, row) of cells to ring.
        chosen: columns to point at from above.
        limits: values of the lightest and the darkest colour.
        written: whether each cell's value is written in it.
    """
    values = np.asarray(table, dtype=np.float64)
    axes = frame(figure)
    low, high = limits or (0.0, max(float(np.nanmax(values)), 1e-12))
    image = axes.imshow(values, aspect="auto", cmap=colours, interpolation="none", vmin=low, vmax=high)
    if marks:
        axes.scatter(*zip(*marks, strict=True), s=9, facecolors="none", edgecolors="#c8520a", linewidths=0.9)
    for column in chosen:
        axes.annotate(
            "▼",
            (column, -0.5),
            xytext=(0, 1),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=7,
            color="#c8520a",
            annotation_clip=False,
        )
    if written:
        middle = (low + high) / 2
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                ink = "white" if value > middle else INK
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=SMALL, color=ink)
    for names, place in ((x_names, axes.xaxis), (y_names, axes.yaxis)):
        if names:
            place.set_ticks(range(len(names)), list(names))
        else:
            whole_numbers(place)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if not bar_label:
        return
    bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=28, fraction=0.05)
    bar.set_label(bar_label, fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL, length=2)
    bar.outline.set_visible(False)
