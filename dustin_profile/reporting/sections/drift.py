"""What traces cannot see: whether errors build up while text is generated."""

from __future__ import annotations

from functools import partial

from dustin_profile.method_styles import label, style
from dustin_profile.reporting.blocks import Cell, Content, Figure, Figures, Group, Row, Table
from dustin_profile.reporting.charts import lines
from dustin_profile.reporting.documents.evaluation import Drift
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sources import Evidence, Source
from dustin_profile.reporting.titles import pair_of, slug
from dustin_profile.reporting.wording import count, plain

HEADER = ("method", "mean KL, nats", "first tokens", "last tokens", "same choice")


def build(evidence: Evidence) -> Content | None:
    found = evidence.of(Drift)
    if not found:
        return None
    rows: list[Row | Group] = []
    figures = []
    for number, source in enumerate(found):
        title = _title(source)
        rows.append(Group(title))
        for name, method in source.data.methods.items():
            first, last = method.by_tokens[0], method.by_tokens[-1]
            agreed = sum(bucket.agreement for bucket in method.by_tokens) / len(method.by_tokens)
            rows.append(
                Row(
                    [
                        Cell(label(name)),
                        Cell(plain(method.mean_kl)),
                        Cell(plain(first.kl), f"to {count(first.tokens)}"),
                        Cell(plain(last.kl), f"to {count(last.tokens)}", "bad" if last.kl > first.kl else ""),
                        Cell(plain(agreed)),
                    ],
                    strong=style(name).own,
                )
            )
        curves = [
            (style(name), [b.tokens for b in method.by_tokens], [b.kl for b in method.by_tokens])
            for name, method in source.data.methods.items()
        ]
        figures.append(
            Figure(
                f"drift{slug(number, len(found))}",
                f"KL against full verification as generation goes on: {title}.",
                f"KL by tokens generated, a line per method: {title}",
                partial(
                    lines, curves=curves, xlabel="tokens generated", ylabel="KL(full ‖ method), nats", from_zero=True
                ),
                height=3.2,
            )
        )
    return Content(
        "While text is generated, the keys of accepted tokens come from sparse passes, so errors could build up. They"
        " do where the last tokens are further from full verification than the first. Texts of small models turn"
        " repetitive, which every method predicts well: a fall is no improvement of the method.",
        [Table("Drift", HEADER, rows, markdown=True), Figures(figures)],
    )


def _title(source: Source[Drift]) -> str:
    data = source.data
    texts = max((len(method.documents) for method in data.methods.values()), default=0)
    parts = [pair_of(data) or source.name]
    if data.selection:
        parts.append(f"k = {data.selection.budget}")
    return ", ".join([*parts, f"{texts} prompts of {count(data.context)} tokens"])


SECTION = Section("drift", "Drift while generating", "dustin-profile drift RUN --json > drift.json", build)
