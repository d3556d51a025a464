"""What the rows of a run say: means with intervals over documents, and differences from full verification."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dustin_profile.evaluation.runner import Cell, Run
from dustin_profile.provenance import device_name, versions
from dustin_profile.statistics import interval, per_document
from dustin_runtime.files import write_json, write_with

RESULTS_VERSION = 1
REFERENCE = "vanilla"
"""The method that reads everything: differences are from it, on the same items."""

Row = Mapping[str, Any]


def summarise(run: Run) -> dict[str, Any]:
    """The results document of a run whose rows are complete: one entry per method, budget and group of items.

    The entry with an empty group is that of all items. A figure that no item of an entry has is None.
    """
    full = next((rows for cell, rows in run.rows.items() if cell.method == REFERENCE), None)
    entries = []
    for cell, rows in run.rows.items():
        for group in ({}, *_groups(rows)):
            chosen = [row for row in rows if group.items() <= row["group"].items()]
            wanted = {row["id"] for row in chosen}
            theirs = [row for row in full if row["id"] in wanted] if full and cell.method != REFERENCE else None
            entries.append(_entry(cell, group, chosen, theirs))
    return {
        "kind": "dustin-eval",
        "version": RESULTS_VERSION,
        "task": run.task.name,
        "pair": run.pair.identity().model_dump(),
        "inputs": run.inputs(),
        "entries": entries,
        "provenance": run.pair.provenance() | {"versions": versions(), "device": device_name(run.device)},
    }


def write_results(run: Run, results: dict[str, Any]) -> None:
    """Write `results.json` and, item by item, `rows.parquet` to the run's folder."""
    write_rows(run.folder / "rows.parquet", run.rows)
    write_json(run.folder / "results.json", results)


def write_rows(path: Path, rows: Mapping[Cell, Sequence[Row]]) -> None:
    """All rows in one table: groups and scores as columns of their own."""
    import pandas

    table = [
        {"method": cell.method, "budget": cell.budget}
        | {name: value for name, value in row.items() if name not in ("group", "scores")}
        | dict(row["group"])
        | {f"score_{name}": value for name, value in row["scores"].items()}
        for cell, found in rows.items()
        for row in found
    ]
    frame = pandas.DataFrame(table).astype({"budget": "Int64"})
    write_with(path, lambda temporary: frame.to_parquet(temporary, index=False))


def _groups(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The distinct groups of items in their order; none if all items are of one without a name."""
    found = {json.dumps(row["group"], sort_keys=True): dict(row["group"]) for row in rows}
    return [group for group in found.values() if group]


def _entry(cell: Cell, group: Mapping[str, str], rows: Sequence[Row], full: Sequence[Row] | None) -> dict[str, Any]:
    names = list(rows[0]["scores"])
    documents = [row["document"] for row in rows]
    return {
        "method": cell.method,
        "budget": cell.budget,
        "group": dict(group),
        "items": len(rows),
        "scores": {name: _mean([row["scores"][name] for row in rows], documents, (0.0, 1.0)) for name in names},
        f"minus_{REFERENCE}": {
            name: _mean(
                [row["scores"][name] - other["scores"][name] for row, other in zip(rows, full, strict=True)],
                documents,
                (-1.0, 1.0),
            )
            for name in names
        }
        if full
        else None,
        "same_text": sum(row["text"] == other["text"] for row, other in zip(rows, full, strict=True)) if full else None,
        "tau": _over_steps(rows, "tau"),
        "tokens_read": _over_steps(rows, "tokens_read"),
        "tokens_per_s": _plain([row["tokens_per_s"] for row in rows]),
        "prompt_tokens": _plain([row["prompt_tokens"] for row in rows]),
        "new_tokens": _plain([row["tokens"] for row in rows]),
    }


def _mean(values: Sequence[float], documents: Sequence[str], bounds: tuple[float, float]) -> dict[str, Any]:
    """Mean over items; its interval is over documents, cut at what a score can be."""
    found = interval(per_document(values, documents), seed=0)
    low, high = (None if end is None else min(max(end, bounds[0]), bounds[1]) for end in (found.low, found.high))
    return found._replace(low=low, high=high)._asdict()


def _over_steps(rows: Sequence[Row], name: str) -> float | None:
    """Mean over all steps of a figure that is a mean over each row's steps."""
    stepped = [row for row in rows if row["steps"]]
    steps = sum(row["steps"] for row in stepped)
    return sum(row[name] * row["steps"] for row in stepped) / steps if steps else None


def _plain(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
