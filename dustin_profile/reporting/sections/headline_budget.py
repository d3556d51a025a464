"""The budget to deploy, by a rule that the text states, or what is missing to name one."""

from __future__ import annotations

from collections.abc import Sequence

from dustin_profile.reporting.points import Point
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.titles import pair_of
from dustin_profile.reporting.wording import estimate, listed, percent, plain
from dustin_runtime.config import DustinConfig

MARGIN = 0.1
"""Share of vanilla's score that may be lost: what an interval over a few dozen items can rule out."""
RULE = f"95 % intervals rule out that any task lost {percent(MARGIN)} of vanilla's score"


def budgets(points: Sequence[Point]) -> list[tuple[str, str]]:
    """A sentence or more per pair."""
    pairs = dict.fromkeys(point.pair for point in points)
    return [(f"Budget, {pair}:", _said([p for p in points if p.pair == pair])) for pair in pairs]


def chosen(points: Sequence[Point]) -> Point | None:
    """The smallest budget of one pair that loses nothing by the rule, as do all larger ones that can be judged."""
    found = None
    for point in _judged(points):
        if _faults(point):
            break
        found = point
    return found


def named(points: Sequence[Point]) -> dict[str, int]:
    """The budget of every pair that one can be named for."""
    pairs = dict.fromkeys(point.pair for point in points)
    found = {pair: chosen([point for point in points if point.pair == pair]) for pair in pairs}
    return {pair: point.budget for pair, point in found.items() if point}


def ready(points: Sequence[Point], evidence: Evidence) -> list[tuple[str, str]]:
    """How to serve what was searched: at the named budget, or else at each file's own."""
    budget_of, commands = named(points), []
    configs = evidence.of(DustinConfig)
    for pair, budget in budget_of.items():
        if theirs := [source for source in configs if pair_of(source.data) == pair]:
            config = min(theirs, key=lambda source: source.data.selection.budget != budget)
            option = "" if config.data.selection.budget == budget else f" --budget {budget}"
            commands.append(f"dustin-run generate --config {config.name}{option} ({pair}, k = {budget})")
    own = [
        f"{source.name} ({pair_of(source.data)}, k = {source.data.selection.budget})"
        for source in configs
        if pair_of(source.data) not in budget_of
    ]
    if own:
        commands.append(f"dustin-run generate --config {' or '.join(own)}")
    return [("To deploy:", "; ".join(commands) + ".")] if commands else []


def _said(points: Sequence[Point]) -> str:
    judged = _judged(points)
    if not judged:
        return f"none is named, since {_missing(points)}."
    point = chosen(points)
    if not point:
        return f"none of those that were judged will do: at none is it so that {RULE}. At k = {_why_not(judged[0])}."
    text = f"k = {point.budget}: there, and at all larger budgets that were judged, {RULE} ({_measured(point)})."
    if below := next((other for other in judged if other.budget < point.budget), None):
        text += f" At k = {_why_not(below)}."
    if point.fidelity:
        text += (
            " Texts are not vanilla's to the letter: of given texts' tokens, full verification would choose"
            f" {estimate(point.fidelity.agreement)} the same."
        )
    return text


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
    faults = []
    for title, score in point.scores.items():
        if score.minus and score.minus.low is not None:
            full = score.value - score.minus.mean
            if score.minus.low < -MARGIN * full:
                lost = f", so that {percent(-score.minus.low / full)} may be lost" if full > 0 else ""
                faults.append(f"“{title}” is {estimate(score.minus, sign=True)} from vanilla's {plain(full)}{lost}")
    return faults


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
