"""What a report reads of each result file. Other fields may be there; those that are must be as said here."""

from __future__ import annotations

from dustin_profile.reporting.documents.analysis import Overhead, Recovery, Stabilities
from dustin_profile.reporting.documents.common import Document
from dustin_profile.reporting.documents.evaluation import Drift, Evaluation, Fidelity, Subsets
from dustin_profile.reporting.documents.run import (
    AttentionBench,
    Bench,
    Generation,
    GenerationSummary,
    ProfileTimes,
)
from dustin_profile.reporting.documents.search import Heads, Latency, SearchResults
from dustin_profile.reporting.documents.studies import GuardStudy, ListStudy, SplitStudy, TellsStudy

KINDS: dict[str, type[Document]] = {
    str(cls.model_fields["kind"].annotation.__args__[0]): cls  # type: ignore[union-attr]
    for cls in (
        SearchResults,
        Heads,
        Latency,
        Evaluation,
        Fidelity,
        Subsets,
        Drift,
        Recovery,
        Stabilities,
        Overhead,
        GenerationSummary,
        Generation,
        Bench,
        AttentionBench,
        ProfileTimes,
        ListStudy,
        SplitStudy,
        GuardStudy,
        TellsStudy,
    )
}
"""By the `kind` that a file names."""
MADE_BY = {
    "dustin-results": "dustin-profile search",
    "dustin-heads": "dustin-profile srh",
    "dustin-latency": "dustin-profile latency",
    "dustin-eval": "dustin-profile eval",
    "dustin-fidelity": "dustin-profile eval fidelity",
    "dustin-subsets": "dustin-profile eval subsets",
    "dustin-arr": "dustin-profile eval arr",
    "dustin-stability": "dustin-profile eval stability",
    "dustin-overhead": "dustin-profile eval overhead",
    "dustin-drift": "dustin-profile drift",
    "dustin-generation": "dustin-run generate --json",
    "dustin-bench": "dustin-run bench --json",
    "dustin-bench-attention": "dustin-run bench attention --json",
    "dustin-profile-time": "python tools/bench_profile.py --json",
    "dustin-study-lists": "python tools/study_lists.py",
    "dustin-study-splits": "python tools/study_splits.py",
    "dustin-study-guard": "python tools/study_guard.py",
    "dustin-study-tells": "python tools/study_tells.py",
}
"""The command that writes a kind, for remedies."""
