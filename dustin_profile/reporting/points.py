"""What is known of each pair at each budget, whichever files say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dustin_profile.method_styles import canonical
from dustin_profile.reporting.documents.analysis import Recovery
from dustin_profile.reporting.documents.common import Estimate
from dustin_profile.reporting.documents.evaluation import Drift, Fidelity, FidelityCell
from dustin_profile.reporting.documents.search import SearchResults
from dustin_profile.reporting.measured import Score, measured
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.titles import pair_of

OWN = "dustin"
"""The method that configs are searched for."""
ANALYSED = ("history-top", "lookahead-top", "lookahead-top-all")
"""Lists that an analysis makes to take attention apart; no method serves them."""


@dataclass(frozen=True)
class Point:
    """One pair at one budget.

    Attributes:
        context: tokens of the documents that ARR was measured on.
        arr: of every policy, on retrieval heads.
        over: Dustin's ARR minus each policy's, paired by document.
        configured: whether a config reads this budget, rather than an analysis around it.
        drift: mean KL over generated tokens.
        texts: tokens of the texts that fidelity was measured on, prompts with what is behind them.
        generated_from: tokens of the prompts that drift was measured from.
        scores: of Dustin's answers, by task and figure.
    """

    pair: str
    budget: int
    context: int | None = None
    arr: Mapping[str, Estimate] = field(default_factory=dict)
    over: Mapping[str, Estimate] = field(default_factory=dict)
    configured: bool = False
    fidelity: FidelityCell | None = None
    drift: float | None = None
    texts: int | None = None
    generated_from: int | None = None
    scores: Mapping[str, Score] = field(default_factory=dict)

    @property
    def kept(self) -> Estimate | None:
        """Dustin's ARR."""
        return self.arr.get(OWN)

    @property
    def of_oracle(self) -> float | None:
        """Share of what the best single list keeps."""
        oracle = self.arr.get("oracle")
        return self.kept.mean / oracle.mean if self.kept and oracle and oracle.mean else None


Key = tuple[str, int]


def known_points(evidence: Evidence) -> list[Point]:
    """By pair in the order given, the largest budget first. A search goes before an analysis of the same budget."""
    found: dict[Key, Point] = {}
    for search in evidence.of(SearchResults):
        point = _searched(search.data)
        found.setdefault((point.pair, point.budget), point)
    for analysis in evidence.of(Recovery):
        if analysis.data.split != "held-out":  # the config was chosen on some of its documents
            continue
        for point in _analysed(analysis.data):
            found.setdefault((point.pair, point.budget), point)
    cells, drifts, scores = _cells(evidence), _drifts(evidence), _scores(evidence)
    keys = dict.fromkeys([*found, *cells, *drifts, *scores])
    order = list(dict.fromkeys(pair for pair, _ in keys))
    points = []
    for pair, budget in sorted(keys, key=lambda key: (order.index(key[0]), -key[1])):
        known = found.get((pair, budget), Point(pair, budget))
        fidelity, texts = cells.get((pair, budget), (None, None))
        drift, prompts = drifts.get((pair, budget), (None, None))
        answers = scores.get((pair, budget), {})
        points.append(
            replace(known, fidelity=fidelity, texts=texts, drift=drift, generated_from=prompts, scores=answers)
        )
    return points


def _searched(data: SearchResults) -> Point:
    return Point(
        pair_of(data) or "",
        data.selection.budget,
        data.traces.context,
        {canonical(name): policy.arr for name, policy in data.policies.items()},
        {canonical(name): gain for name, gain in data.hybrid_minus.items()},
        configured=True,
    )


def _analysed(data: Recovery) -> list[Point]:
    context = data.traces[0].context if data.traces else None
    budgets: dict[int, dict[str, Estimate]] = {}
    for row in data.budgets:
        if row.policy not in ANALYSED:
            budgets.setdefault(row.budget, {})[row.policy] = row.arr
    return [
        Point(pair_of(data) or "", budget, context, arr, configured=budget == data.selection.budget)
        for budget, arr in budgets.items()
    ]


def _cells(evidence: Evidence) -> dict[Key, tuple[FidelityCell, int]]:
    """With the tokens of the longest text."""
    found: dict[Key, tuple[FidelityCell, int]] = {}
    for source in evidence.of(Fidelity):
        tokens = max(document.prompt_tokens + document.text_tokens for document in source.data.documents)
        for (method, budget), cell in source.data.cells.items():
            if method == OWN:
                found.setdefault((pair_of(source.data) or "", budget), (cell, tokens))
    return found


def _drifts(evidence: Evidence) -> dict[Key, tuple[float, int]]:
    """With the tokens of its prompts."""
    found: dict[Key, tuple[float, int]] = {}
    for source in evidence.of(Drift):
        pair = pair_of(source.data)
        for cell in source.data.summary.values():
            if pair and cell.method == OWN and cell.budget is not None:
                found.setdefault((pair, cell.budget), (cell.kl.mean, source.data.inputs.context))
    return found


def _scores(evidence: Evidence) -> dict[Key, dict[str, Score]]:
    found: dict[Key, dict[str, Score]] = {}
    for known in measured(evidence):
        for task in known.tasks:
            for (method, budget), score in task.scores.items():
                if method == OWN and budget is not None:
                    found.setdefault((known.pair, budget), {})[task.title] = score
    return found
