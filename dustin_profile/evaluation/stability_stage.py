"""Stability as files: one results document, its rows, a table and a figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dustin_profile import plots
from dustin_profile.evaluation.stability import FIGURES, SIDES, analyse, read_scores
from dustin_profile.provenance import versions
from dustin_profile.report import table, with_interval
from dustin_runtime.errors import UsageError
from dustin_runtime.files import write_json, write_text, write_with

VERSION = 1
HEADER = ["model", "ranking from", "beside", "top four in both (95 %)", "Kendall's tau (95 %)"]
_COLOURS = {"target": plots.ACCENT, "draft": "#1d4ed8"}


def run(folder: Path, runs: Sequence[Path], draws: int) -> dict[str, Any]:
    """Compare, and write `results.json`, `results.md`, `results.png` and `rows.parquet`.

    Raises:
        ConflictError: runs are of different models.
        MissingError: scores are absent, unfinished or damaged.
        NothingMeasuredError: a run retrieved nothing.
        UsageError: a run is given twice.
    """
    labels = [path.resolve().name for path in runs]
    if len(set(labels)) < len(labels):
        raise UsageError("RUN: two run directories have one name; the results tell them apart by it")
    sides = {}
    for side in SIDES:
        scores = [read_scores(path, side, label) for path, label in zip(runs, labels, strict=True)]
        sides[side] = analyse(scores, draws) | {"inputs": scores[0].inputs}
    result = {
        "kind": "dustin-stability",
        "version": VERSION,
        "runs": labels,
        "draws": draws,
        **sides,
        "provenance": {"versions": versions()},
    }
    _write_rows(folder / "rows.parquet", result)
    draw(folder / "results.png", result)
    write_text(folder / "results.md", markdown(result))
    write_json(folder / "results.json", result)
    return result


def comparisons(result: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Every comparison as side, what the first ranking is from, what the second, and the entry."""
    for side in SIDES:
        found = result[side]
        for entry in found["sizes"]:
            rest = found["needles"] - entry["needles"]
            yield side, _of_size(entry), f"the other {rest}", entry
        for name in ("length", "depth"):
            for entry in found[f"{name}s"]:
                yield side, f"{name} {entry['first']}", f"{name} {entry['second']}", entry
        for entry in found["runs"]:
            yield side, entry["first"], f"{entry['second']}: {_differs(entry)}", entry


def _of_size(entry: Mapping[str, Any]) -> str:
    named = (f"{entry[name]} {name if entry[name] != 1 else name.removesuffix('s')}" for name in ("needles", "prompts"))
    return "{} ({})".format(*named)


def _differs(entry: Mapping[str, Any]) -> str:
    named = [f"{key} {before} → {now}" for key, (before, now) in entry["differs"].items() if not key.endswith("sha256")]
    contents = [key.removesuffix("_sha256") for key in entry["differs"] if key.endswith("sha256")]
    return (
        "; ".join([*named, *(f"other {name}" for name in contents if name not in entry["differs"])]) or "a repetition"
    )


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """The table, for terminal and Markdown."""
    return [
        [side, first, second, *(with_interval(entry[name]) for name in FIGURES)]
        for side, first, second, entry in comparisons(result)
    ]


def markdown(result: Mapping[str, Any]) -> str:
    """The result for people."""
    about = [
        f"* {side}: {found['model']}, mode {found['mode']}, {found['prompts']} accepted prompts of {found['needles']}"
        f" needles; {found['layers']} layers of {found['heads']} heads, so rankings that have nothing in common share"
        f" {found['chance_overlap']:.2f} of their top fours."
        for side, found in ((side, result[side]) for side in SIDES)
    ]
    names = ", ".join(f"{name} {version}" for name, version in result["provenance"]["versions"].items())
    lines = [
        "# Stability of retrieval heads",
        "",
        *about,
        "",
        *table(HEADER, rows(result)),
        "",
        f"Needles: the mean over {result['draws']} random subsets beside the needles left out; the brackets hold 95 %",
        "of draws. Lengths, depths and runs: brackets are jackknife intervals over needles. Both figures are of each",
        "layer, then means over layers.",
        "",
        "![stability](results.png)",
        "",
        f"Versions: {names}.",
    ]
    return "\n".join(lines) + "\n"


def draw(path: Path, result: Mapping[str, Any]) -> None:
    """By calibration size; by layer from half the needles; between lengths, depths and runs."""
    figure = plots.blank(12.5, 4.4)
    by_size, by_layer, by_part = figure.subplots(1, 3, width_ratios=(1, 1.2, 1.3))
    shown = [entry for entry in comparisons(result) if "draws" not in entry[3]]
    names = list(dict.fromkeys(_name(first, second) for _, first, second, _ in shown))
    for offset, side in enumerate(SIDES):
        found, color = result[side], _COLOURS[side]
        places = [entry["needles"] for entry in found["sizes"]]
        for name, style in zip(FIGURES, ("-", "--"), strict=True):
            values = [entry[name] for entry in found["sizes"]]
            label = f"{side}, {'top four' if name == FIGURES[0] else 'tau'}"
            by_size.plot(places, [v["mean"] for v in values], style, color=color, marker="o", ms=3, label=label)
            low, high = ([value[end] for value in values] for end in ("low", "high"))
            by_size.fill_between(places, low, high, color=color, alpha=0.1, lw=0)
        if found["sizes"]:
            by_layer.plot(found["sizes"][-1]["per_layer"], color=color, lw=1.3, marker="o", ms=3, label=side)
        for line in (by_size.axhline, by_layer.axhline, by_part.axvline):
            line(found["chance_overlap"], color=color, lw=0.9, ls=":", label=f"{side}, top four by chance")
        for _, first, second, entry in (one for one in shown if one[0] == side):
            at, value = names.index(_name(first, second)) + 0.16 * (offset - 0.5) * 2, entry[FIGURES[0]]
            by_part.plot([value["mean"]], [at], "o", color=color, ms=4)
            if value["low"] is not None:
                by_part.plot([value["low"], value["high"]], [at, at], color=color, lw=1.2)
    by_size.set(xlabel="needles, beside those left out", ylabel="agreement", ylim=(None, 1.02))
    by_size.xaxis.get_major_locator().set_params(integer=True)
    by_layer.set(xlabel="layer, from half the needles", ylabel="top four in both", ylim=(None, 1.02))
    by_part.set_yticks(range(len(names)), names, fontsize=7.5)
    by_part.set(xlabel="top four in both", ylim=(len(names) - 0.4, -0.6))
    for axes in (by_size, by_layer, by_part):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, lw=0.6)
    handles = by_size.get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=6, fontsize=8, frameon=False)
    plots.save(figure, path)


def _name(first: str, second: str) -> str:
    """Short, for the axis: two lengths, two depths or two runs."""
    second = second.split(":")[0]
    kind, _, value = second.partition(" ")
    text = f"{first} / {value}" if first.startswith(f"{kind} ") else f"{first} / {second}"
    return text if len(text) <= 42 else text[:41] + "…"


def _write_rows(path: Path, result: Mapping[str, Any]) -> None:
    """A row per comparison and layer."""
    import pandas

    frame = pandas.DataFrame(
        [
            {"side": side, "first": first, "second": second, "layer": layer, "top4_overlap": share}
            for side, first, second, entry in comparisons(result)
            for layer, share in enumerate(entry["per_layer"])
        ]
    )
    write_with(path, lambda temporary: frame.to_parquet(temporary, index=False))
