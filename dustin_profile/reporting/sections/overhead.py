"""What choosing the tokens costs, by context."""

from __future__ import annotations

from functools import partial

from dustin_profile.method_styles import INK, ORANGE, Style, label, style
from dustin_profile.reporting.blocks import Block, Cell, Content, Figure, Figures, Group, Row, Table
from dustin_profile.reporting.charts import lines
from dustin_profile.reporting.documents.analysis import Overhead
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.titles import pair_of, slug
from dustin_profile.reporting.wording import count, percent, plain, plural

FULL = Style("full attention", INK, "s", "--")


def build(evidence: Evidence) -> Content | None:
    found = evidence.of(Overhead)
    blocks: list[Block] = []
    for number, source in enumerate(found):
        if len(source.data.rows) > 1:
            blocks.append(Figures([_figure(source.data, f"overhead{slug(number, len(found))}")]))
        blocks.append(_table(source.data))
    if not blocks:
        return None
    return Content(
        "Choosing tokens costs time too. An estimator's time is that of one step, scores and choice together, beside"
        " the time of full attention over all layers. It pays while both together with sparse attention stay below"
        " full attention.",
        blocks,
    )


def _figure(data: Overhead, name: str) -> Figure:
    contexts = [float(row.context) for row in data.rows]
    curves = [(FULL, contexts, [row.full.min_ms for row in data.rows])]
    for estimator in data.rows[0].estimators:
        if all(estimator in row.estimators for row in data.rows):
            drawn = style(estimator)
            curves.append((drawn, contexts, [row.estimators[estimator].min_ms for row in data.rows]))
    sparse = Style("sparse attention", ORANGE, ">", "-.")
    curves.append((sparse, contexts, [row.sparse.min_ms for row in data.rows]))
    return Figure(
        name,
        f"Time of a step's estimation by context, beside attention itself: {pair_of(data)}, {data.inputs.device}."
        + (" Synthetic caches." if data.data == "synthetic" else ""),
        f"Milliseconds by context, a line per estimator: {pair_of(data)}",
        partial(
            lines,
            curves=curves,
            xlabel="tokens of context",
            ylabel="ms per step",
            log_x=True,
            log_y=True,
            x_ticks=contexts,
        ),
        synthetic=[f"{data.data} caches"] if data.data == "synthetic" else (),
        height=3.9,
    )


def _table(data: Overhead) -> Table:
    rows: list[Row | Group] = []
    mark = Cell("synthetic", tone="bad") if data.data == "synthetic" else Cell("real")
    for row in data.rows:
        rows.append(Group(f"{count(row.context)} tokens: full attention {plain(row.full.min_ms, 2)} ms"))
        for name, found in row.estimators.items():
            cells = [
                Cell(label(name)),
                Cell(plain(found.min_ms, 2)),
                Cell(percent(found.of_full)),
                Cell(percent(found.of_sparse_step)),
                mark,
            ]
            rows.append(Row(cells, strong=style(name).own))
    inputs = data.inputs
    note = (
        f"{inputs.device}, {inputs.dtype}, {plural(inputs.batch, 'row')}, depth {inputs.depth},"
        f" k = {inputs.selection.budget}; {data.timing}; the fastest of the repeats."
    )
    header = ("estimator", "ms", "of full attention", "of a sparse step", "data")
    return Table(f"Cost of choosing: {pair_of(data)}", header, rows, note, frozenset({0, 4}))


SECTION = Section("overhead", "Cost of choosing", "dustin-profile eval overhead RUN", build)
