"""The documents of all files of a study together, and cells beside Dustin on the same ones."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any, Generic, TypeVar

from dustin_profile.reporting.documents.common import Estimate, Part
from dustin_profile.reporting.documents.studies import StudyCell, StudyDocument, StudyTexts, TellsCell
from dustin_profile.statistics import interval

T = TypeVar("T", bound=StudyTexts)
C = TypeVar("C", bound=Part)
BASE = "dustin"
"""What the others are compared with, at its configured m."""


@dataclass(frozen=True)
class Text(Generic[C]):
    """A document, which is the unit: its kind, and all cells that any file has of it."""

    kind: str
    cells: dict[str, C] = field(default_factory=dict)


@dataclass(frozen=True)
class Pool(Generic[T, C]):
    """Documents that one pair verified with one config, at one length."""

    inputs: T
    texts: Sequence[Text[C]]

    @property
    def names(self) -> list[str]:
        """Of all cells, in the order of the files."""
        return list(dict.fromkeys(name for text in self.texts for name in text.cells))


def steps_by_cell(pool: Pool[StudyTexts, TellsCell]) -> dict[str, list[list[dict[str, float]]]]:
    """By cell, the steps of every document that has it."""
    return {
        name: [[step.model_dump() for step in text.cells[name].steps] for text in pool.texts if name in text.cells]
        for name in pool.names
    }


def kinds(texts: Iterable[Text[Any]]) -> dict[str, int]:
    """How many documents there are of each kind."""
    return dict(sorted(Counter(text.kind for text in texts).items()))


def pooled(found: Sequence[tuple[T, StudyDocument[C]]]) -> list[Pool[T, C]]:
    """Documents of all files, each once: where two have the same cell of one, the first counts.

    An older file that does not name its data is taken to be of the same as another that has a document of that id.
    """
    data = {(_setup(inputs), one.id): inputs.data_sha256 for inputs, one in found if inputs.data_sha256}
    first: dict[str, T] = {}
    texts: dict[str, dict[tuple[str, str], Text[C]]] = {}
    for inputs, one in found:
        setup = _setup(inputs)
        first.setdefault(setup, inputs)
        key = (inputs.data_sha256 or data.get((setup, one.id), ""), one.id)
        text = texts.setdefault(setup, {}).setdefault(key, Text(one.group))
        for name, cell in one.cells.items():
            text.cells.setdefault(name, cell)
    return [Pool(inputs, list(texts[setup].values())) for setup, inputs in first.items()]


def _setup(inputs: StudyTexts) -> str:
    """What must be the same of documents that are compared. Models are known by their hashes, or by their names."""
    models = [one.sha256 or one.id for one in (inputs.models.target, inputs.models.draft)]
    rest = inputs.model_dump(mode="json", exclude={"models", "data_sha256", "device"})
    return json.dumps([models, rest], sort_keys=True)


@dataclass(frozen=True)
class Line:
    """A cell beside Dustin on the documents that have both.

    Attributes:
        kl: mean over documents, as are `read` and `agreement`, which a choice among cells does not have.
        ratio: mean KL over Dustin's; None where Dustin has none.
        by_kind: the same of each kind.
    """

    name: str
    documents: int
    kl: float
    ratio: Estimate | None
    by_kind: dict[str, float]
    read: float | None = None
    agreement: float | None = None


def compared(texts: Iterable[Text[StudyCell]], name: str, base: str) -> Line | None:
    """None where no document has both."""
    both = [text for text in texts if name in text.cells and base in text.cells]
    if not both:
        return None
    cells = [text.cells[name] for text in both]
    read, agreement = mean(cell.read for cell in cells), mean(cell.agreement for cell in cells)
    return replace(_beside(name, both, [cell.kl for cell in cells], base), read=read, agreement=agreement)


def _beside(name: str, texts: Sequence[Text[StudyCell]], kl: Sequence[float], base: str) -> Line:
    """Of one KL for each document, perhaps of another cell in each."""
    pairs = [(text.kind, value, text.cells[base].kl) for text, value in zip(texts, kl, strict=True)]
    by_kind = {}
    for kind in kinds(texts):
        found = over([mine for of, mine, _ in pairs if of == kind], [other for of, _, other in pairs if of == kind])
        if found:
            by_kind[kind] = found.mean
    return Line(name, len(texts), mean(kl), over(kl, [other for *_, other in pairs]), by_kind)


def over(values: Sequence[float], base: Sequence[float]) -> Estimate | None:
    """Ratio of the means over documents, with the interval of a ratio of two sums; None over a base of zero."""
    below = mean(base)
    if below <= 0:
        return None
    ratio = mean(values) / below
    spread = [ratio + (value - ratio * other) / below for value, other in zip(values, base, strict=True)]
    return Estimate(**interval(spread, seed=0)._asdict())


def budget_of(name: str) -> int:
    """That a cell was given."""
    return int(name.rpartition(" k")[2])


def by_tokens_read(pool: Pool[StudyTexts, StudyCell]) -> dict[int, list[Line]]:
    """Cells beside Dustin, by budget, the best first.

    A cell that reads another budget than its own, in which Dustin was measured too, stands with that one: a list of 250
    and six tokens besides with the lists of 256. Budgets of Dustin alone are left out.
    """
    names = pool.names
    found: dict[int, list[Line]] = {}
    for name in names:
        read = round(mean(text.cells[name].read for text in pool.texts if name in text.cells))
        budget = read if f"{BASE} k{read}" in names else budget_of(name)
        if line := compared(pool.texts, name, f"{BASE} k{budget}"):
            found.setdefault(budget, []).append(line)
    kept = {budget: lines for budget, lines in sorted(found.items()) if len(lines) > 1}
    return {
        budget: sorted(lines, key=lambda line: line.ratio.mean if line.ratio else 0) for budget, lines in kept.items()
    }


@dataclass(frozen=True)
class Splits:
    """How the budget is split, at one budget.

    Attributes:
        lines: all cells, the best first.
        hindsight: KL of the best fixed m of each kind, and of each document.
    """

    lines: Sequence[Line]
    hindsight: Sequence[Line]

    def share_of_gap(self, line: Line) -> float | None:
        """How much of what the best fixed m of each document saves, it saves too; None where that saves nothing."""
        full = next(one.kl for one in self.lines if one.name.startswith(f"{BASE} k"))
        gap = full - self.hindsight[-1].kl
        return (full - line.kl) / gap if gap > 0 else None


def splits(pool: Pool[StudyTexts, StudyCell]) -> dict[int, Splits]:
    """By budget, over the documents that have every cell of it."""
    found = {}
    for budget in sorted({budget_of(name) for name in pool.names}):
        names = [name for name in pool.names if budget_of(name) == budget]
        base = f"{BASE} k{budget}"
        texts = [text for text in pool.texts if all(name in text.cells for name in names)]
        if base not in names or not texts:
            continue
        fixed = [name for name in names if name == base or name.startswith(f"{BASE} m ")]
        best = {kind: _best(fixed, [text for text in texts if text.kind == kind]) for kind in kinds(texts)}
        by_kind = [text.cells[best[text.kind]].kl for text in texts]
        by_document = [min(text.cells[name].kl for name in fixed) for text in texts]
        lines = [line for name in names if (line := compared(texts, name, base))]
        hindsight = [
            _beside("best m of each kind", texts, by_kind, base),
            _beside("best m of each document", texts, by_document, base),
        ]
        found[budget] = Splits(sorted(lines, key=lambda line: line.kl), hindsight)
    return found


def _best(names: Sequence[str], texts: Sequence[Text[StudyCell]]) -> str:
    return min(names, key=lambda name: mean(text.cells[name].kl for text in texts))


_FIELD = re.compile(r"(\w+) (?=[\[{\"\d.-]|true|false|null)")


def settings(name: str) -> str:
    """A cell's settings in words; empty without any. What is no list of fields and JSON values stays as it is."""
    rest = name.rpartition(" k")[0].partition(" ")[2]
    said, left = [], rest
    while left:
        key = _FIELD.match(left)
        if not key:
            return rest
        try:
            value, end = json.JSONDecoder().raw_decode(left, key.end())
            said.append(_words(key[1], value))
        except (ValueError, KeyError, TypeError):
            return rest
        left = left[end:].lstrip()
    return ", ".join(said)


def _words(key: str, value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    if key == "lookahead" and isinstance(value, list):
        return _heads([(one["layer"], one["heads"]) for one in value])
    return f"{key} {value}"


def _heads(layers: Sequence[tuple[int, list[int]]]) -> str:
    """Layers of the draft, all in short where none and no head is left out."""
    heads = layers[0][1] if layers else []
    whole = len(layers) > 1 and heads == list(range(len(heads)))
    if whole and layers == [(layer, heads) for layer in range(len(layers))]:
        return "all draft heads"
    return f"lookahead of {sum(len(heads) for _, heads in layers)} heads in {len(layers)} layers"
