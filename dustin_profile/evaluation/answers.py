"""Scores of answers as tables: cells for the terminal and for Markdown, and `results.md`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dustin_profile.evaluation.summary import REFERENCE
from dustin_profile.report import table, with_interval
from dustin_runtime.files import write_text

Results = Mapping[str, Any]
Entry = Mapping[str, Any]

MOST_ROWS = 60
"""Of groups; more are not read row by row, and become one table of means with a column per group."""
SCORES = {
    "found": "share of answers with more than half of the fact's words",
    "recalled": "share of the facts asked for that the answer names",
    "score": "LongBench's own metric of each task, a share of 1",
}


def score_of(results: Results) -> str:
    """The score that a task is judged by: its first."""
    return str(next(iter(results["entries"][0]["scores"])))


def groups(results: Results) -> list[dict[str, str]]:
    """Groups of items in their order, that of all items (empty) first; one group alone stands for all items."""
    found = list({tuple(entry["group"].items()): entry["group"] for entry in results["entries"]}.values())
    if len(found) == 2:
        found = [group for group in found if group]
    return sorted(found, key=bool)


def title(group: Mapping[str, str]) -> str:
    """`4096, 0.5`; `all`."""
    return ", ".join(group.values()) or "all"


def entries(results: Results, group: Mapping[str, str]) -> list[Entry]:
    """A group's, one per method and budget."""
    return [entry for entry in results["entries"] if entry["group"] == group]


def cells(entry: Entry, score: str) -> list[str]:
    """Method, k, items, score, difference from full verification, same text, tokens read, τ."""
    lost = entry[f"minus_{REFERENCE}"]
    return [
        entry["method"],
        str(entry["budget"] or ""),
        str(entry["items"]),
        with_interval(entry["scores"][score]),
        with_interval(lost[score], sign=True) if lost else "",
        "" if entry["same_text"] is None else str(entry["same_text"]),
        "" if entry["tokens_read"] is None else f"{entry['tokens_read']:.0f}",
        "" if entry["tau"] is None else f"{entry['tau']:.2f}",
    ]


def markdown(results: Results) -> str:
    """The result for people. Speed is not in it: items of a batch share the device with others' prompts."""
    score, inputs, provenance = score_of(results), results["inputs"], results["provenance"]
    pair = " with ".join(results["pair"][side]["id"] for side in ("target", "draft"))
    whole = next(entry for entry in results["entries"] if not entry["group"])
    names = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    lines = [
        f"# {results['task']}: {pair}",
        "",
        f"{whole['items']} items of {whole['scores'][score]['documents']} documents, {inputs['batch']} at a time,"
        f" greedy; depth {inputs['depth']}; {provenance['device']}, {inputs['dtype']}.",
        "",
        *_tables(results, score),
        "",
        f"{score}: {SCORES.get(score, 'the first score of the task')}.",
        f"minus {REFERENCE}: paired by item. same text: answers that are {REFERENCE}'s to the letter.",
        "Prefix tokens read and τ are means over all steps; τ is of each method's own text. Brackets: 95 %, over",
        "documents. Every score of every group, with its interval, is in results.json.",
    ]
    if averages := results.get("averages"):
        lines += ["", "## Averages over tasks", "", *_averages(averages)]
    return "\n".join([*lines, "", f"Versions: {names}."]) + "\n"


def write(folder: Path, results: Results) -> None:
    """Write `results.md`."""
    write_text(folder / "results.md", markdown(results))


def _tables(results: Results, score: str) -> list[str]:
    header = [
        "method",
        "k",
        "n",
        f"{score} (95 %)",
        f"minus {REFERENCE} (95 %)",
        "same text",
        "prefix tokens read",
        "τ",
    ]
    named = groups(results)
    of = {title(group): entries(results, group) for group in named}
    parts = [group for group in named if group]
    if len(named) == 1 or sum(len(entries(results, group)) for group in parts) <= MOST_ROWS:
        rows = [
            [name if place == 0 else "", *cells(entry, score)]
            for name, found in of.items()
            for place, entry in enumerate(found)
        ]
        return table(["items", *header], rows)
    return [
        *table(header, [cells(entry, score) for entry in entries(results, {})]),
        "",
        f"## {score} by {' and '.join(parts[0])}",
        "",
        *_by_group(results, parts, score),
    ]


def _by_group(results: Results, parts: Sequence[Mapping[str, str]], score: str) -> list[str]:
    """A row per method and budget, a column per group: means alone."""
    means = {
        (title(entry["group"]), entry["method"], entry["budget"]): f"{entry['scores'][score]['mean']:.3f}"
        for entry in results["entries"]
    }
    names = [title(group) for group in parts]
    methods = [(entry["method"], entry["budget"]) for entry in entries(results, {})]
    rows = [
        [method, str(budget or ""), *(means.get((name, method, budget), "") for name in names)]
        for method, budget in methods
    ]
    return table(["method", "k", *names], rows)


def _averages(averages: Sequence[Mapping[str, Any]]) -> list[str]:
    categories = list(dict.fromkeys(name for average in averages for name in average["categories"]))
    rows = [
        [
            average["method"],
            str(average["budget"] or ""),
            str(average["tasks"]),
            f"{average['plain']:.4f}",
            f"{average['weighted']:.4f}",
            *(f"{average['categories'][name]:.4f}" if name in average["categories"] else "" for name in categories),
        ]
        for average in averages
    ]
    return table(["method", "k", "tasks", "mean of tasks", "weighted by size", *categories], rows)
