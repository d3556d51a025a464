"""What traces cannot see: whether errors build up while text is generated."""

from __future__ import annotations

from functools import partial

from dustin_profile.method_styles import label, style
from dustin_profile.reporting.blocks import Block, Cell, Content, Figure, Figures, Group, Heading, Row, Table
from dustin_profile.reporting.charts import lines
from dustin_profile.reporting.documents.evaluation import Drift, DriftCell
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.titles import slug, titles
from dustin_profile.reporting.wording import cell, count, plain, plural

HEADER = ("method", "mean KL, nats", "first tokens", "last tokens", "same choice", "τ", "tokens read", "repeated")


def build(evidence: Evidence) -> Content | None:
    found = evidence.of(Drift)
    if not found:
        return None
    blocks: list[Block] = []
    for number, (source, title) in enumerate(zip(found, titles(found), strict=True)):
        blocks.append(Heading(title))
        blocks.append(Figures([_figure(source.data, slug(number, len(found)), title)]))
        blocks.append(_table(source.data))
    return Content(
        "While text is generated, the keys of accepted tokens come from sparse passes, so errors could build up. They"
        " do where the last tokens are further from full verification than the first. Texts of small models turn"
        " repetitive, which every method predicts well: a fall is no improvement of the method. Repeated is the share"
        " of a text's sequences of four tokens that it had before.",
        blocks,
    )


def _table(data: Drift) -> Table:
    rows: list[Row | Group] = []
    full = data.at(None)
    for budget in [*([None] if full else []), *data.budgets]:
        rows.append(Group("full verification" if budget is None else f"k = {budget}"))
        rows += [_row(one) for one in data.at(budget)]
    return Table("Drift", HEADER, rows, _note(data), markdown=True).without_empty()


def _row(one: DriftCell) -> Row:
    first, last = one.by_tokens[0], one.by_tokens[-1]
    return Row(
        [
            Cell(label(one.method)),
            cell(one.kl),
            Cell(plain(first.kl), f"to {count(first.tokens)}"),
            Cell(plain(last.kl), f"to {count(last.tokens)}", "bad" if round(last.kl, 3) > round(first.kl, 3) else ""),
            cell(one.agreement),
            Cell("" if one.tau is None else plain(one.tau, 2)),
            Cell("" if one.read is None else count(one.read)),
            Cell("" if one.repeated is None else plain(one.repeated, 2)),
        ],
        strong=style(one.method).own,
    )


def _note(data: Drift) -> str:
    inputs = data.inputs
    parts = [
        f"{plural(len(data.documents), 'prompt')} of {count(inputs.context)} tokens, {count(inputs.tokens)} generated"
        " behind each",
        f"{inputs.batch} at a time" if inputs.batch else "",
        "" if inputs.temperature is None else f"temperature {inputs.temperature:g}" if inputs.temperature else "greedy",
    ]
    where = ", ".join(part for part in (inputs.device, inputs.dtype) if part)
    said = ", ".join(part for part in parts if part) + (f"; {where}" if where else "")
    return f"{said}. Best KL first within a budget. Brackets: 95 % intervals over documents."


def _figure(data: Drift, suffix: str, title: str) -> Figure:
    """What verifies in full beside one budget: more would not be told apart."""
    budget = data.budget
    shown = [*data.at(None), *(data.at(budget) if budget else [])]
    what = f"{title}, k = {budget}" if budget and f"k = {budget}" not in title else title
    return Figure(
        f"drift{suffix}",
        f"KL against full verification as generation goes on: {what}.",
        f"KL by tokens generated, a line per method: {what}",
        partial(
            lines,
            curves=[
                (style(one.method), [b.tokens for b in one.by_tokens], [b.kl for b in one.by_tokens]) for one in shown
            ],
            xlabel="tokens generated",
            ylabel="KL(full ‖ method), nats",
            from_zero=True,
        ),
        height=max(3.2, 1.2 + 0.17 * len(shown)),
    )


SECTION = Section("drift", "Drift while generating", "dustin-profile drift RUN", build)
