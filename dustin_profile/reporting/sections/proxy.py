"""Whether ARR, which the search maximises, goes with what matters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from dustin_profile.method_styles import AMBER, BLUE, GREEN, INK, ORANGE, PINK, SKY, Style, style
from dustin_profile.reporting.blocks import Block, Cell, Content, Figure, Figures, Row, Table
from dustin_profile.reporting.charts import scatter
from dustin_profile.reporting.documents.common import Estimate
from dustin_profile.reporting.documents.evaluation import Fidelity, Subsets
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sources import Evidence, Source
from dustin_profile.reporting.titles import slug, titles
from dustin_profile.reporting.wording import NBSP, cell, count, estimate, plain, plural, signed

CLEAR = -0.8
"""Rank correlation from which on ARR may stand for KL (the paper finds -0.81 and -0.95)."""
ALL = "all"
SIZES = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (PINK, "D"), (AMBER, "v"), (SKY, "P"), (INK, "X"))
HEADER = ("subsets", "drawn", "ARR", "KL, nats", "Pearson", "Spearman", "Pearson of log KL")


def build(evidence: Evidence) -> Content | None:
    policies = [source for source in evidence.of(Fidelity) if any(one.cells for one in source.data.documents)]
    sampled = evidence.of(Subsets)
    if not policies and not sampled:
        return None
    said = ["The search maximises ARR because it can be computed offline. Whether that is what counts shows here:"]
    figures, tables = [], []
    for number, (source, title) in enumerate(zip(policies, titles(policies), strict=True)):
        said.append(_said(source, title, len(policies) > 1))
        figures.append(_figure(source.data, f"proxy{slug(number, len(policies))}", title))
    for number, (subsets, title) in enumerate(zip(sampled, titles(sampled), strict=True)):
        said.append(_sampled(subsets.data, title, len(sampled) > 1))
        figures.append(_subsets_figure(subsets.data, f"proxy-subsets{slug(number, len(sampled))}", title))
        tables.append(_table(subsets.data, title))
    blocks: Sequence[Block] = [Figures(figures), *tables]
    return Content(" ".join(said), blocks)


def _said(source: Source[Fidelity], title: str, several: bool) -> str:
    value = source.data.correlation
    where = f"for {title}, " if several else ""
    if value is None:
        return f"{where}one of the two does not vary, so no correlation can be given."
    verdict = "the more attention a policy keeps, the closer its predictions" if value <= CLEAR else "they part here"
    return f"{where}the rank correlation of ARR and KL over documents and policies is {signed(value)}: {verdict}."


def _sampled(data: Subsets, title: str, several: bool) -> str:
    """What subsets that no policy chose say."""
    where = f" of {title}" if several else ""
    found = data.summary.get(ALL)
    if not found or not found.spearman or not found.pearson:
        return f"Over the sampled subsets{where} one of the two does not vary."
    ranks = found.spearman
    clear = ranks.mean <= CLEAR and (ranks.high is None or ranks.high < 0)
    verdict = "of two subsets of one text, the one that keeps more attention predicts better as a rule"
    text = (
        f"Over {count(found.subsets)} sampled subsets{where}, which no policy chose, the two correlate within a"
        f" document with {estimate(found.pearson, 2, sign=True)}, by ranks with {estimate(ranks, 2, sign=True)}:"
        f" {verdict if clear else 'they part within a text'}."
    )
    pooled = found.pooled
    end = found.pearson.mean if found.pearson.high is None else found.pearson.high
    if pooled.pearson is not None and pooled.spearman is not None and pooled.pearson > end:
        text += (
            f" Over all documents together these are {signed(pooled.pearson, 2)} and {signed(pooled.spearman, 2)}:"
            " texts differ in what the same ARR costs."
        )
    return text


def _figure(data: Fidelity, name: str, title: str) -> Figure:
    groups: dict[str, tuple[list[float], list[float]]] = {}
    for document in data.documents:
        for cell_name, measured in document.cells.items():
            x, y = groups.setdefault(cell_name.rpartition("-k")[0], ([], []))
            x.append(measured.arr)
            y.append(measured.kl)
    return Figure(
        name,
        f"ARR against KL, a point per document, policy and budget: {title}.",
        f"Scatter of ARR and KL: {title}",
        partial(
            scatter,
            groups=[(style(method), x, y) for method, (x, y) in groups.items()],
            xlabel="ARR",
            ylabel="KL(full ‖ policy), nats",
        ),
        height=4.2,
    )


def _subsets_figure(data: Subsets, name: str, title: str) -> Figure:
    groups: dict[int, tuple[list[float], list[float]]] = {}
    for document in data.documents:
        for one in document.subsets:
            x, y = groups.setdefault(one.budget, ([], []))
            x.append(one.arr)
            y.append(one.kl)
    return Figure(
        name,
        f"The same of sampled subsets, a point each, free of any policy: {title}.",
        f"Scatter of ARR and KL of sampled subsets by their size: {title}",
        partial(
            scatter,
            groups=[
                (Style(f"k = {size}", *SIZES[place % len(SIZES)]), *groups[size])
                for place, size in enumerate(sorted(groups))
            ],
            xlabel="ARR",
            ylabel="KL(full ‖ subset), nats",
        ),
        height=4.2,
    )


def _table(data: Subsets, title: str) -> Table:
    rows = []
    for size, found in data.summary.items():
        reach = [f"{plain(low)}{NBSP}to{NBSP}{plain(high)}" for low, high in (found.arr, found.kl)]
        within = (found.pearson, found.spearman, found.pearson_log)
        name = "all sizes" if size == ALL else f"k = {size}"
        rows.append(Row([Cell(name), Cell(count(found.subsets)), *map(Cell, reach), *map(_correlation, within)]))
    if every := data.summary.get(ALL):
        together = (every.pooled.pearson, every.pooled.spearman, every.pooled.pearson_log)
        shown = [Cell("" if value is None else signed(value), tone="muted") for value in together]
        rows.append(Row([Cell("all, documents together"), Cell(count(every.subsets)), Cell(""), Cell(""), *shown]))
    tokens = sum(document.text_tokens for document in data.documents)
    note = (
        f"{plural(len(data.documents), 'document')}, {tokens} tokens of text; {data.inputs.device},"
        f" {data.inputs.dtype}. A subset is one list for all heads and layers; its tokens are drawn evenly, or more or"
        " less by the attention that the text pays them. Correlations are taken within each document; brackets: 95 %"
        " over documents."
    )
    return Table(f"ARR with KL over sampled subsets: {title}", HEADER, rows, note, markdown=True)


def _correlation(value: Estimate | None) -> Cell:
    return cell(value, 3, sign=True) if value else Cell("")


SECTION = Section(
    "proxy",
    "Is ARR the right thing to maximise?",
    "dustin-profile eval fidelity, and eval subsets",
    build,
)
