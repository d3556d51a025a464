"""Long books continued: the perplexity of what they say next, and speed and repetition of each method's own text."""

from __future__ import annotations

import math
from functools import partial

from dustin_profile.method_styles import label, style
from dustin_profile.reporting.blocks import Block, Cell, Content, Figure, Figures, Heading, Row, Table
from dustin_profile.reporting.charts import Mark, intervals
from dustin_profile.reporting.documents.common import Estimate
from dustin_profile.reporting.documents.evaluation import Evaluation
from dustin_profile.reporting.documents.evaluation import Row as Entry
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.titles import pair_of, slug
from dustin_profile.reporting.wording import cell, count, interval, plain, plural, signed

HEADER = ("method", "perplexity", "over full's", "KL, nats", "tokens read", "τ", "tokens/s", "over vanilla", "distinct")


def build(evidence: Evidence) -> Content | None:
    found = [source.data for source in evidence.of(Evaluation) if source.data.of_books]
    blocks: list[Block] = []
    for number, data in enumerate(found):
        title = f"{data.task}: {pair_of(data)}"
        blocks.append(Heading(title))
        marks = [
            Mark(_name(entry), _percent(entry.loss_difference), style(entry.method))
            for entry in data.entries
            if entry.loss_difference
        ]
        if marks:
            figure = Figure(
                f"books{slug(number, len(found))}",
                "Perplexity of the books' own text over full verification's, in percent; at zero nothing is lost.",
                f"Perplexity of each method relative to full verification: {title}",
                partial(intervals, marks=marks, xlabel="perplexity over full's, %", zero=True, form=".1f"),
                height=0.95 + 0.34 * len(marks),
            )
            blocks.append(Figures([figure]))
        blocks.append(_table(data))
    if not blocks:
        return None
    return Content(
        "Perplexity and KL are of what the books themselves say next, verified as if every draft were right; methods"
        " that verify in full share one. The other columns are of the text that each method writes by itself: τ is how"
        " many tokens a step emits, distinct its distinct sequences of four words over all of them. A text that"
        " repeats itself is easy to draft, so a high τ beside a low share is no merit.",
        blocks,
    )


def said(entry: Entry, full: float) -> str:
    """Perplexity beside full verification's."""
    text = f"of the books' own text; {plain(full, 1)} in full"
    return text + (f": {_relative(entry.loss_difference)}." if entry.loss_difference else ".")


def _relative(loss: Estimate) -> str:
    ratio = _percent(loss)
    reach = interval(ratio, 1, sign=True)
    return f"{signed(ratio.mean, 1)} % {reach}".strip()


def _percent(loss: Estimate) -> Estimate:
    """Perplexity over full verification's, in percent, from the difference of losses."""
    ends = {name: _grown(value) for name in ("mean", "low", "high") if (value := getattr(loss, name)) is not None}
    return loss.model_copy(update=ends)


def _grown(loss: float) -> float:
    return 100 * math.expm1(loss)


def _name(entry: Entry) -> str:
    return label(entry.method) + (f", k = {entry.budget}" if entry.budget else "")


def _table(data: Evaluation) -> Table:
    rows = [_row(entry) for entry in data.entries if not entry.group]
    inputs = data.inputs
    where = ", ".join(part for part in (inputs.device, inputs.dtype) if part)
    books = max(entry.items for entry in data.entries)
    texts = {count(entry.prompt_tokens) for entry in data.entries if entry.prompt_tokens}
    of = f" of {' or '.join(sorted(texts))} tokens" if texts else ""
    note = (
        f"{plural(books, 'prompt')}{of}, depth {inputs.depth}; {where}. tokens/s is what one reader sees, on that"
        " device. τ and tokens/s are means over prompts, each of which counts the same; brackets: 95 % over documents."
    )
    return Table("Perplexity, speed and repetition", HEADER, rows, note, markdown=True).without_empty()


def _row(entry: Entry) -> Row:
    distinct = entry.scores.get("distinct")
    over = _percent(entry.loss_difference) if entry.loss_difference else None
    cells = [
        Cell(label(entry.method), f"k = {entry.budget}" if entry.budget else ""),
        Cell("" if entry.perplexity is None else plain(entry.perplexity, 2)),
        Cell(f"{signed(over.mean, 1)} %", interval(over, 1, sign=True)) if over else Cell(""),
        cell(entry.kl) if entry.kl else Cell("0", tone="muted"),
        Cell("" if entry.tokens_read is None else count(entry.tokens_read)),
        _figure(entry.tau_by_document, entry.tau, 2),
        _figure(entry.speed_by_document, entry.tokens_per_s, 2),
        cell(entry.speed_over_vanilla, 2) if entry.speed_over_vanilla else Cell(""),
        Cell(plain(distinct.mean, 2) if distinct else ""),
    ]
    return Row(cells, strong=style(entry.method).own)


def _figure(by_document: Estimate | None, pooled: float | None, decimals: int) -> Cell:
    if by_document:
        return cell(by_document, decimals)
    return Cell("" if pooled is None else plain(pooled, decimals))


SECTION = Section("books", "Books continued", "dustin-profile eval pg19", build)
