"""What the stages of profiling take on one device."""

from __future__ import annotations

from dustin_profile.reporting.blocks import Block, Cell, Code, Content, Row, Table
from dustin_profile.reporting.documents.run import ProfileTimes, StageTime
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.wording import count, plain

HEADER = ("stage", "shapes of", "data", "work", "seconds")


def build(evidence: Evidence) -> Content | None:
    found = evidence.of(ProfileTimes)
    if not found:
        return None
    blocks: list[Block] = []
    for source in found:
        data = source.data
        kind = "synthetic" if data.synthetic else "real"
        rows = [
            Row(
                [
                    Cell(row.part),
                    Cell(row.pair),
                    Cell(kind, tone="bad" if data.synthetic else ""),
                    Cell(_work(row)),
                    Cell(plain(row.seconds, 1), tone="strong"),
                ]
            )
            for row in data.rows
        ]
        about = f"{data.device}, {data.dtype}."
        if data.synthetic:
            about += f" Synthetic: {', '.join(data.synthetic)}; continuations and answers never end early."
        blocks.append(Table("Time of profiling by stage", HEADER, rows, about, frozenset({0, 1, 2, 3}), True))
        if data.command:
            blocks.append(Code(data.command))
    return Content(
        "Everything that a stage does on its prompts and documents, files included; loading weights and tokenizing are"
        " left out.",
        blocks,
    )


def _work(row: StageTime) -> str:
    if row.part == "srh":
        answers = "answers generated" if row.mode == "generate" else "answers forced"
        return f"{row.side}: {count(row.prompts)} prompts of up to {count(row.longest)} tokens, {answers}"
    if row.part == "trace":
        return (
            f"{count(row.documents)} documents of {count(row.context)} tokens and {count(row.continuation)} more,"
            f" {row.windows} windows each"
        )
    return f"the traces of {count(row.documents)} documents, k = {row.budget}"


SECTION = Section("profiling", "Time of profiling", "python tools/bench_profile.py --json profile-time.json", build)
