"""How much the ranking of heads depends on what it was measured with."""

from __future__ import annotations

from functools import partial

from dustin_profile.method_styles import BLUE, GREY, ORANGE, Style
from dustin_profile.reporting.blocks import Block, Cell, Content, Figure, Figures, Group, Row, Table
from dustin_profile.reporting.charts import lines
from dustin_profile.reporting.documents.analysis import Agreement, Rankings, Stabilities
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.titles import slug
from dustin_profile.reporting.wording import cell, plain, plural

COLOURS = {"target": Style("target", BLUE, "o", own=True), "draft": Style("draft", ORANGE, "s", "--")}


def build(evidence: Evidence) -> Content | None:
    found = evidence.of(Stabilities)
    blocks: list[Block] = []
    for number, source in enumerate(found):
        curves = [
            (COLOURS[name], [size.needles for size in side.sizes], [size.top4_overlap.mean for size in side.sizes])
            for name, side in source.data.sides
            if len(side.sizes) > 1
        ]
        if curves:
            chance = max(side.chance_overlap for _, side in source.data.sides)
            reach = [curves[0][1][0], curves[0][1][-1]]
            curves.append((Style("chance", GREY, "", ":", bound=True), reach, [chance, chance]))
            figure = Figure(
                f"stability{slug(number, len(found))}",
                "Share of each layer's top four heads that rankings from disjoint sets of needles agree on, by the"
                " number of needles.",
                "Agreement of head rankings by number of needles",
                partial(lines, curves=curves, xlabel="needles", ylabel="same top four"),
                height=2.9,
            )
            blocks.append(Figures([figure]))
        blocks.append(_table(source.data))
    if not blocks:
        return None
    return Content(
        "Heads are ranked by what they look at in one set of needle prompts. The closer rankings from other needles,"
        " lengths, depths and texts come to each other, the less the config depends on that choice.",
        blocks,
    )


def _table(data: Stabilities) -> Table:
    rows: list[Row | Group] = []
    for name, side in data.sides:
        about = f"{plural(side.prompts, 'prompt')} of {plural(side.needles, 'needle')}"
        rows.append(Group(f"{name}: {side.model}, {about}; chance {plain(side.chance_overlap, 2)}"))
        rows += [_row(*entry) for entry in _compared(side)]
    header = ("rankings from", "same top four", "Kendall's τ")
    note = "Means over layers; brackets: 95 % of draws for needles, intervals over needles for the others."
    return Table("Agreement of head rankings", header, rows, note)


def _compared(side: Rankings) -> list[tuple[str, Agreement]]:
    found: list[tuple[str, Agreement]] = [(f"{plural(size.needles, 'needle')} and others", size) for size in side.sizes]
    for what, pairs in (("length", side.lengths), ("depth", side.depths), ("run", side.runs)):
        found += [(f"{what} {pair.first} and {pair.second}", pair) for pair in pairs]
    return found


def _row(name: str, value: Agreement) -> Row:
    return Row([Cell(name), cell(value.top4_overlap, 2), cell(value.kendall_tau, 2)])


SECTION = Section("stability", "Stability of the heads", "dustin-profile eval stability RUN", build)
