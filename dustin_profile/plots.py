"""Pictures for people: PNG files, drawn without a display."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dustin_profile.method_styles import style
from dustin_runtime.files import write_with

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, ACCENT, MUTED = "#222222", "#c2410c", "#64748b"


def heads_heatmap(path: Path, scores: Sequence[Sequence[float]], ranking: Sequence[Sequence[int]], title: str) -> None:
    """Retrieval score of every head, the used four of each layer marked.

    Args:
        scores: [layers][query_heads].
    """
    table = np.asarray(scores).T
    heads, layers = table.shape
    figure = blank(max(6.0, 0.22 * layers + 2), max(2.6, 0.17 * heads + 1.4))
    axes = figure.add_subplot()
    image = axes.imshow(np.sqrt(table), aspect="auto", cmap="magma_r", interpolation="nearest")
    marks = [(layer, head) for layer, order in enumerate(ranking) for head in order[:4]]
    axes.scatter(
        [m[0] for m in marks], [m[1] for m in marks], s=7, facecolors="none", edgecolors="#0ea5e9", linewidths=0.9
    )
    axes.set(xlabel="layer", ylabel="query head", title=title)
    bar = figure.colorbar(image, pad=0.01)
    ticks = np.linspace(0, float(np.sqrt(table.max())), 4)
    bar.set_ticks(ticks.tolist(), labels=[f"{tick**2:.3f}" for tick in ticks])
    bar.set_label("attention on the answer")
    save(figure, path)


def split_curve(path: Path, curve: Sequence[float], m: int, flat: tuple[int, int], lines: Mapping[str, float]) -> None:
    """ARR over m, with the chosen m, the run of m that is as good, and the policies beside it.

    Args:
        curve: mean ARR at m = 0, 1, ...
        lines: level of other policies by name.
    """
    figure = blank(7.0, 3.6)
    axes = figure.add_subplot()
    axes.axvspan(*flat, color=ACCENT, alpha=0.12, lw=0, label=f"within 0.001 of the best: m {flat[0]} to {flat[1]}")
    axes.plot(curve, color=INK, lw=1.6)
    axes.plot([m], [curve[m]], "o", color=ACCENT, label=f"chosen: m = {m}")
    for dash, (name, level) in zip(("-", "--", ":", "-."), lines.items(), strict=False):
        axes.axhline(level, color=MUTED, lw=0.9, ls=dash, label=f"{name} {level:.3f}")
    axes.set(xlabel="m, tokens chosen by lookahead (0: Dustin-T, most: Dustin-D)", ylabel="ARR, search documents")
    axes.legend(fontsize=8, frameon=False, loc="center right")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def drift_curves(path: Path, panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> None:
    """Panels by title, of lines by method: (tokens generated, KL). Drawn as `method_styles` says."""
    figure = blank(2.6 + 4.4 * len(panels), 3.6)
    legend = {}
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name, points in curves.items():
            (legend[name],) = axes.plot(*zip(*points, strict=True), label=name, **style(name).line)
        axes.set(xlabel="tokens generated", ylabel="KL(full || method), nats", title=title)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, lw=0.6)
    figure.legend(legend.values(), legend.keys(), loc="outside right center", fontsize=8, frameon=False)
    save(figure, path)


def fidelity_curves(path: Path, curves: Mapping[str, Sequence[tuple[float, float, float]]]) -> None:
    """Two panels of lines by policy: (tokens read, KL, ARR). Drawn as `method_styles` says."""
    figure = blank(9.0, 4.2)
    left, right = figure.subplots(1, 2)
    for name, points in curves.items():
        read, kl, arr = zip(*sorted(points), strict=True)
        left.plot(read, kl, label=name, **style(name).line)
        right.plot(read, arr, **style(name).line)
    log_marks(left)
    left.set(xscale="log", xlabel="prefix tokens read", ylabel="KL(full || policy), nats")
    right.set(xscale="log", xlabel="prefix tokens read", ylabel="attention recovery rate")
    ticks = [2**power for power in range(3, 18)]
    for axes in (left, right):
        low, high = axes.get_xlim()
        shown = [tick for tick in ticks if low <= tick <= high]
        axes.set_xticks(shown, [str(tick) for tick in shown])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, lw=0.6)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    save(figure, path)


def kl_by_position(path: Path, curves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """A line for each policy: (token of the text, KL there)."""
    figure = blank(7.5, 4.2)
    axes = figure.add_subplot()
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=name, **style(name.rpartition("-k")[0]).line)
    axes.set(yscale="log", xlabel="token of the text", ylabel="KL(full || policy), nats")
    log_marks(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.6)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    save(figure, path)


def throughput_front(path: Path, record: Mapping[str, Any]) -> None:
    """ARR on the reported documents over predicted tokens/s of every candidate, with intervals of those on the front.

    Args:
        record: `throughput` of a search's results.
    """
    figure = blank(7.0, 4.2)
    axes = figure.add_subplot()
    candidates = record["candidates"]
    budgets = sorted({entry["budget"] for entry in candidates})
    for place, k in enumerate(budgets):
        own = [entry for entry in candidates if entry["budget"] == k]
        shade = 0.25 + 0.75 * (place + 1) / len(budgets)
        points = [(entry["tokens_per_s"]["mean"], entry["arr"]["mean"]) for entry in own]
        axes.plot(*zip(*points, strict=True), "o", ms=3, color=MUTED, alpha=shade, lw=0, label=f"k = {k}")
    ends = [candidates[index] for index in record["front"]]
    speed = [entry["tokens_per_s"]["mean"] for entry in ends]
    mean = [entry["arr"]["mean"] for entry in ends]
    if all(entry["arr"]["low"] is not None for entry in ends):
        reach = [[entry["arr"]["mean"] - entry["arr"]["low"] for entry in ends]]
        reach.append([entry["arr"]["high"] - entry["arr"]["mean"] for entry in ends])
        axes.errorbar(speed, mean, yerr=reach, fmt="none", ecolor=INK, elinewidth=0.8, capsize=2)
    axes.plot(speed, mean, color=INK, lw=1.2, label="not beaten in both (search documents)")
    chosen = candidates[record["chosen"]]
    label = f"chosen: k = {chosen['budget']}, m = {chosen['m']}, depth {chosen['depth']}"
    axes.plot([chosen["tokens_per_s"]["mean"]], [chosen["arr"]["mean"]], "o", color=ACCENT, label=label)
    axes.set(xlabel=f"tokens/s, predicted, {record['latency']['device']}", ylabel="ARR (95 %)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.6)
    axes.legend(fontsize=8, frameon=False)
    save(figure, path)


def log_marks(axes: Axes) -> None:
    """A logarithmic vertical axis, marked at 1, 2 and 5 of every decade in plain numbers."""
    axes.set_yscale("log", nonpositive="clip")
    low, high = axes.get_ylim()
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [tick for power in decades for digit in (1, 2, 5) if low <= (tick := digit * 10.0**power) <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)


def blank(width: float, height: float) -> Figure:
    """A figure to draw on."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write a figure: the same bytes from the same numbers."""
    write_with(path, lambda temporary: figure.savefig(temporary, format="png", dpi=130, metadata={"Software": None}))
