"""What a reader who stops after one screen should know: quality kept, time saved, at which budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from dustin_profile.method_styles import label, style
from dustin_profile.reporting.blocks import (
    Block,
    Bullets,
    Cards,
    Cell,
    Content,
    Figure,
    Figures,
    Group,
    Row,
    Table,
)
from dustin_profile.reporting.charts import Mark, intervals
from dustin_profile.reporting.documents.evaluation import Fidelity
from dustin_profile.reporting.measured import Score
from dustin_profile.reporting.points import Point, known_points
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sections.bench import speed_figure
from dustin_profile.reporting.sections.headline_budget import budgets, named, ready
from dustin_profile.reporting.sections.headline_cards import answers, drift, quality, speed
from dustin_profile.reporting.sections.headline_words import speed_said, verdicts
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.speeds import leading, ranked
from dustin_profile.reporting.titles import pair_of
from dustin_profile.reporting.wording import (
    cell,
    count,
    difference,
    interval,
    listed,
    percent,
    plain,
    signed,
)

MOST = 6
"""Numbers that a reader takes in at once."""


def build(evidence: Evidence) -> Content | None:
    points = known_points(evidence)
    fast = speed(evidence)
    cards = [
        *quality(leading(points, evidence)),
        *drift(evidence),
        *fast[:1],
        *answers(evidence, named(points)),
        *fast[1:],
    ]
    if not cards:
        return None
    blocks: list[Block] = [Cards(cards[:MOST])]
    if said := [*verdicts(points), *speed_said(evidence, points), *budgets(points), *ready(points, evidence)]:
        blocks.append(Bullets([text for _, text in said], [lead for lead, _ in said]))
    if points:
        blocks.append(_table(points))
    if figures := headline_figures(evidence):
        blocks.append(Figures(figures))
    return Content(
        "Sparse verification reads a small, freshly chosen part of the KV cache instead of all of it. What it costs is"
        " how far predictions move; what it saves is the time to read the rest.",
        blocks,
    )


def _table(points: Sequence[Point]) -> Table:
    tasks = list(dict.fromkeys(title for point in points for title in point.scores))
    header = [
        "budget",
        "of context",
        "ARR",
        "of the oracle's",
        "over StreamingLLM",
        "same choice",
        "KL, nats",
        *tasks,
        "drift, nats",
    ]
    rows: list[Row | Group] = []
    for place, point in enumerate(points):
        if place == 0 or points[place - 1].pair != point.pair:
            rows.append(Group(point.pair))
        measured, kept, gain = point.fidelity, point.kept, point.over.get("streaming")
        if kept:
            arr = cell(kept)
        elif measured:
            arr = Cell(plain(measured.arr.mean), f"all heads {interval(measured.arr)}".strip(), "muted")
        else:
            arr = Cell("")
        cells = [
            Cell(f"k = {point.budget}"),
            Cell(percent(point.budget / point.context), f"of {count(point.context)}") if point.context else Cell(""),
            arr,
            Cell(percent(point.of_oracle) if point.of_oracle else ""),
            difference(gain) if gain else Cell(""),
            cell(measured.agreement) if measured else Cell(""),
            cell(measured.kl) if measured else Cell(""),
            *(_answers(point.scores.get(title)) for title in tasks),
            Cell(plain(point.drift) if point.drift is not None else ""),
        ]
        rows.append(Row(cells))
    note = (
        "ARR: share of the attention of retrieval heads on held-out documents, of the context that stands before it;"
        " “all heads”: of all heads, on given texts."
        + _texts("Same choice and KL: against full verification, on given texts of", points, lambda point: point.texts)
        + ("" if not tasks else " Below a score: its difference from vanilla's, paired by item.")
        + _texts("Drift: of texts generated behind prompts of", points, lambda point: point.generated_from)
        + " Empty: not measured."
    )
    return Table("What each budget keeps", header, rows, note, markdown=True).without_empty()


def _texts(said: str, points: Sequence[Point], tokens: Callable[[Point], int | None]) -> str:
    """A sentence on how long the texts of a figure are; with the pairs where these differ."""
    found = {(point.pair, length) for point in points if (length := tokens(point))}
    if not found:
        return ""
    several = len({length for _, length in found}) > 1
    lengths = dict.fromkeys(f"{count(length)} tokens" + (f" ({pair})" if several else "") for pair, length in found)
    return f" {said} {listed(sorted(lengths))}."


def _answers(score: Score | None) -> Cell:
    if not score:
        return Cell("")
    minus = score.minus
    if not minus:
        return Cell(plain(score.value))
    worse = minus.high is not None and minus.high < 0
    return Cell(plain(score.value), f"{signed(minus.mean)} {interval(minus, sign=True)}", "bad" if worse else "")


def headline_figures(evidence: Evidence) -> list[Figure]:
    """One picture of what is kept, one of what is saved; together they are the picture for a pull request."""
    figures = []
    configured = [point for point in leading(known_points(evidence), evidence) if point.configured and point.arr]
    if configured:
        point = configured[0]
        marks = [Mark(label(name), arr, style(name)) for name, arr in point.arr.items()]
        figures.append(_kept(marks, "Attention kept", "attention kept (ARR)", point.budget, point.pair))
    elif fidelities := evidence.of(Fidelity):
        found = fidelities[0].data
        k = max((budget for _, budget in found.cells), default=0)
        marks = [Mark(label(m), one.agreement, style(m)) for (m, budget), one in found.cells.items() if budget == k]
        if marks:
            figures.append(_kept(marks, "Choices kept", "same choice as full verification", k, pair_of(found) or ""))
    if benches := ranked(evidence):
        figures.append(speed_figure(benches[0].data, "headline-speed"))
    return figures


def _kept(marks: Sequence[Mark], named: str, what: str, k: int, pair: str) -> Figure:
    return Figure(
        "headline-kept",
        f"{named} at k = {k}, with 95 % intervals: {pair}.",
        f"{named} by policy: {pair}",
        partial(intervals, marks=marks, xlabel=f"{what}, k = {k}"),
        title=pair.replace(" with ", "\nwith ", 1),
        height=max(0.95 + 0.34 * len(marks), 2.6),
    )


SECTION = Section("summary", "In short", "", build)
