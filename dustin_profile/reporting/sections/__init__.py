"""The sections of a report in reading order. A new one is one module and one line here."""

from __future__ import annotations

from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sections import (
    arr,
    attention,
    bench,
    books,
    budget,
    config,
    drift,
    evaluation,
    fidelity,
    generation,
    headline,
    heads,
    limits,
    methods,
    needle_grid,
    overhead,
    profiling,
    provenance,
    proxy,
    recovery,
    stability,
    studies,
)

SECTIONS: tuple[Section, ...] = (
    headline.SECTION,
    methods.SECTION,
    config.SECTION,
    arr.SECTION,
    budget.SECTION,
    recovery.SECTION,
    fidelity.SECTION,
    proxy.SECTION,
    studies.SECTION,
    drift.SECTION,
    books.SECTION,
    evaluation.SECTION,
    needle_grid.SECTION,
    generation.SECTION,
    bench.SECTION,
    attention.SECTION,
    overhead.SECTION,
    heads.SECTION,
    stability.SECTION,
    profiling.SECTION,
    limits.SECTION,
    provenance.SECTION,
)
