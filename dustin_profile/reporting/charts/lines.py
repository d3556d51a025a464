"""Values over something: lines by method, a curve with its best place, one value per layer, points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dustin_profile.method_styles import BLUE, GREY, Style
from dustin_profile.plots import log_marks
from dustin_profile.reporting.charts.axes import RULE, SMALL, frame, short, whole_numbers


def lines(
    figure: Any,
    curves: Sequence[tuple[Style, Sequence[float], Sequence[float]]],
    xlabel: str,
    ylabel: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    from_zero: bool = False,
    x_ticks: Sequence[float] = (),
    gap: tuple[Sequence[float], Sequence[float], Sequence[float]] | None = None,
) -> None:
    """Lines, each labelled where it ends.

    Args:
        curves: style, x and y; x ascending.
        gap: x and the two edges of what is shaded.
    """
    axes = frame(figure)
    if gap:
        axes.fill_between(*gap, color="#e8eff6", lw=0)
    for style, x, y in curves:
        axes.plot(x, y, **style.line)
    axes.set_xscale("log" if log_x else "linear")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if from_zero:
        axes.set_ylim(bottom=0)
    if x_ticks:
        axes.set_xticks(list(x_ticks), [f"{tick:,.0f}" for tick in x_ticks])
        axes.minorticks_off()
    elif not log_x and all(x == int(x) for _, xs, _ in curves for x in xs):
        whole_numbers(axes.xaxis)
    if log_y:
        log_marks(axes)
    axes.grid(color=RULE, lw=0.6)
    _label_ends(axes, [(y[-1], x[-1], style) for style, x, y in curves])


def _label_ends(axes: Any, ends: Sequence[tuple[float, float, Style]]) -> None:
    """Write every line's name to the right of the axes, near where it ends, none over another.

    Args:
        ends: y, x and style; lines that end in one point are named in the order of their labels.
    """
    low, high = axes.get_ylim()
    scale = np.log10 if axes.get_yscale() == "log" else np.asarray
    bottom, top = float(scale(low)), float(scale(high))
    ordered = sorted(ends, key=lambda end: (end[0], end[2].label))
    height = axes.get_position().height * axes.figure.get_figheight() * 72
    gap = (SMALL + 1.5) / max(height, 1)
    places = _spread([(float(scale(y)) - bottom) / (top - bottom) for y, _, _ in ordered], gap)
    for place, (y, x, style) in zip(places, ordered, strict=True):
        axes.annotate(
            short(style.label),
            (x, y),
            xytext=(1.045, place),
            textcoords="axes fraction",
            va="center",
            fontsize=SMALL,
            color=style.colour,
            fontweight="bold" if style.own else "normal",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": style.colour,
                "lw": 0.5,
                "shrinkA": 1,
                "relpos": (0, 0.5),
                "shrinkB": 2,
                "alpha": 0.6,
            },
        )


def _spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending places at least `gap` apart, each as near to where it is wanted as the others let it be."""
    blocks: list[tuple[float, int]] = []  # of touching places: sum of (wanted - offset in the block), and how many
    for place in wanted:
        blocks.append((place, 1))
        while len(blocks) > 1:
            (total, size), (more, added) = blocks[-2:]
            if total / size + size * gap <= more / added:
                break
            blocks[-2:] = [(total + more - added * size * gap, size + added)]
    return [total / size + step * gap for total, size in blocks for step in range(size)]


def curve(
    figure: Any,
    values: Sequence[float],
    chosen: int,
    flat: tuple[int, int],
    levels: Mapping[str, float],
    xlabel: str,
    ylabel: str,
) -> None:
    """A curve over 0, 1, ..., the chosen place, the run that is as good, and levels to compare with."""
    axes = frame(figure)
    axes.axvspan(*flat, color="#e8eff6", lw=0)
    axes.plot(values, color=BLUE, lw=2)
    axes.plot([chosen], [values[chosen]], "o", color="#c8520a", ms=6, zorder=4)
    place = chosen / max(len(values) - 1, 1)
    axes.annotate(
        f"m = {chosen}",
        (chosen, values[chosen]),
        xytext=(0, -14),
        textcoords="offset points",
        ha="left" if place < 0.1 else "right" if place > 0.9 else "center",
        fontsize=SMALL + 1,
        color="#c8520a",
        fontweight="bold",
    )
    for name, level in levels.items():
        axes.axhline(level, color=GREY, lw=0.9, ls="--")
        axes.annotate(
            f"{name} {level:.3f}",
            (1, level),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=SMALL,
            color=GREY,
        )
    axes.margins(y=0.1)
    axes.set_xlim(0, max(len(values) - 1, 1))
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(axis="y", color=RULE, lw=0.6)


def columns(figure: Any, values: Sequence[float | None], chosen: Sequence[int], xlabel: str, ylabel: str) -> None:
    """A bar per place, the chosen ones in colour; the axis begins near the lowest, so heights are read off it."""
    axes = frame(figure)
    heights = [np.nan if value is None else value for value in values]
    known = [value for value in values if value is not None]
    bottom = min(known) - 0.15 * (max(known) - min(known) or 0.1)
    colours = [BLUE if place in chosen else "#c3c9d3" for place in range(len(heights))]
    axes.vlines(range(len(heights)), bottom, heights, colors=colours, lw=1.4)
    axes.scatter(range(len(heights)), heights, c=colours, s=[34 if p in chosen else 16 for p in range(len(heights))])
    for place in chosen:
        axes.annotate(
            str(place),
            (place, heights[place]),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=SMALL + 1,
            color=BLUE,
            fontweight="bold",
        )
    axes.set_ylim(bottom, max(known) + 0.16 * (max(known) - bottom))
    whole_numbers(axes.xaxis)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(axis="y", color=RULE, lw=0.6)
    axes.set_axisbelow(True)


def scatter(
    figure: Any, groups: Sequence[tuple[Style, Sequence[float], Sequence[float]]], xlabel: str, ylabel: str
) -> None:
    """Points by method, with a legend; y on a logarithmic scale where all of it is positive."""
    axes = frame(figure)
    for style, x, y in groups:
        edge = {} if style.marker in "x+" else {"edgecolors": "white"}  # the former have no inside
        axes.scatter(
            x,
            y,
            s=18,
            marker=style.marker,
            color=style.colour,
            alpha=0.8,
            linewidths=0.6,
            label=short(style.label),
            **edge,
        )
    if all(value > 0 for *_, y in groups for value in y):
        log_marks(axes)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(color=RULE, lw=0.6)
    axes.set_axisbelow(True)
    figure.legend(
        loc="outside lower left", ncols=3, frameon=False, fontsize=SMALL, handletextpad=0.2, columnspacing=0.8
    )
