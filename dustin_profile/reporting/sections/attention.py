"""The attention of one step alone: sparse with its estimation against the best full-cache kernel."""

from __future__ import annotations

from functools import partial

from dustin_profile.method_styles import style
from dustin_profile.reporting.blocks import Block, Bullets, Cell, Code, Content, Figure, Figures, Row, Table
from dustin_profile.reporting.charts import bars
from dustin_profile.reporting.documents.run import AttentionBench
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.titles import slug
from dustin_profile.reporting.wording import plain, times

HEADER = ("context × batch", "data", "best full cache, ms", "sparse, ms", "estimation, ms", "speed-up", "the paper's")


def build(evidence: Evidence) -> Content | None:
    found = evidence.of(AttentionBench)
    if not found:
        return None
    blocks: list[Block] = []
    for number, source in enumerate(found):
        data = source.data
        shape = data.settings
        rows = [
            Row(
                [
                    Cell(row.workload.replace("x", " × ")),
                    Cell(row.data, tone="bad" if row.data == "synthetic" else ""),
                    Cell(plain(row.best_full_ms, 1), row.best_full),
                    Cell(plain(row.sparse.ms, 2)),
                    Cell(plain(row.estimation_ms, 2)),
                    Cell(times(row.speedup), tone="strong"),
                    Cell(times(row.paper_speedup) if row.paper_speedup else "", tone="muted"),
                ]
            )
            for row in data.rows
        ]
        about = (
            f"{data.device}; {shape.layers} layers, {shape.query_heads} query and {shape.kv_heads} KV heads of"
            f" {shape.head_size}, {shape.dtype}, depth {shape.depth}, k = {shape.budget}; {data.timing}. Times are of"
            " attention, not of a whole step."
        )
        blocks.append(
            Table(f"Attention of one verification, {data.data} caches", HEADER, rows, about, frozenset({0, 1}), True)
        )
        bar = [
            (style("dustin"), row.workload.replace("x", " × "), row.speedup, times(row.speedup)) for row in data.rows
        ]
        figure = Figure(
            f"attention{slug(number, len(found))}",
            f"Full-cache attention over sparse attention with its estimation, k = {shape.budget}, {data.device}.",
            "Speed-up of attention by workload",
            partial(bars, rows=bar, xlabel="speed-up over the best full-cache kernel"),
            synthetic=[f"{data.data} caches"] if data.data == "synthetic" else (),
            height=1.0 + 0.36 * len(bar),
        )
        blocks.append(Figures([figure]))
        blocks.append(Bullets(data.notes))
        if data.command:
            blocks.append(Code(data.command))
    return Content(
        "How much of a step's attention time remains, against the fastest full-cache kernel on the same machine. The"
        " speed of decoding, in which the draft and the matrix products count too, is the section before.",
        blocks,
    )


SECTION = Section(
    "attention", "Attention alone", "dustin-run bench attention --workload 32Kx16 --json attention.json", build
)
