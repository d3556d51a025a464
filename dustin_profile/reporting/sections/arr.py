"""How much of the target's attention each policy keeps, with intervals, and the paired differences."""

from __future__ import annotations

from functools import partial

from dustin_profile.method_styles import label, style
from dustin_profile.reporting.blocks import Block, Cell, Content, Figure, Figures, Heading, Row, Table
from dustin_profile.reporting.charts import Mark, intervals
from dustin_profile.reporting.documents.search import SearchResults
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.titles import slug, titles
from dustin_profile.reporting.wording import cell, count, difference, plain, plural

HEADER = ("policy", "ARR", "Dustin minus it", "prefix ARR", "ARR, search documents")


def build(evidence: Evidence) -> Content | None:
    found = [source for source in evidence.of(SearchResults) if source.data.policies]
    if not found:
        return None
    blocks: list[Block] = []
    for number, (source, title) in enumerate(zip(found, titles(found), strict=True)):
        blocks.append(Heading(title))
        blocks.append(_table(source.data))
        blocks.append(Figures(_figures(source.data, slug(number, len(found)), title)))
    return Content(
        "ARR is the share of full verification's attention that lies on the tokens which verification reads, the new"
        " ones included; prefix ARR leaves those out. It is measured on documents that the search has not seen, unless"
        " the table says otherwise. The oracle knows the answer and bounds every policy with one list for all heads;"
        " the differences are paired by document. Brackets are 95 % intervals over documents.",
        blocks,
    )


def _table(data: SearchResults) -> Table:
    rows = []
    for name, policy in data.policies.items():
        own = name == "hybrid"
        gain = data.hybrid_minus.get(name)
        rows.append(
            Row(
                [
                    Cell(label(name)),
                    cell(policy.arr),
                    difference(gain, judged=not style(name).bound) if gain else Cell(""),
                    Cell(plain(policy.prefix_arr.mean)),
                    Cell(plain(policy.in_sample_arr), tone="muted"),
                ],
                strong=own,
            )
        )
    return Table("Attention recovered by policy", HEADER, rows, _about(data), markdown=True)


def _about(data: SearchResults) -> str:
    reported = data.documents.reported.values()
    where = "held-out" if data.split == "held_out" else "the same"
    interval = data.policies["hybrid"].arr.method if "hybrid" in data.policies else ""
    method = {"t": "Student's t over documents", "bootstrap": "bootstrap over documents"}.get(interval, "none")
    return (
        f"{len(reported)} {where} documents of {plural(len({entry.source for entry in reported}), 'source')},"
        f" {sum(entry.windows for entry in reported)} verification windows, {count(data.traces.context)} tokens each,"
        f" depth {data.depth}, {data.traces.dtype}. Intervals: {method}. A difference whose interval holds 0 may be"
        " chance."
    )


def _figures(data: SearchResults, suffix: str, title: str) -> list[Figure]:
    marks = [Mark(label(name), policy.arr, style(name)) for name, policy in data.policies.items()]
    gains = [Mark(label(name), gain, style(name)) for name, gain in data.hybrid_minus.items()]
    height = 0.95 + 0.34 * len(marks)
    figures = [
        Figure(
            f"arr{suffix}",
            f"Attention recovered by policy, k = {data.selection.budget}, with 95 % intervals over documents.",
            f"ARR of every policy with its interval: {title}",
            partial(intervals, marks=marks, xlabel="ARR"),
            height=height,
        ),
    ]
    if gains:
        figures.append(
            Figure(
                f"arr-paired{suffix}",
                "Dustin minus each policy on the same documents. Intervals that reach the line at zero may be chance.",
                f"Paired differences of ARR with their intervals: {title}",
                partial(intervals, marks=gains, xlabel="Dustin's ARR minus the policy's", zero=True),
                height=height,
            )
        )
    return figures


SECTION = Section("arr", "Attention recovered", "dustin-profile search", build)
