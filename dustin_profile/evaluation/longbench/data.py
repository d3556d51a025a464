"""LongBench's rows, from its own JSONL files, parquet files, or the hub's copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from dustin_profile.documents import HUB_ID, hub_rows, parquet_rows
from dustin_profile.evaluation.longbench.metrics import PARAGRAPH
from dustin_profile.evaluation.longbench.table import TaskEntry, find_task, load_table
from dustin_profile.texts import column, read_rows
from dustin_runtime.errors import MissingError


class Row(NamedTuple):
    """One sample of one task."""

    number: int
    """Counted from 1 as in its file; its name within its task."""
    context: str
    input: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]
    """All classes of a classification task."""


Numbered = Iterator[tuple[int, dict[str, Any]]]


def load_rows(
    spec: str, names: Sequence[str] = (), *, limit: int | None = None, offline: bool = False
) -> dict[str, list[Row]]:
    """Read the rows of tasks, in the table's order.

    Args:
        spec: a folder of `TASK.jsonl` or `TASK.parquet`, one such file (its column `dataset` names the task of a row,
            else its own name does), or a data set of the hub with a part per task: `THUDM/LongBench[@revision]`.
        names: tasks to read; all that are there if none is given.
        limit: the most rows per task, from the front.

    Raises:
        MissingError: a file, task or column is absent, or a value is not as expected; names file, line and column.
        UsageError: a task is unknown.
    """
    for name in names:
        find_task(name, "--task")
    path = Path(spec)
    if path.is_dir():
        found = _folder(path, names, limit)
    elif path.is_file():
        found = _file(path, names, limit)
    elif match := HUB_ID.fullmatch(spec):
        name, split, revision = match["name"], match["split"] or "test", match["revision"]
        parts = {
            task: hub_rows(f"{spec}, {task}", name, split, revision, offline, task) for task in names or load_table()
        }
        found = {task: _rows(rows, task, f"{spec}, {task}", limit) for task, rows in parts.items()}
    else:
        raise MissingError(f"--data {spec}: no such file or folder, and not a data set (organisation/name[@revision])")
    return {task: found[task] for task in load_table() if task in found}


def _folder(folder: Path, names: Sequence[str], limit: int | None) -> dict[str, list[Row]]:
    found = {}
    for task in names or load_table():
        files = [path for suffix in ("jsonl", "parquet") if (path := folder / f"{task}.{suffix}").is_file()]
        if files:
            found[task] = _rows(_numbered(files[0]), task, str(files[0]), limit)
        elif names:
            raise MissingError(f"--data {folder}: has no {task}.jsonl; put LongBench's file there")
    if not found:
        raise MissingError(f"--data {folder}: has no file of a task, such as {next(iter(load_table()))}.jsonl")
    return found


def _file(path: Path, names: Sequence[str], limit: int | None) -> dict[str, list[Row]]:
    """A file may hold several tasks; without `names` a row of a task that is not known is an error."""
    found: dict[str, list[Row]] = {}
    for number, row in _numbered(path):
        place = f"{path}:{number}"
        task = column(row, "dataset", place) if "dataset" in row else path.stem
        if names and task not in names:
            continue
        entry = find_task(task, f"{place}: dataset")
        rows = found.setdefault(task, [])
        if limit is None or len(rows) < limit:
            rows.append(_row(number, row, entry, place))
    if absent := [name for name in names if name not in found]:
        raise MissingError(f"--data {path}: has no row of {absent[0]}")
    return found


def _numbered(path: Path) -> Numbered:
    return parquet_rows(path) if path.suffix == ".parquet" else read_rows(path)


def _rows(rows: Iterable[tuple[int, dict[str, Any]]], task: str, place: str, limit: int | None) -> list[Row]:
    entry = load_table()[task]
    found = [_row(number, row, entry, f"{place}:{number}") for number, row in islice(rows, limit)]
    if not found:
        raise MissingError(f"{place}: is empty; give a file with rows")
    return found


def _row(number: int, row: Mapping[str, Any], entry: TaskEntry, place: str) -> Row:
    row = dict(row)
    answers = _texts(row, "answers", place)
    if not answers:
        raise MissingError(f"{place}: column answers is empty; a row needs at least one reference")
    classes = _texts(row, "all_classes", place) if entry.metric == "classification" else ()
    if entry.metric == "classification" and not classes:
        raise MissingError(f"{place}: column all_classes is empty; this task is scored with it")
    if entry.metric == "retrieval" and (wrong := [text for text in answers if not PARAGRAPH.search(text)]):
        raise MissingError(f"{place}: column answers: '{wrong[0][:40]}' names no paragraph, as in 'Paragraph 7'")
    return Row(number, column(row, "context", place), column(row, "input", place), answers, classes)


def _texts(row: dict[str, Any], name: str, place: str) -> tuple[str, ...]:
    if name not in row:
        raise MissingError(f"{place}: no column {name} (there are: {', '.join(row)})")
    value = row[name]
    if value is None:
        return ()
    value = value.tolist() if hasattr(value, "tolist") else value  # parquet's lists are arrays
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise MissingError(f"{place}: column {name} holds {type(value).__name__}, a list of texts expected")
    return tuple(value)
