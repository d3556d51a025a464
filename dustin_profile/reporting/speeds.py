"""Which measured speed speaks for a report: a real one, of a pair whose quality is known, before all others."""

from __future__ import annotations

from dustin_profile.reporting.documents.run import Bench, BenchRow
from dustin_profile.reporting.points import OWN, Point
from dustin_profile.reporting.sources import Evidence, Source
from dustin_profile.reporting.titles import pair_of, pairs


def synthetic(data: Bench) -> list[str]:
    """What of a bench is not real."""
    return list(dict.fromkeys([*data.synthetic, *(word for row in data.rows for word in row.synthetic)]))


def ranked(evidence: Evidence) -> list[Source[Bench]]:
    """Real ones first, those of pairs whose quality is shown before others; else in the order given."""
    shown = pairs(evidence)
    return sorted(
        evidence.of(Bench), key=lambda source: (bool(synthetic(source.data)), pair_of(source.data) not in shown)
    )


def own_rows(data: Bench) -> list[BenchRow]:
    """Of the project's own method, with what they gain over vanilla."""
    return [row for row in data.rows if row.method == OWN and row.alpha and not row.rule]


def fastest(data: Bench) -> BenchRow | None:
    """The case that gains most over vanilla."""
    return max(own_rows(data), key=lambda row: row.alpha or 0, default=None)


def gains_at_equal_tau(data: Bench) -> list[tuple[float, float]]:
    """What the own method gains over vanilla, and would with classic SD's τ: each τ is of another text."""
    classic = {(row.batch, row.context): row.tau for row in data.rows if row.method == "sd"}
    return [
        (row.alpha, row.alpha * classic[row.batch, row.context] / row.tau)
        for row in own_rows(data)
        if row.alpha and (row.batch, row.context) in classic
    ]


def leading(points: list[Point], evidence: Evidence) -> list[Point]:
    """The same points, those first that a real speed stands beside: of its pair, at its budget before others."""
    measured = next((source.data for source in ranked(evidence) if not synthetic(source.data)), None)
    if not measured:
        return points
    pair, k = pair_of(measured), measured.selection.budget if measured.selection else None
    return sorted(points, key=lambda point: (point.pair != pair, point.pair == pair and point.budget != k))
