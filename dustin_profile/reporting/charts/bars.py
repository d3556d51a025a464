"""Rows with a length: means with their intervals, bars, bars made of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dustin_profile.method_styles import INK, Style
from dustin_profile.reporting.charts.axes import RULE, SMALL, frame, short
from dustin_profile.reporting.documents.common import Estimate

HUGE = 1e9
"""From here on a number with all of its digits leaves the axes no room."""


@dataclass(frozen=True)
class Mark:
    """A row of `intervals`."""

    label: str
    value: Estimate
    style: Style


def intervals(figure: Any, marks: Sequence[Mark], xlabel: str, *, zero: bool = False, form: str = ".3f") -> None:
    """A dot and its interval per row, the first row on top; with a line at zero for differences."""
    axes = frame(figure)
    for place, mark in enumerate(marks):
        value, style = mark.value, mark.style
        if value.low is not None and value.high is not None:
            axes.plot([value.low, value.high], [place, place], color=style.colour, lw=1.6, solid_capstyle="butt")
        axes.plot([value.mean], [place], style.marker, color=style.colour, ms=7 if style.own else 5)
        digits = form if abs(value.mean) < HUGE else ".3g"
        text = format(value.mean, f"+{digits}" if zero else digits).replace("-", "−")
        axes.annotate(
            text,
            (1.02, place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=SMALL + 1,
            color=INK,
            fontweight="bold" if style.own else "normal",
        )
    if zero:
        axes.axvline(0, color=INK, lw=0.9)
    axes.set_yticks(range(len(marks)), [short(mark.label) for mark in marks])
    for tick, mark in zip(axes.get_yticklabels(), marks, strict=True):
        tick.set_fontweight("bold" if mark.style.own else "normal")
    axes.set_ylim(len(marks) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(xlabel)
    axes.locator_params(axis="x", nbins=6)
    axes.grid(axis="x", color=RULE, lw=0.6)
    axes.spines["left"].set_visible(False)


def bars(figure: Any, rows: Sequence[tuple[Style, str, float, str]], xlabel: str) -> None:
    """Horizontal bars: style, label, length and the text at its end."""
    axes = frame(figure)
    for place, (style, _, value, text) in enumerate(rows):
        axes.barh(place, value, height=0.62, color=style.colour if style.own else "#b6bcc7")
        axes.annotate(
            text,
            (value, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL + 1,
            fontweight="bold" if style.own else "normal",
            color=INK,
            annotation_clip=False,
        )
    axes.set_yticks(range(len(rows)), [short(name) for _, name, *_ in rows])
    for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("bold" if row[0].own else "normal")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.14 * max(value for *_, value, _ in rows) or 1.0)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(xlabel)
    axes.grid(axis="x", color=RULE, lw=0.6)
    axes.set_axisbelow(True)


PART_COLOURS = ("#0a5c9e", "#e3a72f", "#b0588e", "#3f97d3", "#c9cdd4", "#7d8592", "#00795a", "#c8520a")
"""Neighbours differ in lightness too, so that they differ in print."""


def stacked(
    figure: Any,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    parts: Mapping[str, str],
    xlabel: str,
    marks: Sequence[float | None] = (),
    mark_label: str = "",
) -> None:
    """Bars made of parts.

    Args:
        rows: label, and the length of each part by its key; parts below zero are left out.
        parts: the keys in their order, and what they are called.
        marks: one place per row, such as its floor.
    """
    axes = frame(figure)
    colours = dict(zip(parts, PART_COLOURS, strict=False))
    for place, (_, lengths) in enumerate(rows):
        left = 0.0
        for key in parts:
            length = max(lengths.get(key, 0.0), 0.0)
            axes.barh(place, length, left=left, height=0.62, color=colours[key], edgecolor="white", linewidth=0.6)
            left += length
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = [key for key in parts if any(lengths.get(key, 0) > 0 for _, lengths in rows)]
    handles: list[Any] = [Patch(color=colours[key], label=parts[key]) for key in used]
    for place, mark in enumerate(marks):
        if mark is not None:
            axes.plot([mark, mark], [place - 0.4, place + 0.4], color=INK, lw=1.8)
    if any(mark is not None for mark in marks):
        handles.append(Line2D([], [], color=INK, lw=0, marker="|", ms=9, markeredgewidth=1.8, label=mark_label))
    axes.set_yticks(range(len(rows)), [short(name) for name, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(xlabel)
    axes.grid(axis="x", color=RULE, lw=0.6)
    axes.set_axisbelow(True)
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=min(len(handles), 4),
        frameon=False,
        fontsize=SMALL,
        handlelength=1.0,
        handleheight=0.9,
        columnspacing=1.0,
        borderaxespad=0.1,
    )
