"""The semantic retrieval heads of both models."""

from __future__ import annotations

from functools import partial

from dustin_profile.reporting.blocks import Block, Cell, Content, Figure, Figures, Row, Table
from dustin_profile.reporting.charts import heatmap
from dustin_profile.reporting.documents.search import Heads, SearchResults
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sources import Evidence, Source
from dustin_profile.reporting.titles import slug
from dustin_profile.reporting.wording import model, percent, plain

USED = 4
"""Heads per layer."""


def build(evidence: Evidence) -> Content | None:
    scored = sorted(evidence.of(Heads), key=lambda source: (source.run, source.data.side != "target"))
    known: set[tuple[str, str]] = {(source.run, source.data.side) for source in scored}
    blocks: list[Block] = []
    figures = [_scores(source, _chosen(evidence, source), slug(n, len(scored))) for n, source in enumerate(scored)]
    figures += _ranks(evidence, known)
    if not figures:
        return None
    blocks.append(Figures(figures))
    if scored:
        blocks.append(_table(scored))
    return Content(
        "Retrieval heads look at the answer when a model repeats a fact from far back. Four per layer are asked; the"
        " triangles mark the layers that the search chose. Few dark cells beside many light ones mean that the choice"
        " matters; the agreement of disjoint halves of the needles says how stable it is.",
        blocks,
    )


def _chosen(evidence: Evidence, source: Source[Heads]) -> list[int]:
    """Layers that the searches of the same RUN chose for this side."""
    found: set[int] = set()
    for other in evidence.of(SearchResults):
        if other.run == source.run and source.is_run:
            found |= set(_layers(other.data, source.data.side))
    return sorted(found)


def _layers(data: SearchResults, side: str) -> list[int]:
    selection = data.selection
    return [selection.history.layer] if side == "target" else [entry.layer for entry in selection.lookahead]


def _scores(source: Source[Heads], chosen: list[int], suffix: str) -> Figure:
    data = source.data
    layers, heads = len(data.scores), len(data.scores[0])
    name = f"{data.side}: {model(data.inputs.model.id)}"
    return Figure(
        f"heads-{data.side}{suffix}",
        f"Attention of every query head on the answer, {name}; rings: the {USED} used in each layer.",
        f"Retrieval scores by layer and head, {name}",
        partial(
            heatmap,
            table=[[data.scores[layer][head] for layer in range(layers)] for head in range(heads)],
            xlabel="layer",
            ylabel="query head",
            bar_label="attention on the answer",
            marks=[(layer, head) for layer, order in enumerate(data.ranking) for head in order[:USED]],
            chosen=chosen,
        ),
        width=4.5 if layers <= 40 else 8.0,
        height=min(max(2.4, 1.2 + 0.14 * heads), 7.0),
    )


def _ranks(evidence: Evidence, known: set[tuple[str, str]]) -> list[Figure]:
    """Where only the results of a search are given: which heads it used, without their scores."""
    found: dict[str, Figure] = {}
    for source in evidence.of(SearchResults):
        data = source.data
        for side, role, shape in (
            ("target", "history", data.pair.target),
            ("draft", "lookahead", data.pair.draft),
        ):
            ranking = data.heads.get(role, {})
            title = f"{side}: {model(shape.id)}"
            usable = shape.query_heads and ranking and max(ranking) < shape.layers
            if (source.run, side) in known or title in found or not usable:
                continue
            table = [[0.0] * shape.layers for _ in range(shape.query_heads)]
            for layer, order in ranking.items():
                for place, head in enumerate(order[:USED]):
                    table[head][layer] = float(USED - place)
            found[title] = Figure(
                f"heads-used-{len(found) + 1}",
                f"The {USED} heads used in each layer, the first of a layer darkest, {title}. Their scores are in the"
                " run directory, which was not given.",
                f"Heads used by layer, {title}",
                partial(
                    heatmap,
                    table=table,
                    xlabel="layer",
                    ylabel="query head",
                    bar_label="",
                    chosen=_layers(data, side),
                ),
                height=min(max(2.4, 1.2 + 0.14 * shape.query_heads), 7.0),
            )
    return list(found.values())


def _table(scored: list[Source[Heads]]) -> Table:
    rows = []
    for source in scored:
        data = source.data
        stable = data.stability
        best = max(max(layer) for layer in data.scores)
        rows.append(
            Row(
                [
                    Cell(model(data.inputs.model.id), f"{data.side}, {source.run}"),
                    Cell(f"{data.accepted} of {data.samples}"),
                    Cell(plain(best)),
                    Cell(percent(stable.top4_overlap) if stable else "unknown"),
                    Cell(plain(stable.kendall_tau, 2) if stable else ""),
                ]
            )
        )
    header = ("model", "needles retrieved", "best score", "same top four in both halves", "Kendall's τ")
    return Table("Retrieval heads", header, rows)


SECTION = Section("heads", "Retrieval heads", "dustin-profile srh", build)
