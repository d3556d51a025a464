"""The columns of the table of all methods: a cell per method, and which methods cannot be told from the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dustin_profile.method_styles import style
from dustin_profile.reporting.blocks import Cell
from dustin_profile.reporting.documents.common import Estimate
from dustin_profile.reporting.measured import Books, Drifts, Given, Measured, Method, Score, Task
from dustin_profile.reporting.sections.fidelity import read_cell
from dustin_profile.reporting.wording import certain, count, plain, signed
from dustin_profile.statistics import interval

SLACK = 1e-9
"""Differences below this are rounding."""
Alike = Callable[[Method, Method], bool | None]
"""Whether the interval of a method's distance from the best one holds zero; None where there is no interval."""


@dataclass(frozen=True)
class Column:
    """One figure of every method.

    Attributes:
        cost: by method, what is best when it is least; empty for a figure that is no merit.
        alike: see `Alike`.
        compact: whether it belongs in the short version.
    """

    header: str
    cells: Mapping[Method, Cell]
    cost: Mapping[Method, float] = field(default_factory=dict)
    alike: Alike = lambda method, best: None
    compact: bool = False

    def marked(self, methods: Sequence[Method]) -> set[Method]:
        """The best of some methods and those that cannot be told from it; none where an interval is missing."""
        known = [method for method in methods if method in self.cost and not style(method[0]).bound]
        if len(known) < 2:
            return set()
        best, *others = sorted(known, key=lambda method: self.cost[method])
        alike = [self.alike(method, best) for method in others]
        if None in alike:  # what is not bold would look as if it were told apart
            return set()
        # Not those behind one that is told apart: an interval so wide that it holds anything says nothing for them.
        apart = alike.index(False) if False in alike else len(others)
        return {best, *others[:apart]}


def columns(known: Measured) -> list[Column]:
    """All that the pair's files have, in the order of the table."""
    found = [_read(known)]
    if known.given:
        found += _fidelity(known, known.given)
    found += [_task(task) for task in known.tasks]
    if known.books:
        found += _books(known.books)
    if known.drifts:
        found += _drift(known.drifts)
    if known.acceptance:
        found.append(_estimates("τ", known.acceptance.tau, 2, lower=False, compact=True))
    return found


def _read(known: Measured) -> Column:
    read = known.read
    cells = {
        (name, budget): Cell(count(value)) if budget is None else read_cell(value, budget)
        for (name, budget), value in read.items()
    }
    return Column("tokens read", cells, compact=True)


def _fidelity(known: Measured, given: Given) -> list[Column]:
    cells = given.cells
    full = [method for method in known.methods if method[1] is None]

    def column(header: str, figure: str, decimals: int, *, lower: bool, at_full: str, compact: bool = True) -> Column:
        means = {method: getattr(cell, figure).mean for method, cell in cells.items()}
        shown: dict[Method, Cell] = {method: Cell(at_full, tone="muted") for method in full}
        shown |= {method: Cell(plain(mean, decimals)) for method, mean in means.items()}
        cost = {method: mean if lower else -mean for method, mean in means.items()}
        return Column(header, shown, cost, _paired(given, figure), compact)

    found = [column("KL, nats", "kl", 4, lower=True, at_full="0")]
    medians = {method: cell.kl_median for method, cell in cells.items() if cell.kl_median is not None}
    if medians:
        shown: dict[Method, Cell] = {method: Cell("0", tone="muted") for method in full}
        shown |= {method: Cell(plain(value, 4)) for method, value in medians.items()}
        found.append(Column("KL, median", shown))
    found.append(column("same choice", "agreement", 3, lower=False, at_full="1"))
    found.append(column("ARR", "arr", 3, lower=False, at_full="1", compact=False))
    return found


def _task(task: Task) -> Column:
    scores = task.scores
    sparse = {method: score for method, score in scores.items() if method[1] is not None}
    # Paired with vanilla where that is known: the items' own difficulty drops out.
    paired = all(score.minus for score in sparse.values())
    reach = {
        method: found
        for method, score in sparse.items()
        if score.own and (found := score.minus if paired else score.own)
    }
    reach = reach if len(reach) == len(sparse) else {}
    cost = {method: -score.value for method, score in scores.items()}
    cells = {method: _score(score) for method, score in scores.items()}
    return Column(task.title, cells, cost, _stated(reach), compact=True)


def _score(score: Score) -> Cell:
    """With the difference from vanilla where its interval leaves out zero."""
    lost = score.minus if score.minus and certain(score.minus) else None
    return Cell(plain(score.value), signed(lost.mean) if lost else "")


def _books(books: Books) -> list[Column]:
    entries = books.entries
    perplexity = {method: entry.perplexity for method, entry in entries.items() if entry.perplexity is not None}
    losses = {method: entry.loss_difference for method, entry in entries.items() if entry.loss_difference}
    cells = {method: Cell(plain(value, 2)) for method, value in perplexity.items()}
    cost = {method: loss.mean for method, loss in losses.items()}
    speed = {
        method: entry.speed_by_document or Estimate(mean=entry.tokens_per_s)
        for method, entry in entries.items()
        if entry.tokens_per_s is not None
    }
    return [
        Column(f"{books.name}, perplexity", cells, cost, _stated(losses), compact=True),
        _estimates(f"{books.name}, tokens/s", speed, 1, lower=False),
    ]


def _drift(drifts: Drifts) -> list[Column]:
    kl = {method: cell.kl for method, cell in drifts.cells.items()}
    agreement = {method: cell.agreement for method, cell in drifts.cells.items()}
    return [
        _estimates("drift, KL", kl, 4, lower=True, compact=True),
        _estimates("drift, same choice", agreement, 3, lower=False),
    ]


def _estimates(
    header: str, found: Mapping[Method, Estimate], decimals: int, *, lower: bool, compact: bool = False
) -> Column:
    cells = {method: Cell(plain(one.mean, decimals)) for method, one in found.items()}
    cost = {method: one.mean if lower else -one.mean for method, one in found.items()}
    return Column(header, cells, cost, _stated(found), compact)


def _stated(found: Mapping[Method, Estimate]) -> Alike:
    """Whether a method's own interval holds the best one's mean, or the other way round.

    Either will do: of a few documents that all agree the interval is a point, and tells nothing apart.
    """

    def alike(method: Method, best: Method) -> bool | None:
        one, other = found.get(method), found.get(best)
        if not one or not other or None in (one.low, one.high, other.low, other.high):
            return None
        return _holds(one, other.mean) or _holds(other, one.mean)

    return alike


def _holds(one: Estimate, value: float) -> bool:
    return one.low is not None and one.high is not None and one.low - SLACK <= value <= one.high + SLACK


def _paired(given: Given, figure: str) -> Alike:
    """Whether the interval of the differences on each document holds zero."""

    def alike(method: Method, best: Method) -> bool | None:
        one, other = given.by_document(method, figure), given.by_document(best, figure)
        if not one or not other or len(one) != len(other):
            return None
        found = interval([a - b for a, b in zip(one, other, strict=True)], seed=0)
        if found.low is None or found.high is None:
            return None
        return found.low - SLACK <= 0 <= found.high + SLACK

    return alike
