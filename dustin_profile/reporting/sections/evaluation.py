"""Scores of what methods generate: LongBench, needles, recall and any other task of `dustin-profile eval`."""

from __future__ import annotations

from functools import partial

from dustin_profile.method_styles import label, style
from dustin_profile.reporting.blocks import Block, Cell, Content, Figure, Figures, Group, Heading, Row, Table
from dustin_profile.reporting.charts import Mark, intervals
from dustin_profile.reporting.documents.evaluation import Evaluation
from dustin_profile.reporting.documents.evaluation import Row as Entry
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sections.needle_grid import is_grid
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.titles import pair_of
from dustin_profile.reporting.wording import cell, count, difference, plain

HEADER = ("method", "score", "minus vanilla", "items", "same text", "tokens read", "τ")
"""No speed: items of a batch share the device with others' prompts. It is measured by `eval pg19` and the bench."""
MARKDOWN_ROWS = 40
"""More belong on the page alone."""
SCORES = {"found": "facts found", "recalled": "facts recalled", "score": "score"}


def build(evidence: Evidence) -> Content | None:
    found = [source for source in evidence.of(Evaluation) if not source.data.of_books]
    if not found:
        return None
    blocks: list[Block] = []
    for number, source in enumerate(found):
        data = source.data
        narrow = data.inputs.draft_cache != "full"
        title = f"{data.task}: {pair_of(data)}{', draft reads k tokens' if narrow else ''}"
        blocks.append(Heading(title))
        lost = _lost(data)
        if lost:
            name = SCORES.get(_score(data), _score(data))
            figure = Figure(
                f"eval-{number + 1}",
                f"{data.task}, all items: each method minus vanilla, on the same items.",
                f"Paired differences of {name} from vanilla: {title}",
                partial(intervals, marks=lost, xlabel=f"{name}, minus vanilla's", zero=True),
                height=0.95 + 0.34 * len(lost),
            )
            blocks.append(Figures([figure]))
        blocks.append(_table(data))
        if data.averages:
            blocks.append(_averages(data))
    return Content(
        "Every method answers the same items. Differences from vanilla, which verifies in full and drafts nothing, are"
        " paired by item; intervals (95 %) are over documents, since items of one document resemble each other. Same"
        " text counts answers that are vanilla's to the letter.",
        blocks,
    )


def _score(data: Evaluation) -> str:
    """The score that a task is judged by: its first."""
    return next(iter(data.entries[0].scores))


def _name(entry: Entry) -> str:
    return label(entry.method) + (f", k = {entry.budget}" if entry.budget else "")


def _lost(data: Evaluation) -> list[Mark]:
    score = _score(data)
    return [
        Mark(_name(entry), entry.minus_vanilla[score], style(entry.method))
        for entry in data.entries
        if not entry.group and entry.minus_vanilla and score in entry.minus_vanilla
    ]


def groups(data: Evaluation) -> list[dict[str, str]]:
    """Groups of items in their order, all items first; all items alone where that is the one group, or a grid."""
    found = {tuple(entry.group.items()): entry.group for entry in data.entries}
    if () in found and (len(found) == 2 or all(is_grid(group) for group in found.values() if group)):
        return [{}]
    return sorted(found.values(), key=len)


def _table(data: Evaluation) -> Table:
    score = _score(data)
    rows: list[Row | Group] = []
    for group in groups(data):
        rows.append(Group(", ".join(f"{name} {value}" for name, value in group.items()) or "all items"))
        rows += [_row(entry, score) for entry in data.entries if entry.group == group]
    header = [SCORES.get(score, score) if name == "score" else name for name in HEADER]
    where = ", ".join(part for part in (data.inputs.device, data.inputs.dtype) if part)
    note = f"Measured on {where}." if where else ""
    short = not data.averages and len(rows) <= MARKDOWN_ROWS
    return Table("Scores by group of items and method", header, rows, note, markdown=short)


def _row(entry: Entry, score: str) -> Row:
    minus = (entry.minus_vanilla or {}).get(score)
    cells = [
        Cell(label(entry.method), f"k = {entry.budget}" if entry.budget else ""),
        cell(entry.scores[score]) if score in entry.scores else Cell(""),
        difference(minus) if minus else Cell(""),
        Cell(count(entry.items)),
        Cell("" if entry.same_text is None else f"{entry.same_text}"),
        Cell("" if entry.tokens_read is None else count(entry.tokens_read)),
        Cell("" if entry.tau is None else plain(entry.tau, 2)),
    ]
    return Row(cells, strong=style(entry.method).own)


def _averages(data: Evaluation) -> Table:
    categories = list(dict.fromkeys(name for average in data.averages for name in average.categories))
    rows = [
        Row(
            [
                Cell(label(average.method)),
                Cell(str(average.budget or "")),
                Cell(str(average.tasks)),
                Cell(plain(average.plain)),
                Cell(plain(average.weighted)),
                *(Cell(plain(average.categories[name]) if name in average.categories else "") for name in categories),
            ],
            strong=style(average.method).own,
        )
        for average in data.averages
    ]
    header = ("method", "k", "tasks", "mean of tasks", "weighted by size", *categories)
    return Table("Averages over tasks", header, rows, markdown=True)


SECTION = Section("eval", "Answers: LongBench, needles, recall", "dustin-profile eval longbench|needle|recall", build)
