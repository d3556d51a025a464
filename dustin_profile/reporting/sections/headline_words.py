"""What decides, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from dustin_profile.method_styles import label, style
from dustin_profile.reporting.documents.evaluation import Evaluation
from dustin_profile.reporting.documents.run import Bench, BenchRow
from dustin_profile.reporting.points import Point
from dustin_profile.reporting.sections.bench import case_name
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.speeds import fastest, gains_at_equal_tau, own_rows, ranked, synthetic
from dustin_profile.reporting.titles import pair_of
from dustin_profile.reporting.wording import NBSP, certain, count, estimate, listed, percent, plain, signed, times
from dustin_runtime.method_names import FULL


def verdicts(points: Sequence[Point]) -> list[tuple[str, str]]:
    """A sentence per pair and budget that a config reads."""
    found = []
    for point in points:
        if not point.kept or not point.configured:
            continue
        text = f"Dustin keeps {estimate(point.kept)} of the attention"
        if point.of_oracle:
            text += f", {percent(point.of_oracle)} of what the best single list keeps"
        sure = {name: gain for name, gain in point.over.items() if certain(gain)}
        if gains := [f"{label(name)} ({signed(gain.mean)})" for name, gain in sure.items() if gain.mean > 0]:
            text += f"; more than {listed(gains)}"
        if worse := [label(name) for name, gain in sure.items() if gain.mean < 0 and not style(name).bound]:
            text += f"; less than {listed(worse)}"
        text += "."
        if unsure := [label(name) for name in point.over if name not in sure and not style(name).bound]:
            text += f" Its distance from {listed(unsure)} may be chance."
        found.append((f"{point.pair}, k = {point.budget}:", text))
    return found


def speed_said(evidence: Evidence, points: Sequence[Point]) -> list[tuple[str, str]]:
    """A sentence or two per bench, real ones first."""
    found = []
    for source in ranked(evidence):
        data = source.data
        name, assumed, best = pair_of(data) or "", synthetic(data), fastest(data)
        if not best or not best.alpha:
            continue
        reads = f" with k{NBSP}={NBSP}{best.budget}" if best.budget else ""
        text = f"at {case_name((best.batch, best.context))}{reads} a token takes {percent(1 / best.alpha)} of vanilla's"
        same = [row for row in data.rows if (row.batch, row.context) == (best.batch, best.context)]
        full = [f"{times(best.tokens_per_s / row.tokens_per_s)} {label(row.method)}" for row in same if _classic(row)]
        text += f" time ({listed(full)})." if full else " time."
        if assumed:
            text += f" This is synthetic: {', '.join(assumed)}. Times are real; τ, and so tokens/s, is assumed."
        else:
            text += f" Nothing is synthetic; τ, here {plain(best.tau, 2)}, is that of Dustin's own text."
            if gains := gains_at_equal_tau(data):
                usual, equal = ([times(end) for end in (min(ends), max(ends))] for ends in zip(*gains, strict=True))
                text += (
                    f" Over all cases it gains {' to '.join(usual)}; with classic SD's τ it would be"
                    f" {' to '.join(equal)}."
                )
        if points:
            lengths = [(p.context, p.texts, p.generated_from) for p in points if p.pair == name]
            contexts = [tokens for several in lengths for tokens in several if tokens]
            if name not in {point.pair for point in points}:
                text += " Quality was measured on other pairs."
            elif contexts and max(contexts) < best.context:
                text += f" Quality was measured at up to {count(max(contexts))} tokens."
            if isinstance(best.draft_reads, int) and (whole := _with_whole_draft(evidence, data, name)):
                text += (
                    f" There the draft reads {best.draft_reads} tokens; answers were compared with vanilla's with a"
                    f" draft that reads all, with which it gains up to {times(whole)}."
                )
        found.append((f"Speed, {name} on {data.devices}{', synthetic' if assumed else ''}:", text))
    return found


def _with_whole_draft(evidence: Evidence, data: Bench, pair: str) -> float | None:
    """The best gain of rows whose draft reads all, if every answer was compared with vanilla's so; None if there is no
    such row."""
    answered = [one.data for one in evidence.of(Evaluation) if pair_of(one.data) == pair]
    answered = [data for data in answered if any(entry.method == "vanilla" for entry in data.entries)]
    if not answered or any(one.inputs.draft_cache != "full" for one in answered):
        return None
    return max(
        (row.alpha for row in own_rows(data) if row.alpha and not isinstance(row.draft_reads, int)), default=None
    )


def _classic(row: BenchRow) -> bool:
    """Whether it drafts and verifies in full."""
    return row.method in FULL and row.method != "vanilla"
