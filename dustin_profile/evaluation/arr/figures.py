"""Figures of an ARR evaluation; bands are 95 % intervals over documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dustin_profile import plots
from dustin_profile.evaluation.arr.layers import LAYER_ORACLE, PAST, PAST_KEPT, PAST_LAYER
from dustin_profile.evaluation.arr.policies import ORACLE
from dustin_profile.method_styles import style
from dustin_profile.plots import ACCENT, INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TITLE = 26
"""Characters that fit over a panel."""
MOST_PANELS = 12
"""Groups that are drawn; the table has all."""


def draw(folder: Path, result: Mapping[str, Any]) -> None:
    """Every figure that the results have data for."""
    by_budget(folder / "budgets.png", result["budgets"])
    lookahead(folder / "lookahead.png", result["budgets"])
    by_split(folder / "splits.png", result["splits"])
    for name in ("layers", "distances"):
        if not result[name]:  # of an earlier pass
            (folder / f"{name}.png").unlink(missing_ok=True)
    if result["layers"]:
        by_layer(folder / "layers.png", result["layers"], result["selection"])
    if result["distances"]:
        by_distance(folder / "distances.png", result["distances"], result["budgets"], result["selection"]["budget"])


def by_budget(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """ARR, and what every policy lacks to the oracle: the differences are small where all is large."""
    figure = plots.blank(10.0, 4.2)
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(entry["policy"] for entry in entries):
        theirs = [entry for entry in entries if entry["policy"] == name]
        _line(left, [e["budget"] for e in theirs], [e["arr"] for e in theirs], name, band=name in (ORACLE, "dustin"))
        if name != ORACLE:
            _line(
                right, [e["budget"] for e in theirs], [e["below_oracle"] for e in theirs], name, band=name == "dustin"
            )
    left.set(ylabel="ARR")
    right.set(ylabel="oracle minus policy, paired")
    plots.log_marks(right)
    for axes in (left, right):
        _budget_axis(axes, [entry["budget"] for entry in entries])
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    plots.save(figure, path)


def lookahead(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """What the draft alone recovers of what there is to recover (Figures 3 and 11), the gap shaded."""
    figure = plots.blank(6.4, 3.8)
    axes = figure.add_subplot()
    found = {
        name: [entry for entry in entries if entry["policy"] == name]
        for name in (ORACLE, "lookahead-top", "lookahead-top-all", "dustin-d")
    }
    for name, theirs in found.items():
        _line(axes, [e["budget"] for e in theirs], [e["arr"] for e in theirs], name)
    budgets = [entry["budget"] for entry in found[ORACLE]]
    low, high = ([entry["arr"]["mean"] for entry in found[name]] for name in ("lookahead-top", ORACLE))
    axes.fill_between(budgets, low, high, color="#86efac", alpha=0.25, lw=0)
    axes.set(ylabel="ARR")
    _budget_axis(axes, budgets)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    plots.save(figure, path)


def by_split(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """ARR over m, a panel per kind of document (Figure 13), as the difference from the configured m."""
    shown = [*entries[-1:], *entries[:-1]][:MOST_PANELS]  # all documents first
    columns = min(len(shown), 4)
    rows = -(-len(shown) // columns)
    figure = plots.blank(max(3.1 * columns, 5.0), 2.5 * rows + 0.6)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for place, (axes, entry) in enumerate(zip(panels.flat, shown, strict=False)):
        m, best = entry["m"], entry["best_m"]
        curve = [value - entry["curve"][m] for value in entry["curve"]]
        axes.axhline(curve[0], color=style("dustin-t").colour, lw=1, ls="--", label="dustin-t (m = 0)")
        axes.axhline(curve[-1], color=style("dustin-d").colour, lw=1, ls="-.", label="dustin-d (largest m)")
        axes.plot(curve, color=INK, lw=1.4, label="hybrid")
        axes.plot([m], [curve[m]], "o", color=ACCENT, ms=6, label="configured m")
        axes.plot([best], [curve[best]], "^", color=INK, mfc="none", ms=6, label="best m")
        axes.set_title(f"{_short(entry['group'])} ({entry['documents']}): ARR {entry['curve'][m]:.3f}", fontsize=8)
        axes.tick_params(labelsize=7, labelbottom=place + columns >= len(shown))  # the lowest of its column
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(panels.flat)[len(shown) :]:
        axes.remove()
    figure.supxlabel("m, tokens chosen by lookahead", fontsize=9)
    figure.supylabel("ARR less that at the configured m", fontsize=9)
    handles = panels.flat[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=5, fontsize=7.5, frameon=False)
    plots.save(figure, path)


def by_layer(path: Path, layers: Mapping[str, Sequence[Mapping[str, Any]]], selection: Mapping[str, Any]) -> None:
    """ARR of every target layer's own attention (Figures 4 and 12), and what it lacks to the layer's own oracle."""
    figure = plots.blank(9.6, 6.0)
    above, below = figure.subplots(2, 1, sharex=True)
    bound = [value["mean"] for value in layers[LAYER_ORACLE]]
    reach = 0.01
    for name, values in layers.items():
        places = list(range(len(values)))
        _line(above, places, values, name, band=name == "dustin", marker=None)
        if name != LAYER_ORACLE:
            gap = [best - value["mean"] for best, value in zip(bound, values, strict=True)]
            reach = max(reach, *gap) if name != "streaming" else reach
            below.plot(places, gap, **style(name).line | {"marker": None})
    for axes in (above, below):
        axes.axvline(selection["history"]["layer"], color=MUTED, lw=0.8, ls=":")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, lw=0.6)
    above.set(ylabel=f"ARR at k = {selection['budget']}")
    below.set(
        xlabel="target layer (dotted: the history layer)", ylabel="below the layer's oracle", ylim=(0, 1.1 * reach)
    )
    below.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*above.get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    plots.save(figure, path)


def by_distance(
    path: Path, distances: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Any]], budget: int
) -> None:
    """How history ages (Figure 2): ARR by budget at several distances, and the loss against distance."""
    figure = plots.blank(10.0, 4.2)
    left, right = figure.subplots(1, 2)
    known = sorted({entry["distance"] for entry in distances})
    oracle = [entry for entry in entries if entry["policy"] == ORACLE]
    _line(left, [e["budget"] for e in oracle], [e["arr"] for e in oracle], ORACLE)
    for place, distance in enumerate(known):
        theirs = [e for e in distances if e["distance"] == distance and e["rule"] == PAST]
        shade = 0.25 + 0.7 * (1 - place / max(len(known) - 1, 1))
        left.plot(
            [e["budget"] for e in theirs],
            [e["arr"]["mean"] for e in theirs],
            **{"color": (0.11, 0.31, 0.85, shade), "marker": "o", "ms": 3, "lw": 1.2, "label": f"distance {distance}"},
        )
    left.set(ylabel="ARR, all heads' past query, top k")
    _budget_axis(left, [entry["budget"] for entry in oracle])
    left.legend(fontsize=8, frameon=False, loc="upper left")
    at = min({entry["budget"] for entry in distances}, key=lambda k: abs(k - budget))
    named = {PAST: "all heads, top k", PAST_LAYER: "history layer, top k", PAST_KEPT: "history layer, as Dustin-T"}
    colours = dict(zip(named, ("#1d4ed8", "#7c3aed", ACCENT), strict=True))
    for rule, label in named.items():
        theirs = [e for e in distances if e["rule"] == rule and e["budget"] == at]
        values = [e["below_oracle"] for e in theirs]
        _line(right, [e["distance"] for e in theirs], values, label, band=True, color=colours[rule])
    right.set(xscale="log", xlabel="distance of the past query, tokens", ylabel=f"oracle minus policy at k = {at}")
    right.set_xticks(known, [str(distance) for distance in known])
    right.minorticks_off()
    right.set_ylim(bottom=0)
    right.legend(fontsize=8, frameon=False, loc="upper left")
    right.spines[["top", "right"]].set_visible(False)
    right.grid(alpha=0.25, lw=0.6)
    plots.save(figure, path)


def _line(
    axes: Axes,
    places: Sequence[float],
    values: Sequence[Mapping[str, Any]],
    name: str,
    band: bool = False,
    marker: str | None = "o",
    color: str | None = None,
) -> None:
    """A line of means with, if wanted, the band of their intervals."""
    drawn = style(name).line
    drawn |= {"marker": marker and drawn["marker"], "color": color or drawn["color"]}
    axes.plot(places, [value["mean"] for value in values], label=name, **drawn)
    if band and all(value["low"] is not None for value in values):
        low, high = ([value[end] for value in values] for end in ("low", "high"))
        axes.fill_between(places, low, high, color=drawn["color"], alpha=0.13, lw=0)


def _budget_axis(axes: Axes, budgets: Sequence[int]) -> None:
    shown = sorted(set(budgets))
    axes.set(xscale="log", xlabel="budget k, prefix tokens read")
    axes.set_xticks(shown, [str(k) for k in shown])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.6)


def _short(name: str) -> str:
    """A group's name for a panel; of a long file name what follows its first underscore, the title of a book."""
    stem = name.rpartition(".")[0] or name
    if len(stem) > _TITLE:
        stem = stem.partition("_")[2] or stem
    return stem if len(stem) <= _TITLE else f"{stem[: _TITLE - 1]}…"
