"""What `tools/study_*.py` compared: lists that spend a budget otherwise, other splits of it, and guards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from dustin_profile.evaluation.tells import HINDSIGHT, SHARE, Step, told
from dustin_profile.method_styles import label
from dustin_profile.reporting.blocks import Block, Cell, Content, Figure, Figures, Group, Heading, Row, Table
from dustin_profile.reporting.documents.studies import (
    GuardCell,
    GuardInputs,
    GuardStudy,
    ListStudy,
    SplitStudy,
    Study,
    StudyCell,
    StudyTexts,
    TellsCell,
    TellsStudy,
)
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sections.by_tokens_read import kl_figure
from dustin_profile.reporting.sections.fidelity import read_cell
from dustin_profile.reporting.sections.provenance import models_of
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.studies import (
    BASE,
    Line,
    Pool,
    Splits,
    Text,
    by_tokens_read,
    kinds,
    over,
    pooled,
    settings,
    splits,
    steps_by_cell,
)
from dustin_profile.reporting.titles import slug
from dustin_profile.reporting.wording import cell, count, listed, pair, percent, plain, plural, signed
from dustin_profile.statistics import percentile

DRAWN = (BASE, "specattn-all", "dustin-look", "dustin-rest", "dustin-rest-look")
"""Cells without their budget: one line of each method, as it is served."""
MOST_KINDS = 6
"""Columns that a table has room for."""


def build(evidence: Evidence) -> Content | None:
    lists = pooled([text for source in evidence.of(ListStudy) for text in source.data.texts])
    divided = pooled([text for source in evidence.of(SplitStudy) for text in source.data.texts])
    guards = pooled([text for source in evidence.of(GuardStudy) for text in source.data.texts])
    blocks: list[Block] = []
    for number, pool in enumerate(lists):
        blocks += _lists(pool, _pair(pool.inputs, evidence), slug(number, len(lists)))
    for pool in divided:
        blocks += [Heading(f"Splits of the budget: {_pair(pool.inputs, evidence)}")]
        blocks += [_splits(pool, budget, found) for budget, found in splits(pool).items()]
    for guarded in guards:
        blocks += [Heading(f"Guards and several budgets: {_pair(guarded.inputs, evidence)}"), _guards(guarded)]
    for tells in pooled([text for source in evidence.of(TellsStudy) for text in source.data.texts]):
        blocks += _tells(tells, _pair(tells.inputs, evidence))
    if not blocks:
        return None
    return Content(
        "Ways to spend a budget, by KL against full verification on given texts. Each is compared with Dustin on the"
        " same documents, which are the unit, whichever files they are from; where rows have different documents, the"
        " ratio is what can be compared. What reads more than its list, and as much as a larger budget of Dustin,"
        " stands with that one."
        " A method is what it was when its file was made, and may have changed or gone since.",
        blocks,
    )


def _pair(inputs: StudyTexts, evidence: Evidence) -> str:
    """As other results of the same models call them: a study may have been given files of any name."""
    others = [source.data for source in evidence.sources if not isinstance(source.data, Study)]
    names = {model.sha256: model.id for data in others for model in models_of(data) if model.sha256}
    target, draft = (names.get(one.sha256 or "", one.id) for one in (inputs.models.target, inputs.models.draft))
    return pair(target, draft)


def _lists(pool: Pool[StudyTexts, StudyCell], title: str, suffix: str) -> Iterator[Block]:
    budgets = by_tokens_read(pool)
    if not budgets:
        return
    yield Heading(f"Lists: {title}")
    if figure := _figure(pool, list(budgets), title, suffix):
        yield Figures([figure])
    for budget, lines in budgets.items():
        texts = [text for text in pool.texts if f"{BASE} k{budget}" in text.cells]
        columns = list(kinds(texts)) if 1 < len(kinds(texts)) <= MOST_KINDS else []
        header = ("lists", "tokens read", "KL, nats", "over Dustin's", *columns, "same choice", "documents")
        rows = [_line(line, budget, columns) for line in lines]
        said = " A kind's column: its KL over Dustin's." if columns else ""
        yield Table(f"Selections compared, k = {budget}", header, rows, _note(pool.inputs, texts) + said)
        if places := _places(texts, [line.name for line in lines]):
            header = ("lists", *(str(place) for place in range(1, pool.inputs.depth + 2)), "documents")
            note = (
                "KL by place in a step: first what is verified at the pending token, last at the last drafted one,"
                " which the draft of most methods does not process in its step."
            )
            yield Table(f"KL by place, k = {budget}", header, places, note)


def _line(line: Line, budget: int, columns: Sequence[str]) -> Row:
    cells = [
        _name(line.name),
        read_cell(line.read, budget) if line.read is not None else Cell(""),
        Cell(plain(line.kl, 4)),
        _ratio(line),
        *(Cell(plain(line.by_kind[kind], 2) if kind in line.by_kind else "") for kind in columns),
        Cell(plain(line.agreement) if line.agreement is not None else ""),
        Cell(count(line.documents)),
    ]
    return Row(cells, strong=line.name == f"{BASE} k{budget}")


def _places(texts: Sequence[Text[StudyCell]], names: Sequence[str]) -> list[Row]:
    """Means over the documents that say it."""
    rows = []
    for name in names:
        cells = [text.cells[name].places for text in texts if name in text.cells and text.cells[name].places]
        if cells:
            means = [Cell(plain(mean(place), 4)) for place in zip(*cells, strict=True)]
            rows.append(Row([_name(name), *means, Cell(count(len(cells)))], strong=name.startswith(f"{BASE} k")))
    return rows


def _name(name: str) -> Cell:
    """The method as it is called everywhere, and below it the cell in short."""
    method = name.partition(" ")[0]
    said = settings(name)
    called = [method] if label(method) != method else []
    return Cell(label(method), ", ".join([*called, said]) if said else "")


def _ratio(line: Line) -> Cell:
    if line.ratio is None:
        return Cell("")
    return Cell("1", tone="muted") if line.ratio.low == line.ratio.high == 1 else cell(line.ratio, 2)


def _note(inputs: StudyTexts, texts: Sequence[Text[Any]]) -> str:
    found = kinds(texts)
    of = f" ({listed([f'{number} {kind}' for kind, number in found.items()])})" if len(found) <= MOST_KINDS else ""
    where = ", ".join(part for part in (inputs.device, inputs.dtype) if part)
    return (
        f"{plural(len(texts), 'document')}{of}, context {count(inputs.context)}, up to {count(inputs.tokens)} tokens of"
        f" each verified, {inputs.depth + 1} at a time; {where}. Brackets: 95 % intervals over documents."
    )


def _figure(pool: Pool[StudyTexts, StudyCell], budgets: Sequence[int], title: str, suffix: str) -> Figure | None:
    """Over the documents that have Dustin at every budget: all points are of the same ones."""
    texts = [text for text in pool.texts if all(f"{BASE} k{budget}" in text.cells for budget in budgets)]
    points = []
    for name in pool.names:
        shown = name.rpartition(" k")[0]
        cells = [text.cells[name] for text in texts if name in text.cells]
        if shown in DRAWN and cells and len(cells) == len(texts):
            method = shown.partition(" ")[0]
            points.append((method, mean(one.read for one in cells), mean(one.kl for one in cells)))
    what = f"{title}, {plural(len(texts), 'document')}"
    return kl_figure(points, f"studies-kl{suffix}", what)


def _splits(pool: Pool[StudyTexts, StudyCell], budget: int, found: Splits) -> Table:
    header = ("rule", "KL, nats", "over Dustin's", "share of the gap", "same choice")
    rows: list[Row | Group] = [_split(found, line) for line in found.lines]
    rows += [Group("with hindsight, of the fixed m"), *(_split(found, line) for line in found.hindsight)]
    note = (
        " m n/8: that share of the tokens that are free. Share of the gap: how much of what the best fixed m of each"
        " document would save, in hindsight, a rule saves."
    )
    return Table(f"Splits compared, k = {budget}", header, rows, _note(pool.inputs, pool.texts) + note)


def _split(found: Splits, line: Line) -> Row:
    share = found.share_of_gap(line)
    cells = [
        _name(line.name) if line.agreement is not None else Cell(line.name),
        Cell(plain(line.kl, 4)),
        _ratio(line),
        Cell(signed(share, 2) if share is not None else ""),
        Cell(plain(line.agreement) if line.agreement is not None else ""),
    ]
    return Row(cells, strong=line.name.startswith(f"{BASE} k"))


def _guards(pool: Pool[GuardInputs, GuardCell]) -> Table:
    header = (
        "rule",
        "in full",
        "tokens read",
        "KL, nats",
        "over plain",
        "99th %, steps",
        "99th %, tokens",
        "same choice",
    )
    base = f"{pool.inputs.method} k{pool.inputs.budget}"
    rows = []
    for name in pool.names:
        texts = [text.cells for text in pool.texts if name in text.cells and base in text.cells]
        if not texts:
            continue
        cells = [text[name] for text in texts]
        kl = [mean(one.tokens) for one in cells]
        ratio = over(kl, [mean(text[base].tokens) for text in texts])
        judged = any(one.full for one in cells)
        rows.append(
            Row(
                [
                    Cell(_rule(name, pool.inputs.method)),
                    Cell(percent(mean(mean(one.full or [0]) for one in cells)) if judged else ""),
                    Cell(count(mean(one.read for one in cells))),
                    Cell(plain(mean(kl), 4)),
                    Cell("1", tone="muted") if name == base or not ratio else cell(ratio, 2),
                    Cell(plain(mean(percentile(one.kl) for one in cells))),
                    Cell(plain(mean(percentile(one.tokens) for one in cells))),
                    Cell(plain(mean(one.agreement for one in cells))),
                ],
                strong=name == base,
            )
        )
    note = (
        f" Plain: {label(pool.inputs.method)} at k = {pool.inputs.budget}. Every figure is a mean over documents; 99th"
        " %: of the steps or tokens of each."
    )
    return Table("Guards compared", header, rows, _note(pool.inputs, pool.texts) + note)


def _tells(pool: Pool[StudyTexts, TellsCell], title: str) -> Iterator[Block]:
    for name, documents in steps_by_cell(pool).items():
        rows = [
            Row(
                [
                    Cell(one.signs),
                    Cell(plain(one.rank, 2) if one.rank is not None else ""),
                    Cell(plain(one.mean, 2)),
                    Cell(plain(one.tail, 2)),
                ],
                strong=one.signs == HINDSIGHT,
            )
            for one in told(documents)
        ]
        header = ("told by", "rank correlation", "left of mean KL", "of the 99th %")
        yield Table(f"What tells a step's KL, {_named(name)}: {title}", header, rows, _tells_note(documents))


def _named(name: str) -> str:
    method, _, budget = name.rpartition(" k")
    return f"{label(method)} at k = {budget}"


def _tells_note(documents: Sequence[Sequence[Step]]) -> str:
    kl = [step["kl"] for one in documents for step in one]
    return (
        f"{plural(len(kl), 'step')} of {plural(len(documents), 'document')}, mean KL {plain(mean(kl), 4)}, 99th %"
        f" {plain(percentile(kl))}. Signs are fitted to it on the other documents. What is left: if the"
        f" {percent(SHARE)} of steps of which most is foretold had none. estimate: of what the list leaves out, as the"
        " guard has it; drafted, served: entropy of the draft's and of the served distribution; all: with their KL, and"
        " what dustin-rest's token takes; unread: what the list truly leaves out, which no step knows."
    )


_RULES = (
    (re.compile(r"k(\d+)"), lambda k: f"k = {k}"),
    (re.compile(r"k(\d+) guard (\d*\.?\d+)"), lambda k, share: f"k = {k}, guard for {percent(float(share))} of steps"),
    (re.compile(r"k(\d+) every (\d+)"), lambda k, turns: f"k = {k}, one step in {turns}"),
    (re.compile(r"adaptive (\d*\.?\d+)"), lambda share: f"several k, {percent(float(share))} of steps by the smallest"),
)


def _rule(name: str, method: str) -> str:
    """A cell in words; as it is if it is none that the study makes."""
    rest = name.removeprefix(f"{method} ")
    return next((say(*found.groups()) for form, say in _RULES if (found := form.fullmatch(rest))), name)


SECTION = Section("studies", "Selections compared", "python tools/study_lists.py -o lists.json", build)
