"""Attention kept as a function of the budget: from searches at several budgets, and from given texts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from dustin_profile.method_styles import Style, style
from dustin_profile.reporting.blocks import Content, Figure, Figures
from dustin_profile.reporting.charts import lines
from dustin_profile.reporting.documents.analysis import Recovery
from dustin_profile.reporting.documents.evaluation import Fidelity
from dustin_profile.reporting.documents.search import SearchResults
from dustin_profile.reporting.points import ANALYSED
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sources import Evidence, Source
from dustin_profile.reporting.titles import pair_of, slug
from dustin_profile.reporting.wording import listed, plural

Curves = dict[str, list[tuple[float, float]]]
"""By method: (tokens read, ARR)."""
Found = tuple[str, Curves, list[str]]
"""Caption, curves, and the files that they are from."""


def build(evidence: Evidence) -> Content | None:
    found = _told_apart([*_searched(evidence), *_analysed(evidence), *_given(evidence)])
    figures = [
        Figure(
            f"budget{slug(number, len(found))}",
            caption,
            f"ARR by tokens read, a line per policy: {caption}",
            partial(
                lines,
                curves=curves_of(points),
                xlabel="prefix tokens read",
                ylabel="ARR",
                log_x=True,
                x_ticks=ticks([x for line in points.values() for x, _ in line]),
            ),
            height=3.5,
        )
        for number, (caption, points) in enumerate(found)
    ]
    if not figures:
        return None
    return Content(
        "What a larger budget buys. The gap between Dustin and the oracle is what better lists could still gain at the"
        " same cost; the gap between one list and a list per head is what one list for all heads gives up.",
        [Figures(figures)],
    )


def _told_apart(found: list[Found]) -> list[tuple[str, Curves]]:
    """Captions, with the files where two would say the same."""
    captions = [caption for caption, _, _ in found]
    return [
        (f"{caption} From {listed(names)}." if captions.count(caption) > 1 else caption, points)
        for caption, points, names in found
    ]


def curves_of(points: Mapping[str, list[tuple[float, float]]]) -> list[tuple[Style, list[float], list[float]]]:
    """What `charts.lines` draws, the smallest budget first."""
    return [
        (style(name), [x for x, _ in sorted(found)], [y for _, y in sorted(found)]) for name, found in points.items()
    ]


def ticks(values: list[float]) -> list[float]:
    """Powers of two around the values."""
    powers = [2.0**power for power in range(4, 21)]
    return [tick for tick in powers if 0.75 * min(values) <= tick <= 1.34 * max(values)]


def _searched(evidence: Evidence) -> list[Found]:
    """Searches of one pair on the same documents at two budgets or more."""
    groups: dict[tuple[str, ...], list[Source[SearchResults]]] = {}
    for source in evidence.of(SearchResults):
        data = source.data
        documents = tuple(sorted(data.documents.reported))
        groups.setdefault((pair_of(data) or "", data.traces.data_sha256, *documents), []).append(source)
    found = []
    for (pair, *_), sources in groups.items():
        searches = [source.data for source in sources]
        if len({data.selection.budget for data in searches}) < 2:
            continue
        points: Curves = {}
        for data in searches:
            for name, policy in data.policies.items():
                points.setdefault(name, []).append((data.selection.budget, policy.arr.mean))
        caption = f"{pair}: retrieval heads, held-out documents, every budget searched by itself."
        found.append((caption, points, [source.name for source in sources]))
    return found


def _analysed(evidence: Evidence) -> list[Found]:
    found = []
    for source in evidence.of(Recovery):
        points: Curves = {}
        for row in source.data.budgets:
            if row.policy not in ANALYSED:
                points.setdefault(row.policy, []).append((row.read, row.arr.mean))
        if any(len(line) > 1 for line in points.values()):
            of = f" of {listed(kinds)}" if (kinds := [traces.data for traces in source.data.traces]) else ""
            documents = f"{plural(len(source.data.documents), f'{source.data.split} document')}{of}"
            caption = f"{pair_of(source.data)}: retrieval heads, {documents}, one config."
            found.append((caption, points, [source.name]))
    return found


def _given(evidence: Evidence) -> list[Found]:
    found = []
    for source in evidence.of(Fidelity):
        points: Curves = {}
        for (method, _), cell in source.data.cells.items():
            points.setdefault(method, []).append((cell.read, cell.arr.mean))
        if any(len(line) > 1 for line in points.values()):
            found.append((f"{pair_of(source.data)}: all heads, given texts.", points, [source.name]))
    return found


SECTION = Section("budget", "Attention by budget", "dustin-profile eval arr RUN", build)
