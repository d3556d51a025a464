"""How far each policy's predictions are from full verification's, at each budget."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from dustin_profile.method_styles import label, style
from dustin_profile.reporting.blocks import Block, Cell, Content, Figure, Figures, Group, Heading, Row, Table
from dustin_profile.reporting.charts import Mark, intervals
from dustin_profile.reporting.documents.evaluation import Fidelity, FidelityCell
from dustin_profile.reporting.measured import compared
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sections.by_tokens_read import kl_figure
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.titles import slug, titles
from dustin_profile.reporting.wording import cell, count, plain, signed

HEADER = ("policy", "tokens read", "KL, nats", "same choice", "ARR", "loss minus full's", "perplexity")


def build(evidence: Evidence) -> Content | None:
    found = evidence.of(Fidelity)
    if not found:
        return None
    elsewhere = [one.name for known in compared(evidence) if known.given for one in known.given.sources]
    blocks: list[Block] = []
    for number, (source, title) in enumerate(zip(found, titles(found), strict=True)):
        blocks.append(Heading(title))
        blocks.append(Figures(_figures(source.data, slug(number, len(found)), title, source.name in elsewhere)))
        blocks.append(_table(source.data))
    return Content(
        "A given text is verified as if every draft were right, and each policy's predictions are compared with full"
        " verification's. KL is the divergence in nats per token, 0 for a method that changes nothing; same choice is"
        " how often the most likely token is the same. Tokens read are counted, not assumed: methods that round up to"
        " pages or keep generated tokens read more than their budget, and are shown with what they read."
        + (" KL by tokens read is drawn beside all else, under “Methods side by side”." if elsewhere else ""),
        blocks,
    )


def _table(data: Fidelity) -> Table:
    cells = data.cells
    rows: list[Row | Group] = []
    full = sum(document.full.read for document in data.documents) / len(data.documents)
    rows.append(
        Row(
            [
                Cell("full verification"),
                Cell(count(full)),
                *(Cell(text, tone="muted") for text in ("0", "1", "1", "0")),
                Cell(plain(data.full_perplexity, 2) if data.full_perplexity is not None else ""),
            ]
        )
    )
    for budget in sorted({budget for _, budget in cells}, reverse=True):
        rows.append(Group(f"k = {budget}"))
        at = {method: found for (method, k), found in cells.items() if k == budget}
        for method in sorted(at, key=lambda name: at[name].kl.mean):
            one = at[method]
            rows.append(
                Row(
                    [
                        Cell(label(method)),
                        read_cell(one.read, budget),
                        _kl(one),
                        cell(one.agreement),
                        cell(one.arr),
                        Cell(signed(one.loss_difference.mean)),
                        Cell(plain(one.perplexity, 2)),
                    ],
                    strong=style(method).own,
                )
            )
    tokens = sum(document.text_tokens for document in data.documents)
    where = ", ".join(part for part in (data.inputs.device or data.device, data.inputs.dtype) if part)
    note = (
        f"{len(data.documents)} documents, {tokens} tokens of text, {data.inputs.depth + 1} verified at a time;"
        f" {where}. Best KL first within a budget. Brackets: 95 % intervals over documents."
    )
    if medians := [one.windows for one in cells.values() if one.kl_median is not None and one.windows]:
        note += f" Median: over {count(max(medians))} windows, what is verified at a time being one."
    return Table("Fidelity by policy and budget", HEADER, rows, note, markdown=True)


def _kl(one: FidelityCell) -> Cell:
    """The mean, and below it the interval and the median of windows."""
    found = cell(one.kl, 4)
    if one.kl_median is None:
        return found
    return replace(found, sub=f"{found.sub} median {plain(one.kl_median, 4)}".strip())


def read_cell(read: float, budget: int) -> Cell:
    """What is read, and how much of it is more than the budget."""
    beyond = read - budget
    return Cell(count(read), f"{signed(beyond, 0)} over k", "bad") if beyond > 0.5 else Cell(count(read))


def _figures(data: Fidelity, suffix: str, title: str, elsewhere: bool) -> list[Figure]:
    cells = data.cells
    drawn = (
        None
        if elsewhere
        else kl_figure(
            ((method, one.read, one.kl.mean) for (method, _), one in cells.items()), f"fidelity-kl{suffix}", title
        )
    )
    figures = [drawn] if drawn else []
    budget = data.inputs.selection.budget
    budgets = {k for _, k in cells}
    budget = budget if budget in budgets else max(budgets, default=0)
    marks = [
        Mark(label(method), one.agreement, style(method))
        for (method, k), one in sorted(cells.items(), key=lambda item: -item[1].agreement.mean)
        if k == budget
    ]
    if marks:
        figures.append(
            Figure(
                f"fidelity-agreement{suffix}",
                f"How often a policy chooses the token that full verification would, k = {budget}.",
                f"Top-1 agreement of every policy with its interval: {title}",
                partial(intervals, marks=marks, xlabel="same choice as full verification"),
                height=max(0.95 + 0.3 * len(marks), 2.2),
            )
        )
    return figures


SECTION = Section("fidelity", "Fidelity to full verification", "dustin-profile eval fidelity", build)
