"""Free-running generation: tokens per step, acceptance, and how often the text is vanilla's."""

from __future__ import annotations

from collections.abc import Mapping

from dustin_profile.method_styles import label, style
from dustin_profile.reporting.blocks import Cell, Content, Group, Row, Table
from dustin_profile.reporting.documents.run import Generated, Generation, GenerationSummary
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.wording import count, percent, plain

HEADER = ("method", "τ", "accepted at 1, 2, …", "prefix tokens read", "texts equal", "tokens equal")


def build(evidence: Evidence) -> Content | None:
    rows: list[Row | Group] = []
    for summary in evidence.of(GenerationSummary):
        data = summary.data
        where = ", ".join(part for part in (data.device, data.dtype) if part)
        rows.append(
            Group(
                f"{summary.name}: {data.prompts} prompts of {count(data.prompt_tokens)} tokens,"
                f" {data.new_tokens} generated{'; ' + where if where else ''}"
            )
        )
        rows += _rows(data.methods)
    for single in evidence.of(Generation):
        one = single.data
        name = one.method + (f", k={one.budget}" if one.budget else "")
        rows.append(Group(single.name))
        rows += _rows({name: Generated(statistics=one.statistics, compare=one.compare)})
    if not rows:
        return None
    return Content(
        "τ is how many tokens a step emits. Full verification's text is vanilla's, token for token (up to rounding of"
        " close calls); texts of sparse methods part at their first close call and stay apart, so equal tokens say"
        " little beyond that. A higher τ alone is no merit: repetition is easy to draft.",
        [Table("Generation", HEADER, rows, text_columns=frozenset({0, 2}), markdown=True)],
    )


def _rows(methods: Mapping[str, Generated]) -> list[Row]:
    rows = []
    for name, found in methods.items():
        method, comma, rest = name.partition(",")
        figures, compared = found.statistics, found.compare
        rows.append(
            Row(
                [
                    Cell(label(method) + comma + rest.replace("k=", "k = ").replace(">=", "≥")),
                    Cell(plain(figures.tau, 2)),
                    Cell(" ".join(f"{share:.2f}" for share in figures.acceptance_per_position)),
                    Cell(count(figures.kept_tokens_per_step)),
                    Cell(f"{compared.equal_rows} of {compared.rows}" if compared else ""),
                    Cell(percent(compared.equal_tokens) if compared else ""),
                ],
                strong=style(method).own,
            )
        )
    return rows


SECTION = Section(
    "generation", "Tokens per step", "dustin-run generate --config RUN --compare vanilla --json > generate.json", build
)
