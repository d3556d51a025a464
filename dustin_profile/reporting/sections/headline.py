"""What a reader who stops after one screen should know: quality kept, time saved, at which budget."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

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
from dustin_profile.reporting.documents.run import Bench, BenchRow
from dustin_profile.reporting.methods import label, style
from dustin_profile.reporting.points import Point, known_points
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sections.bench import case_name, speed_figure
from dustin_profile.reporting.sections.headline_cards import answers, drift, fastest, quality, speed
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.titles import pair_of
from dustin_profile.reporting.wording import (
    cell,
    certain,
    difference,
    estimate,
    interval,
    listed,
    percent,
    plain,
    signed,
    times,
)
from dustin_runtime.config import DustinConfig

MOST = 6
"""Numbers that a reader takes in at once."""


def build(evidence: Evidence) -> Content | None:
    points = known_points(evidence)
    cards = [*quality(points), *answers(evidence), *drift(evidence), *speed(evidence)]
    if not cards:
        return None
    blocks: list[Block] = [Cards(cards[:MOST])]
    if said := [*_verdicts(points), *_speed_said(evidence, points), *_ready(evidence)]:
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


def _verdicts(points: Sequence[Point]) -> list[tuple[str, str]]:
    """A sentence per pair and budget that a config reads."""
    found = []
    for point in points:
        if not point.kept or not point.configured:
            continue
        text = f"Dustin keeps {estimate(point.kept)} of the attention"
        if point.of_oracle:
            text += f", {percent(point.of_oracle)} of what the best single list keeps"
        sure = {name: gain for name, gain in point.over.items() if certain(gain)}
        if gains := [f"{label(name)} ({signed(gain.mean)})" for name, gain in sure.items() if gain.mean > 0]:
            text += f"; more than {listed(gains)}"
        if worse := [label(name) for name, gain in sure.items() if gain.mean < 0 and not style(name).bound]:
            text += f"; less than {listed(worse)}"
        text += "."
        if unsure := [label(name) for name in point.over if name not in sure and not style(name).bound]:
            text += f" Its distance from {listed(unsure)} may be chance."
        found.append((f"{point.pair}, k = {point.budget}:", text))
    return found


def _speed_said(evidence: Evidence, points: Sequence[Point]) -> list[tuple[str, str]]:
    found = []
    for source in evidence.of(Bench):
        data = source.data
        best = fastest(data)
        if not best or not best.alpha:
            continue
        text = f"at {case_name((best.batch, best.context))} a token takes {percent(1 / best.alpha)} of vanilla's time"
        same = [row for row in data.rows if (row.batch, row.context) == (best.batch, best.context)]
        full = [f"{times(best.tokens_per_s / row.tokens_per_s)} {label(row.method)}" for row in same if _classic(row)]
        text += f" ({listed(full)})." if full else "."
        if best.synthetic:
            text += f" This is synthetic: {', '.join(best.synthetic)}. Times are real; τ, and so tokens/s, is assumed."
        if points and data.pair not in {point.pair for point in points}:
            text += " Quality was measured on other pairs."
        found.append((f"Speed, {data.pair} on {data.device}:", text))
    return found


def _ready(evidence: Evidence) -> list[tuple[str, str]]:
    """Which files can be deployed as they are."""
    found = [
        f"{source.name} ({pair_of(source.data)}, k = {source.data.selection.budget})"
        for source in evidence.of(DustinConfig)
    ]
    return [("To deploy:", f"dustin-run generate --config {' or '.join(found)}.")] if found else []


def _classic(row: BenchRow) -> bool:
    return row.method in ("sd", "magicdec")


def _table(points: Sequence[Point]) -> Table:
    header = [
        "budget",
        "of context",
        "ARR",
        "of the oracle's",
        "over StreamingLLM",
        "same choice",
        "KL, nats",
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
            Cell(percent(point.budget / point.context) if point.context else ""),
            arr,
            Cell(percent(point.of_oracle) if point.of_oracle else ""),
            difference(gain) if gain else Cell(""),
            cell(measured.agreement) if measured else Cell(""),
            cell(measured.kl) if measured else Cell(""),
            Cell(plain(point.drift) if point.drift is not None else ""),
        ]
        rows.append(Row(cells))
    note = (
        "ARR: share of the attention of retrieval heads on held-out documents; “all heads”: of all heads, on given"
        " texts. Same choice and KL: against full verification, on given texts. Empty: not measured."
    )
    return Table("What each budget keeps", header, rows, note, markdown=True).without_empty()


def headline_figures(evidence: Evidence) -> list[Figure]:
    """One picture of what is kept, one of what is saved; together they are the picture for a pull request."""
    figures = []
    configured = [point for point in known_points(evidence) if point.configured and point.arr]
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
    if benches := evidence.of(Bench):
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
