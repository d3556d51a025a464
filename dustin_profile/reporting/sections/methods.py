"""Every method of a pair at every budget in one table, a column for each thing that was measured of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dustin_profile.method_styles import label, style
from dustin_profile.reporting.blocks import Block, Cell, Content, Figure, Figures, Group, Heading, Row, Table
from dustin_profile.reporting.measured import Measured, Method, compared
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sections.by_tokens_read import kl_figure, score_figure
from dustin_profile.reporting.sections.methods_columns import Column, columns
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.titles import slug
from dustin_profile.reporting.wording import count, listed, plural
from dustin_runtime.method_names import METHODS

DRAWN = ("needle", "longbench")
"""Tasks whose scores are drawn by tokens read."""


def build(evidence: Evidence) -> Content | None:
    found = compared(evidence)
    if not found:
        return None
    blocks: list[Block] = []
    for number, known in enumerate(found):
        blocks.append(Heading(known.pair))
        blocks.append(_table(known))
        if figures := _figures(known, slug(number, len(found))):
            blocks.append(Figures(figures))
    return Content(
        "All that was measured of each method, side by side; how, and with which intervals, is said in the sections"
        " below. Bold: within a budget the best method, and those next to it that 95 % intervals do not tell from it"
        " (intervals of differences paired by document where there are some). Where there is no interval, nothing is"
        " bold. Methods of one budget may differ in what they read: the pictures compare them at equal tokens read.",
        blocks,
    )


def _table(known: Measured) -> Table:
    found = [column for column in columns(known) if column.cells]
    leading = _leading(found)
    rows: list[Row | Group] = []
    budgets = sorted({k for _, k in known.methods if k is not None}, reverse=True)
    for budget in (None, *budgets):
        methods = [method for method in known.methods if method[1] == budget]
        if not methods:
            continue
        rows.append(Group("reads everything" if budget is None else f"k = {budget}"))
        marks = [set() if budget is None else column.marked(methods) for column in found]
        cost = leading.cost if leading and budget is not None else {}
        for method in sorted(methods, key=lambda one: (cost.get(one, math.inf), _listed(one))):
            cells = [
                _bold(column.cells.get(method, Cell("")), method in marked)
                for column, marked in zip(found, marks, strict=True)
            ]
            rows.append(Row([_name(method), *cells], strong=style(method[0]).own))
    return Table(
        "Methods side by side",
        ["method", *(column.header for column in found)],
        rows,
        _note(known, leading),
        markdown=True,
        compact=(0, *(place for place, column in enumerate(found, 1) if column.compact)),
        repeated=True,
    )


def _name(method: Method) -> Cell:
    return Cell(label(method[0]), "(bound)" if style(method[0]).bound else "")


def _bold(cell: Cell, marked: bool) -> Cell:
    return replace(cell, tone="strong") if marked else cell


def _listed(method: Method) -> int:
    """Place in the list of methods; those not in it come last."""
    return METHODS.index(method[0]) if method[0] in METHODS else len(METHODS)


def _leading(found: Sequence[Column]) -> Column | None:
    """What rows are ordered by: KL on given texts, else the first figure that is better high or low."""
    return next((column for column in found if column.cost), None)


def _note(known: Measured, leading: Column | None) -> str:
    parts = []
    if leading:
        parts.append(f"Within a budget the best {leading.header} comes first, a method without it last.")
    parts.append("Bold: the best one there, and those that no 95 % interval tells from it; nothing without intervals.")
    if given := known.given:
        texts = [document.prompt_tokens + document.text_tokens for document in given.data.documents]
        parts.append(
            "KL, same choice and ARR: against full verification, on"
            f" {plural(len(texts), 'given text')} of up to {count(max(texts))} tokens."
        )
    if known.tasks:
        items = listed([f"{task.title.partition(',')[0]} {plural(task.items, 'item')}" for task in known.tasks])
        parts.append(
            f"Scores: {items}; small beside them the difference from vanilla, paired by item, where its interval leaves"
            " out zero."
        )
        if any(score.own is None for task in known.tasks for score in task.scores.values()):
            parts.append("Tasks of unequal size: the average counts each once, the difference each item.")
    if known.books:
        prompts = max(entry.items for entry in known.books.entries.values())
        parts.append(f"{known.books.name}: {plural(prompts, 'prompt')}; perplexity is of the books' own text.")
    if drifts := known.drifts:
        parts.append(
            f"Drift: {plural(drifts.texts, 'text')} of {count(drifts.tokens)} generated tokens after prompts of"
            f" {count(drifts.context)}."
        )
    if one := known.acceptance:
        length = f", texts of {count(one.tokens)} tokens: the longest that were generated" if one.tokens else ""
        parts.append(
            f"τ: of {one.of}{length}. It is of each method's own text, and so is tokens/s: a text that repeats itself"
            " is easy to draft."
        )
    if any(style(name).bound for name, _ in known.methods):
        parts.append("A bound knows the answer and serves nothing; it is no candidate for the best.")
    if known.left_out:
        parts.append(f"Left out, since on other texts or another device: {listed(list(known.left_out))}.")
    if known.again:
        parts.append(
            f"Of a method and budget that several files have, the first is shown: also in {listed(list(known.again))}."
        )
    parts.append("Empty: not measured.")
    return " ".join(parts)


def _figures(known: Measured, suffix: str) -> list[Figure]:
    found: list[Figure | None] = []
    if known.given:
        cells = [(method, cell.read, cell.kl.mean) for (method, _), cell in known.given.cells.items()]
        found.append(kl_figure(cells, f"methods-kl{suffix}", known.pair))
    found += [
        score_figure(task, f"methods-{task.name}{suffix}", known.pair) for task in known.tasks if task.name in DRAWN
    ]
    return [figure for figure in found if figure]


SECTION = Section("methods", "Methods side by side", "", build)
