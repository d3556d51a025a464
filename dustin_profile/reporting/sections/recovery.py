"""Where the attention is lost: by the draft, by age of the history, by layer, by kind of document."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from dustin_profile.method_styles import style
from dustin_profile.reporting.blocks import Block, Cell, Content, Figure, Figures, Heading, Row, Table
from dustin_profile.reporting.charts import lines
from dustin_profile.reporting.documents.analysis import Recovery
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.titles import slug, titles
from dustin_profile.reporting.wording import cell, difference, estimate, plural

RULES = {
    "all-heads": "history of all heads",
    "history-layer": "history of the layer",
    "dustin-t": "Dustin-T",
}
LAYERS = ("oracle-by-layer", "oracle", "history-by-layer", "dustin", "streaming")
"""Policies drawn by layer: more lines would hide each other."""
LOOKAHEAD = ("oracle", "lookahead-top", "lookahead-top-all")
"""The bound, and the draft's attention alone: of the configured layers, and of all."""
ALL = "all documents"


def build(evidence: Evidence) -> Content | None:
    found = evidence.of(Recovery)
    blocks: list[Block] = []
    for number, (source, title) in enumerate(zip(found, titles(found), strict=True)):
        figures = _figures(source.data, slug(number, len(found)), title)
        if not figures and not source.data.splits:
            continue
        blocks.append(Heading(title))
        if figures:
            blocks.append(Figures(figures))
        if source.data.splits:
            blocks.append(_splits(source.data))
    if not blocks:
        return None
    return Content(
        "The draft's attention stands for the target's; what it misses is shaded. History ages: the further back the"
        " query that chose the tokens, the more of the attention it misses. One list serves all layers; the gap to a"
        " list per layer is what that costs. The best m differs between kinds of documents; choosing it anew in every"
        " window, with the truth at hand, bounds what a cleverer split could add.",
        blocks,
    )


def _figures(data: Recovery, suffix: str, title: str) -> list[Figure]:
    found = [_lookahead(data, suffix, title), _ages(data, suffix, title), _layers(data, suffix, title)]
    return [figure for figure in found if figure]


def _lookahead(data: Recovery, suffix: str, title: str) -> Figure | None:
    """What the draft alone recovers of what there is to recover (arXiv 2606.24957, Figures 3 and 11)."""
    found = {name: sorted((r for r in data.budgets if r.policy == name), key=lambda r: r.budget) for name in LOOKAHEAD}
    bound, drafted = found[LOOKAHEAD[0]], found[LOOKAHEAD[1]]
    budgets = [row.budget for row in bound]
    if len(budgets) < 2 or [row.budget for row in drafted] != budgets:
        return None
    k = data.selection.budget
    missed = [f" At k = {k} it misses {estimate(r.below_oracle)}." for r in drafted if r.budget == k and r.below_oracle]
    return Figure(
        f"recovery-lookahead{suffix}",
        "What the draft's lookahead alone recovers, nothing kept by rule, of what there is to recover."
        + "".join(missed),
        f"ARR of lookahead and of the oracle by budget: {title}",
        partial(
            lines,
            curves=[
                (style(name), [row.budget for row in rows], [row.arr.mean for row in rows])
                for name, rows in found.items()
                if rows
            ],
            xlabel="budget, tokens",
            ylabel="ARR",
            log_x=True,
            x_ticks=budgets,
            gap=(budgets, [row.arr.mean for row in drafted], [row.arr.mean for row in bound]),
        ),
        height=3.3,
    )


def _ages(data: Recovery, suffix: str, title: str) -> Figure | None:
    distances = data.distances or []
    budgets = sorted({row.budget for row in distances})
    if not budgets:
        return None
    k = data.selection.budget if data.selection.budget in budgets else budgets[-1]
    ages: dict[str, list[tuple[float, float]]] = {}
    for row in distances:
        if row.budget == k and row.below_oracle:
            ages.setdefault(row.rule, []).append((row.distance, row.below_oracle.mean))
    curves = [
        (
            replace(style(rule), label=RULES.get(rule, rule)),
            [x for x, _ in sorted(points)],
            [y for _, y in sorted(points)],
        )
        for rule, points in ages.items()
    ]
    return Figure(
        f"recovery-age{suffix}",
        f"ARR that history misses against the oracle by its age in tokens, k = {k}; lower is better.",
        f"Oracle's ARR minus that of history, by age: {title}",
        partial(
            lines,
            curves=curves,
            xlabel="age of the history, tokens",
            ylabel="oracle's ARR minus it",
            log_x=True,
            x_ticks=sorted({row.distance for row in distances}),
            from_zero=True,
        ),
        height=3.3,
    )


def _layers(data: Recovery, suffix: str, title: str) -> Figure | None:
    layers = data.layers or {}
    shown = [(name, layers[name]) for name in LAYERS if layers.get(name)]
    if not shown:
        return None
    return Figure(
        f"recovery-layers{suffix}",
        f"ARR by target layer, k = {data.selection.budget}.",
        f"ARR of each policy by target layer: {title}",
        partial(
            lines,
            curves=[
                (replace(style(name), marker=""), list(range(len(values))), [value.mean for value in values])
                for name, values in shown
            ],
            xlabel="target layer",
            ylabel="ARR",
        ),
        height=3.3,
    )


def _splits(data: Recovery) -> Table:
    header = ("documents", "Dustin", "minus Dustin-T", "minus Dustin-D", "best m", "best m per window adds")
    rows = []
    for group in data.splits:
        own, gains = group.arr.get("dustin"), group.minus_dustin
        per_window = gains.get("best_m_per_window")
        minus = [gains.get(name) for name in ("dustin-t", "dustin-d")]
        rows.append(
            Row(
                [
                    Cell(group.group, plural(group.documents, "document")),
                    cell(own) if own else Cell(""),
                    *(difference(gain.negated) if gain else Cell("") for gain in minus),
                    Cell(str(group.best_m)),
                    difference(per_window, judged=False) if per_window else Cell(""),
                ],
                strong=group.group == ALL,
            )
        )
    note = f"k = {data.selection.budget}, configured m = {data.selection.m}; {data.split} documents. Brackets: 95 %."
    return Table("The split of the budget by kind of document", header, rows, note)


SECTION = Section("recovery", "Attention taken apart", "dustin-profile eval arr RUN", build)
