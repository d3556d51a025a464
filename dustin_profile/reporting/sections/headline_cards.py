"""The numbers that decide, one card each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dustin_profile.reporting.blocks import Card
from dustin_profile.reporting.documents.evaluation import Drift, Evaluation
from dustin_profile.reporting.measured import measured
from dustin_profile.reporting.points import OWN, Point
from dustin_profile.reporting.sections.bench import case_name
from dustin_profile.reporting.sections.books import said
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.speeds import fastest, own_rows, ranked, synthetic
from dustin_profile.reporting.titles import pair_of
from dustin_profile.reporting.wording import count, estimate, interval, percent, plain, times


def quality(points: Sequence[Point]) -> list[Card]:
    """Attention kept, and choices that are full verification's."""
    cards = []
    searched = [(point, point.kept) for point in points if point.kept and point.configured]
    if searched:
        point, arr = searched[0]
        detail = f"of the target's attention {interval(arr)} lies on the {count(point.budget)} tokens it reads"
        if point.context:
            detail += f" of {count(point.context)} ({percent(point.budget / point.context)})"
        others = [(other.budget, kept.mean) for other, kept in searched[1:] if other.pair == point.pair]
        detail += "." + "".join(f" At k = {k}: {plain(mean)}." for k, mean in others)
        cards.append(Card("Attention kept", plain(arr.mean), detail, point.pair, f"k = {point.budget}"))
    measured = [(point, point.fidelity) for point in points if point.fidelity]
    if measured:
        point, found = measured[0]
        detail = (
            f"of tokens are chosen as full verification chooses {interval(found.agreement)}; KL"
            f" {plain(found.kl.mean)} nats."
        )
        others_kept = [(p.budget, f.agreement.mean) for p, f in measured[1:] if p.pair == point.pair]
        detail += "".join(f" At k = {k}: {plain(mean)}." for k, mean in others_kept)
        cards.append(Card("Same choices", plain(found.agreement.mean), detail, point.pair, f"k = {point.budget}"))
    return cards


def answers(evidence: Evidence, named: Mapping[str, int]) -> list[Card]:
    """What a task's answers lose, and what the books' own text does.

    Args:
        named: the budget to show, by pair; else it is the config's own.
    """
    cards = []
    for known in measured(evidence):
        for task in known.tasks:
            own = {
                budget: (score.value, score.minus)
                for (method, budget), score in task.scores.items()
                if method == OWN and score.minus
            }
            if not own:
                continue
            served = named.get(known.pair, task.sources[0].data.inputs.selection.budget)
            budget = served if served in own else max(own, key=lambda k: k or 0)
            value, minus = own.pop(budget)
            name, _, figure = task.title.partition(", ")
            detail = f"{figure}; {estimate(minus, sign=True)} against full verification, paired."
            detail += "".join(f" At k = {k}: {plain(other)}." for k, (other, _) in own.items())
            cards.append(Card(f"Answers, {name}", plain(value), detail, known.pair, f"k = {budget}"))
        if known.books:
            cards += _perplexity(known.books.sources[0].data)
    return cards


def _perplexity(data: Evaluation) -> list[Card]:
    full = data.full_perplexity
    for entry in data.entries:
        if entry.method == OWN and not entry.group and entry.perplexity is not None and full:
            tag = f"k = {entry.budget}" if entry.budget else ""
            return [
                Card(
                    f"Perplexity, {data.task}", plain(entry.perplexity, 1), said(entry, full), pair_of(data) or "", tag
                )
            ]
    return []


def drift(evidence: Evidence) -> list[Card]:
    """How far generation goes from full verification."""
    for source in evidence.of(Drift):
        own = next((cell for cell in source.data.at(source.data.budget) if cell.method == OWN), None)
        if own:
            first, last = own.by_tokens[0], own.by_tokens[-1]
            return [
                Card(
                    "Drift",
                    plain(own.kl.mean),
                    f"nats from full verification, mean over {count(last.tokens)} generated tokens: {plain(first.kl)}"
                    f" at first, {plain(last.kl)} at the end.",
                    pair_of(source.data) or source.name,
                    f"k = {own.budget}",
                )
            ]
    return []


def speed(evidence: Evidence) -> list[Card]:
    """Tokens per second over vanilla's, the best case and the worst; real speeds first."""
    cards = []
    for source in ranked(evidence):
        data = source.data
        best = fastest(data)
        if best and best.alpha:
            lowest = min(row.alpha or 0 for row in own_rows(data))
            reads = f", the draft reading {best.draft_reads}" if best.draft_reads else ""
            cards.append(
                Card(
                    "Speed",
                    times(best.alpha),
                    f"vanilla's at best: {count(best.tokens_per_s)} tokens/s, {case_name((best.batch, best.context))}"
                    f"{reads}. At least: {times(lowest)}.",
                    f"{pair_of(data)}, {data.devices}",
                    "SYNTHETIC" if synthetic(data) else f"k = {best.budget}" if best.budget else "",
                )
            )
    return cards
