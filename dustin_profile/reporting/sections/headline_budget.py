"""The budget to deploy, by a rule that the text states, or what is missing to name one."""

from __future__ import annotations

from collections.abc import Sequence

from dustin_profile.reporting.points import Point
from dustin_profile.reporting.sources import Evidence, Source
from dustin_profile.reporting.titles import pair_of
from dustin_profile.reporting.wording import estimate, listed, percent, plain
from dustin_runtime.config import DustinConfig

MARGIN = 0.1
"""Share of vanilla's score that may be lost: what an interval over a few dozen items can rule out."""
RULE = (
    "every task's score is, by the whole 95 % interval of its difference from vanilla's, less than"
    f" {percent(MARGIN)} of vanilla's below it"
)


def budgets(points: Sequence[Point], evidence: Evidence) -> list[tuple[str, str]]:
    """A sentence or more per pair."""
    pairs = dict.fromkeys(point.pair for point in points)
    return [(f"Budget, {pair}:", _said([p for p in points if p.pair == pair], pair, evidence)) for pair in pairs]


def chosen(points: Sequence[Point]) -> Point | None:
    """The smallest budget of one pair that loses nothing by the rule, as do all larger ones that can be judged."""
    found = None
    for point in _judged(points):
        if _faults(point):
            break
        found = point
    return found


def ready(points: Sequence[Point], evidence: Evidence) -> list[tuple[str, str]]:
    """Which files can be deployed as they are; those of pairs that a budget was named for are said with it."""
    named = {point.pair for point in points if chosen([other for other in points if other.pair == point.pair])}
    found = [
        f"{source.name} ({pair_of(source.data)}, k = {source.data.selection.budget})"
        for source in evidence.of(DustinConfig)
        if pair_of(source.data) not in named
    ]
    return [("To deploy:", f"dustin-run generate --config {' or '.join(found)}.")] if found else []


def _said(points: Sequence[Point], pair: str, evidence: Evidence) -> str:
    judged = _judged(points)
    if not judged:
        return f"none is named, since {_missing(points)}."
    point = chosen(points)
    if not point:
        return f"none of those that were judged will do, by this rule: {RULE}. At k = {_why_not(judged[0])}."
    text = f"k = {point.budget} is the smallest at which {RULE}, there and at all larger ones that were judged"
    text += f" ({_measured(point)})."
    if below := next((other for other in judged if other.budget < point.budget), None):
        text += f" At k = {_why_not(below)}."
    if point.fidelity:
        text += (
            " Texts are not vanilla's to the letter: of given texts' tokens, full verification would choose"
            f" {estimate(point.fidelity.agreement)} the same."
        )
    return f"{text} {_command(point, pair, evidence)}".strip()


def _judged(points: Sequence[Point]) -> list[Point]:
    """Those with an interval for every task that any budget has one for, the largest first."""
    tasks = {title for point in points for title in _paired(point)}
    found = [point for point in points if tasks and _paired(point) == tasks]
    return sorted(found, key=lambda point: -point.budget)


def _paired(point: Point) -> set[str]:
    """Tasks whose difference from vanilla has an interval."""
    return {title for title, score in point.scores.items() if score.minus and score.minus.low is not None}


def _faults(point: Point) -> list[str]:
    """What the rule has against a budget."""
    return [
        f"“{title}” is {estimate(score.minus, sign=True)} from vanilla's {plain(score.value - score.minus.mean)}"
        for title, score in point.scores.items()
        if score.minus and score.minus.low is not None and score.minus.low < -MARGIN * (score.value - score.minus.mean)
    ]


def _why_not(point: Point) -> str:
    return f"{point.budget}, {listed(_faults(point))}"


def _measured(point: Point) -> str:
    differences = {title: score.minus for title, score in point.scores.items()}
    return "; ".join(f"{title} {estimate(minus, sign=True)}" for title, minus in differences.items() if minus)


def _missing(points: Sequence[Point]) -> str:
    """What the rule asks for and no budget has, or no budget has together."""
    tasks = sorted({title for point in points for title in _paired(point)})
    if tasks:
        return f"no budget has all of them measured: {listed(tasks)}"
    return (
        "this was not measured: answers beside vanilla's (dustin-profile eval needle, recall or longbench, over several"
        " documents)"
    )


def _command(point: Point, pair: str, evidence: Evidence) -> str:
    configs: list[Source[DustinConfig]] = [s for s in evidence.of(DustinConfig) if pair_of(s.data) == pair]
    configs.sort(key=lambda source: source.data.selection.budget != point.budget)
    if not configs:
        return ""
    changed = "" if configs[0].data.selection.budget == point.budget else f" --budget {point.budget}"
    return f"To deploy: dustin-run generate --config {configs[0].name}{changed}."
