"""What each source is called where several stand beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dustin_profile.reporting.documents.analysis import Overhead, OverheadInputs, Recovery
from dustin_profile.reporting.documents.evaluation import Drift, Evaluation, Fidelity, Subsets
from dustin_profile.reporting.documents.run import Bench
from dustin_profile.reporting.documents.search import SearchResults
from dustin_profile.reporting.sources import Evidence, Source
from dustin_profile.reporting.wording import pair
from dustin_runtime.config import DustinConfig
from dustin_runtime.errors import UsageError
from dustin_runtime.pairs import find_pair


def pair_of(data: Any) -> str | None:
    """The pair that a document is about, if it says."""
    if isinstance(data, Drift) and data.inputs.models:
        return pair(data.inputs.models.target.id, data.inputs.models.draft.id)
    if isinstance(data, Fidelity | Evaluation | Subsets):
        return pair(data.inputs.models.target.id, data.inputs.models.draft.id)
    if isinstance(data, Bench):
        return _benched(data)
    if isinstance(data, Overhead):
        data = data.inputs
    if isinstance(data, SearchResults | DustinConfig | Recovery | OverheadInputs) and data.pair:
        return pair(data.pair.target.id, data.pair.draft.id)
    return None


def _benched(data: Bench) -> str:
    """As the pair's other results name it. Random weights have a known pair's shapes alone, and keep its short name."""
    names = data.pair.split(" / ")
    if len(names) == 1 and not data.synthetic:
        with suppress(UsageError):
            known = find_pair(data.pair)
            names = [known.target_id, known.draft_id]
    return pair(*names) if len(names) == 2 else data.pair


def budget_of(data: Any) -> int | None:
    """The budget of the config that a document rests on."""
    if isinstance(data, SearchResults | DustinConfig):
        return data.selection.budget
    return None


def titles(sources: Sequence[Source[Any]]) -> list[str]:
    """One title each, told apart by pair, budget and, where that does not suffice, by file."""
    found = []
    for source in sources:
        k = budget_of(source.data)
        found.append(f"{pair_of(source.data) or source.name}" + (f", k = {k}" if k else ""))
    return [
        f"{title} ({source.name})" if found.count(title) > 1 and title != source.name else title
        for title, source in zip(found, sources, strict=True)
    ]


def pairs(evidence: Evidence) -> list[str]:
    """Pairs whose quality was measured, in the order given."""
    kinds = (SearchResults, Recovery, Fidelity, Evaluation)
    named = [pair_of(source.data) for kind in kinds for source in evidence.of(kind)]
    return list(dict.fromkeys(name for name in named if name))


def slug(number: int, total: int) -> str:
    """What tells the figures of one kind apart in their files' names."""
    return f"-{number + 1}" if total > 1 else ""
