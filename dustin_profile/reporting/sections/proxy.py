"""Whether ARR, which the search maximises, goes with what matters."""

from __future__ import annotations

from functools import partial

from dustin_profile.reporting.blocks import Content, Figure, Figures
from dustin_profile.reporting.charts import scatter
from dustin_profile.reporting.documents.evaluation import Fidelity
from dustin_profile.reporting.methods import style
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sources import Evidence, Source
from dustin_profile.reporting.titles import slug, titles
from dustin_profile.reporting.wording import signed

CLEAR = -0.8
"""Rank correlation from which on ARR may stand for KL (the paper finds -0.81 and -0.95)."""


def build(evidence: Evidence) -> Content | None:
    found = [source for source in evidence.of(Fidelity) if any(document.cells for document in source.data.documents)]
    if not found:
        return None
    names = titles(found)
    return Content(
        " ".join(
            ["The search maximises ARR because it can be computed offline. Whether that is what counts shows here:"]
            + [_said(source, title, len(found) > 1) for source, title in zip(found, names, strict=True)]
        ),
        [
            Figures(
                [
                    _figure(source.data, f"proxy{slug(number, len(found))}", title)
                    for number, (source, title) in enumerate(zip(found, names, strict=True))
                ]
            )
        ],
    )


def _said(source: Source[Fidelity], title: str, several: bool) -> str:
    value = source.data.correlation
    where = f"for {title}, " if several else ""
    if value is None:
        return f"{where}one of the two does not vary, so no correlation can be given."
    verdict = "the more attention a policy keeps, the closer its predictions" if value <= CLEAR else "they part here"
    return f"{where}the rank correlation of ARR and KL over documents and policies is {signed(value)}: {verdict}."


def _figure(data: Fidelity, name: str, title: str) -> Figure:
    groups: dict[str, tuple[list[float], list[float]]] = {}
    for document in data.documents:
        for cell, measured in document.cells.items():
            x, y = groups.setdefault(cell.rpartition("-k")[0], ([], []))
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


SECTION = Section("proxy", "Is ARR the right thing to maximise?", "dustin-profile eval fidelity", build)
