"""What is known of each pair at each budget, whichever files say it."""

from __future__ import annotations

from dataclasses import dataclass

from dustin_profile.reporting.documents.evaluation import Drift, Fidelity, FidelityCell
from dustin_profile.reporting.documents.search import SearchResults
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.titles import pair_of

OWN = "dustin"
"""The method that configs are searched for."""


@dataclass(frozen=True)
class Point:
    """What is known of one pair at one budget."""

    pair: str
    budget: int
    search: SearchResults | None
    fidelity: FidelityCell | None
    drift: float | None
    """Mean KL over generated tokens."""


def known_points(evidence: Evidence) -> list[Point]:
    """By pair in the order given, the largest budget first."""
    searches: dict[tuple[str, int], SearchResults] = {}
    cells: dict[tuple[str, int], FidelityCell] = {}
    drifts: dict[tuple[str, int], float] = {}
    for search in evidence.of(SearchResults):
        searches.setdefault((pair_of(search.data) or "", search.data.selection.budget), search.data)
    for fidelity in evidence.of(Fidelity):
        for (method, budget), found in fidelity.data.cells.items():
            if method == OWN:
                cells.setdefault((pair_of(fidelity.data) or "", budget), found)
    for drift in evidence.of(Drift):
        pair, chosen = pair_of(drift.data), drift.data.selection
        if pair and chosen and OWN in drift.data.methods:
            drifts.setdefault((pair, chosen.budget), drift.data.methods[OWN].mean_kl)
    keys = dict.fromkeys([*searches, *cells, *drifts])
    order = list(dict.fromkeys(pair for pair, _ in keys))
    return [
        Point(*key, searches.get(key), cells.get(key), drifts.get(key))
        for key in sorted(keys, key=lambda key: (order.index(key[0]), -key[1]))
    ]
