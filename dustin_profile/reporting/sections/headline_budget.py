"""The budget to deploy, by a rule that the text states, or what is missing to name one."""

from __future__ import annotations

from collections.abc import Sequence

from dustin_profile.reporting.points import Point
from dustin_profile.reporting.sources import Evidence, Source
from dustin_profile.reporting.titles import pair_of
from dustin_profile.reporting.wording import estimate, listed, percent, plain
from dustin_runtime.config import DustinConfig

SHARE = 0.9
"""Of tokens that must be chosen as full verification chooses."""
TASKS, CHOICES = (
    "answers beside vanilla's (dustin-profile eval needle, recall or longbench, over several documents)",
    "same choice (dustin-profile eval fidelity)",
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
    rule = (
        "no task's score is below vanilla's with its whole 95 % interval, and at least"
        f" {percent(SHARE)} of tokens are chosen as full verification chooses"
    )
    point = chosen(points)
    if not point:
        return f"none of those that were judged will do, by this rule: {rule}. At k = {_why_not(judged[0])}."
    text = f"k = {point.budget} is the smallest at which {rule}, there and at all larger ones that were judged"
    text += f" ({_measured(point)})."
    if below := next((other for other in judged if other.budget < point.budget), None):
        text += f" At k = {_why_not(below)}."
    lowest = min(score.minus.low for score in point.scores.values() if score.minus and score.minus.low is not None)
    if lowest < 0:
        text += f" To find no loss is not to show that there is none: the intervals reach down to {plain(lowest)}."
    return f"{text} {_command(point, pair, evidence)}".strip()


def _judged(points: Sequence[Point]) -> list[Point]:
    """Those with all that the rule asks for, in every task that any budget has, the largest first."""
    tasks = {title for point in points for title in _paired(point)}
    found = [point for point in points if point.fidelity and tasks and _paired(point) == tasks]
    return sorted(found, key=lambda point: -point.budget)


def _paired(point: Point) -> set[str]:
    """Tasks whose difference from vanilla has an interval."""
    return {title for title, score in point.scores.items() if score.minus and score.minus.high is not None}


def _faults(point: Point) -> list[str]:
    """What the rule has against a budget."""
    faults = [
        f"“{title}” is {estimate(score.minus, sign=True)} from vanilla's"
        for title, score in point.scores.items()
        if score.minus and score.minus.high is not None and score.minus.high < 0
    ]
    if point.fidelity and point.fidelity.agreement.mean < SHARE:
        faults.append(f"same choice is {plain(point.fidelity.agreement.mean)}")
    return faults


def _why_not(point: Point) -> str:
    return f"{point.budget}, {listed(_faults(point))}"


def _measured(point: Point) -> str:
    differences = {title: score.minus for title, score in point.scores.items()}
    said = [f"{title} {estimate(minus, sign=True)}" for title, minus in differences.items() if minus]
    if point.fidelity:
        said.append(f"same choice {estimate(point.fidelity.agreement)}")
    return "; ".join(said)


def _missing(points: Sequence[Point]) -> str:
    """What the rule asks for and no budget has, or no budget has together."""
    lacking = [TASKS] if not any(_paired(point) for point in points) else []
    lacking += [CHOICES] if not any(point.fidelity for point in points) else []
    if lacking:
        return f"this was not measured: {listed(lacking)}"
    tasks = sorted({title for point in points for title in _paired(point)})
    return f"no budget has all of them measured: {listed([*tasks, 'same choice'])}"


def _command(point: Point, pair: str, evidence: Evidence) -> str:
    configs: list[Source[DustinConfig]] = [s for s in evidence.of(DustinConfig) if pair_of(s.data) == pair]
    configs.sort(key=lambda source: source.data.selection.budget != point.budget)
    if not configs:
        return ""
    changed = "" if configs[0].data.selection.budget == point.budget else f" --budget {point.budget}"
    return f"To deploy: dustin-run generate --config {configs[0].name}{changed}."
