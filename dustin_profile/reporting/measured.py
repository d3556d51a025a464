"""All that was measured of the methods of each pair, as figures of one kind beside each other, whichever files say it.

Figures of one kind are of one set of texts: files on other texts are named, not mixed in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import BaseModel

from dustin_profile.evaluation.longbench.table import load_table
from dustin_profile.reporting.documents.common import Estimate
from dustin_profile.reporting.documents.evaluation import Drift, Evaluation, Fidelity, FidelityCell, Row
from dustin_profile.reporting.sources import Evidence, Source
from dustin_profile.reporting.titles import pair_of

T = TypeVar("T", bound=BaseModel)
Method = tuple[str, int | None]
"""Name and budget; None where the whole cache is verified with."""
TASKS = ("needle", "recall", "longbench")
"""What is answered, in the order of the table; others come after."""
METRICS = {
    **{"found": "facts found", "recalled": "facts recalled", "f1": "F1", "rouge_l": "ROUGE-L"},
    **{"classification": "share of classes right", "count": "share of counts right", "retrieval": "share found"},
    "edit_similarity": "edit similarity",
}


@dataclass(frozen=True)
class Given:
    """Fidelity on given texts, the same ones in every source."""

    sources: Sequence[Source[Fidelity]]

    @property
    def data(self) -> Fidelity:
        return self.sources[0].data

    @property
    def cells(self) -> dict[Method, FidelityCell]:
        """By method and budget, in the order of the files."""
        found: dict[Method, FidelityCell] = {}
        for source in self.sources:
            for method, cell in source.data.cells.items():
                found.setdefault(method, cell)
        return found

    @property
    def full_read(self) -> float:
        reads = [document.full.read for document in self.data.documents]
        return sum(reads) / len(reads)

    def by_document(self, method: Method, figure: str) -> list[float] | None:
        """One figure of a method on every document, all in one order; None where the file has it as a mean alone."""
        name = f"{method[0]}-k{method[1]}"
        for source in self.sources:
            found = [
                getattr(document.cells[name], figure) for document in source.data.documents if name in document.cells
            ]
            if found:
                whole = len(found) == len(source.data.documents) and None not in found
                return found if whole else None
        return None


@dataclass(frozen=True)
class Score:
    """What a method's answers to a task are worth.

    Attributes:
        own: the same with its interval; None for an average over tasks that no interval is known of.
        minus: difference from vanilla, paired by item, over all items.
        read: prefix tokens that a step reads.
    """

    value: float
    own: Estimate | None = None
    minus: Estimate | None = None
    read: float | None = None


@dataclass(frozen=True)
class Task:
    """Answers to one task.

    Attributes:
        title: task and figure, such as `needle, facts found`.
        averaged: how many tasks a score is the average of.
    """

    sources: Sequence[Source[Evaluation]]
    title: str
    items: int
    scores: Mapping[Method, Score]
    averaged: int = 1

    @property
    def name(self) -> str:
        return self.sources[0].data.task


@dataclass(frozen=True)
class Books:
    """Long books continued."""

    sources: Sequence[Source[Evaluation]]
    entries: Mapping[Method, Row]

    @property
    def name(self) -> str:
        return self.sources[0].data.task


@dataclass(frozen=True)
class DriftCell:
    kl: Estimate
    agreement: Estimate
    tau: float | None = None


@dataclass(frozen=True)
class Drifts:
    """Distance from full verification while text is generated.

    Attributes:
        basis: what it was measured on; figures of another basis are not compared with these.
    """

    context: int
    tokens: int
    texts: int
    cells: Mapping[Method, DriftCell]
    basis: Hashable = ()


@dataclass(frozen=True)
class Acceptance:
    """τ of each method, of the longest texts that were generated, and what these are."""

    of: str
    tokens: float
    tau: Mapping[Method, Estimate]


@dataclass(frozen=True)
class Measured:
    """One pair.

    Attributes:
        left_out: files on other texts than those that the figures of their kind are of.
        again: files that have a method and budget that a file before them has, which is the one that counts.
    """

    pair: str
    given: Given | None = None
    tasks: Sequence[Task] = ()
    books: Books | None = None
    drifts: Drifts | None = None
    acceptance: Acceptance | None = None
    left_out: Sequence[str] = ()
    again: Sequence[str] = ()

    @property
    def kinds(self) -> int:
        """How many kinds of evidence there are."""
        return len([one for one in (self.given, *self.tasks, self.books, self.drifts) if one])

    @property
    def methods(self) -> list[Method]:
        """In the order of the files, each once; full verification is known wherever fidelity to it is."""
        found: list[Method] = [("vanilla", None)] if self.given else []
        for cells in (
            self.given.cells if self.given else {},
            *(task.scores for task in self.tasks),
            self.books.entries if self.books else {},
            self.drifts.cells if self.drifts else {},
        ):
            found += cells
        return list(dict.fromkeys(found))

    @property
    def read(self) -> dict[Method, float]:
        """Prefix tokens that a step reads: on given texts, else on those of the first evaluation that counted them."""
        found: dict[Method, float] = {}
        if self.given:
            found |= {method: cell.read for method, cell in self.given.cells.items()}
            found |= {method: self.given.full_read for method in self.methods if method[1] is None}
        entries = self.books.entries if self.books else {}
        others = [{method: entry.tokens_read for method, entry in entries.items()}]
        others += [{method: score.read for method, score in task.scores.items()} for task in self.tasks]
        for reads in others:
            for method, value in reads.items():
                if value is not None:
                    found.setdefault(method, value)
        return found


def measured(evidence: Evidence) -> list[Measured]:
    """Every pair that a method was measured of, that with most kinds of evidence first."""
    kinds = (Fidelity, Evaluation, Drift)
    pairs = dict.fromkeys(pair_of(source.data) for kind in kinds for source in evidence.of(kind))
    return sorted((_of_pair(evidence, pair) for pair in pairs if pair), key=lambda one: -one.kinds)


def compared(evidence: Evidence) -> list[Measured]:
    """Those pairs that two kinds of evidence or more are known of: what a table of all kinds is worth making for."""
    return [one for one in measured(evidence) if one.kinds > 1]


def _of_pair(evidence: Evidence, pair: str) -> Measured:
    left_out: list[str] = []
    again: list[str] = []

    def chosen(
        sources: Sequence[Source[T]], basis: Callable[[T], Hashable], cells: Callable[[T], Iterable[Method]]
    ) -> list[Source[T]]:
        """Those on one basis: that of the most figures, the first of equals."""
        groups: dict[Hashable, list[Source[T]]] = {}
        for source in sources:
            groups.setdefault(basis(source.data), []).append(source)
        best = max(groups.values(), key=lambda group: len({*_all(group, cells)}), default=[])
        left_out.extend(source.name for source in sources if source not in best)
        for number, source in enumerate(best):
            if {*cells(source.data)} & {*_all(best[:number], cells)}:
                again.append(source.name)
        return best

    given = chosen(
        [source for source in evidence.of(Fidelity) if pair_of(source.data) == pair],
        _given_basis,
        lambda data: data.cells,
    )
    answers: dict[str, list[Source[Evaluation]]] = {}
    books = []
    for source in evidence.of(Evaluation):
        if pair_of(source.data) == pair:
            if source.data.of_books:
                books.append(source)
            else:
                answers.setdefault(source.data.task, []).append(source)
    order = [name for name in TASKS if name in answers] + [name for name in answers if name not in TASKS]
    tasks = [_task(chosen(answers[name], _answers_basis, _methods)) for name in order]
    of_books = chosen(books, _answers_basis, _methods)
    drifted = [source for source in evidence.of(Drift) if pair_of(source.data) == pair]
    drifts = chosen(drifted, lambda data: drifts_of(data).basis, lambda data: drifts_of(data).cells)
    known = Measured(
        pair,
        Given(given) if given else None,
        tasks,
        Books(of_books, _entries(of_books)) if of_books else None,
        _merged([drifts_of(source.data) for source in drifts]),
        left_out=left_out,
        again=again,
    )
    return replace(known, acceptance=_acceptance(known))


def _all(sources: Iterable[Source[T]], cells: Callable[[T], Iterable[Method]]) -> Iterator[Method]:
    return (method for source in sources for method in cells(source.data))


def drifts_of(data: Drift) -> Drifts:
    """What a file of `dustin-profile drift` says."""
    inputs = data.inputs
    cells = {(cell.method, cell.budget): DriftCell(cell.kl, cell.agreement, cell.tau) for cell in data.summary.values()}
    documents = tuple((document.id, document.prompt_tokens) for document in data.documents)
    basis = (
        inputs.data_sha256,
        inputs.tokens,
        inputs.temperature,
        inputs.depth,
        inputs.dtype,
        inputs.device,
        documents,
    )
    return Drifts(inputs.context, inputs.tokens, len(documents), cells, basis)


def _given_basis(data: Fidelity) -> Hashable:
    inputs = data.inputs
    documents = tuple((document.id, document.prompt_tokens, document.text_tokens) for document in data.documents)
    return (inputs.data_sha256, inputs.depth, inputs.dtype, inputs.device, documents)


def _answers_basis(data: Evaluation) -> Hashable:
    inputs = data.inputs
    counts = frozenset((entry.items, *sorted(entry.group.items())) for entry in data.entries)
    return (repr(sorted(inputs.items.items())), inputs.depth, inputs.dtype, inputs.device, counts)


def _totals(data: Evaluation) -> list[Row]:
    """Of all items."""
    return [entry for entry in data.entries if not entry.group]


def _methods(data: Evaluation) -> list[Method]:
    return [(entry.method, entry.budget) for entry in _totals(data)]


def _entries(sources: Sequence[Source[Evaluation]]) -> dict[Method, Row]:
    found: dict[Method, Row] = {}
    for source in sources:
        for entry in _totals(source.data):
            found.setdefault((entry.method, entry.budget), entry)
    return found


def _task(sources: Sequence[Source[Evaluation]]) -> Task:
    entries = _entries(sources)
    averages = {(one.method, one.budget): one for source in reversed(sources) for one in source.data.averages}
    scores = {}
    for method, entry in entries.items():
        name, own = next(iter(entry.scores.items()))
        minus = (entry.minus_vanilla or {}).get(name)
        average = averages.get(method)
        if average and abs(average.plain - own.mean) > 1e-9:  # tasks of unequal size: no interval is of this figure
            scores[method] = Score(average.plain, None, minus, entry.tokens_read)
        else:
            scores[method] = Score(own.mean, own, minus, entry.tokens_read)
    data = sources[0].data
    tasks = list(dict.fromkeys(entry.group["task"] for entry in data.entries if "task" in entry.group))
    items = max((entry.items for entry in entries.values()), default=0)
    return Task(sources, _title(data, tasks), items, scores, max(len(tasks), 1))


def _title(data: Evaluation, tasks: Sequence[str]) -> str:
    """Task and figure: `needle, facts found`, `multi_news, ROUGE-L`, `longbench, average of 3 tasks`."""
    if len(tasks) > 1:
        return f"{data.task}, average of {len(tasks)} tasks"
    name = tasks[0] if tasks else data.task
    score = load_table()[name].metric if name in load_table() else next(iter(data.entries[0].scores))
    return f"{name}, {METRICS.get(score, score)}"


def _merged(found: Sequence[Drifts]) -> Drifts | None:
    if not found:
        return None
    cells: dict[Method, DriftCell] = {}
    for one in found:
        cells = dict(one.cells) | cells
    first = found[0]
    return Drifts(first.context, first.tokens, first.texts, cells, first.basis)


def _acceptance(known: Measured) -> Acceptance | None:
    """τ where the longest texts were generated: a short one says little of how far a draft gets."""
    found = []
    evaluations = [(task.title.partition(",")[0], _entries(task.sources)) for task in known.tasks]
    if known.books:
        evaluations.append((known.books.name, dict(known.books.entries)))
    for of, entries in evaluations:
        lengths = [entry.new_tokens for entry in entries.values() if entry.new_tokens]
        tau = {
            method: entry.tau_by_document or Estimate(mean=entry.tau)
            for method, entry in entries.items()
            if entry.tau is not None
        }
        if tau:
            found.append(Acceptance(of, sum(lengths) / len(lengths) if lengths else 0.0, tau))
    if known.drifts:
        drifted = {
            method: Estimate(mean=cell.tau) for method, cell in known.drifts.cells.items() if cell.tau is not None
        }
        if drifted:
            found.append(Acceptance("drift", known.drifts.tokens, drifted))
    return max(found, key=lambda one: one.tokens, default=None)
