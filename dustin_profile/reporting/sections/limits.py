"""What the numbers do not show, from what the files say about themselves."""

from __future__ import annotations

from collections.abc import Iterator

from dustin_profile.method_styles import label
from dustin_profile.reporting.blocks import Bullets, Content
from dustin_profile.reporting.documents.evaluation import Drift, Evaluation, Fidelity
from dustin_profile.reporting.documents.run import AttentionBench
from dustin_profile.reporting.documents.search import SearchResults
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sections.bench import case_name, unexplained_ms
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.speeds import ranked, synthetic
from dustin_profile.reporting.titles import pair_of, pairs
from dustin_profile.reporting.wording import count, listed, percent, plain, plural

FEW = 16
"""Documents below which an interval leans on the assumption that they are alike (`statistics.interval`)."""


WIDE = 0.1
"""Width of an interval that is worth a word."""
Found = Iterator[tuple[str, str]]
"""What it is about, and what is to be said."""


def build(evidence: Evidence) -> Content | None:
    found = list(
        dict.fromkeys(
            [*_searches(evidence), *_fidelities(evidence), *_drifts(evidence), *_answers(evidence), *_speed(evidence)]
        )
    )
    if not found:
        return None
    bullets = Bullets([text for _, text in found], [lead for lead, _ in found])
    return Content("What these numbers do not show, or show only in part.", [bullets])


def _searches(evidence: Evidence) -> Found:
    if evidence.of(SearchResults):
        yield (
            "ARR is a proxy.",
            "It is computed on traces of full verification. What it means for predictions is the matter of fidelity,"
            " what it means for long texts that of drift.",
        )
    for source in evidence.of(SearchResults):
        data = source.data
        reported = data.documents.reported.values()
        name = f"{pair_of(data)}, k = {data.selection.budget}:"
        if data.split != "held_out":
            yield name, f"measured on the documents that the config was chosen on ({data.split}), so too kind."
        if len(reported) < FEW:
            sources = len({entry.source for entry in reported})
            yield (
                name,
                f"reported on {plural(len(reported), 'document')} of {plural(sources, 'source')}, of"
                f" {count(data.traces.context)} tokens. Other texts and longer contexts may differ.",
            )


def _fidelities(evidence: Evidence) -> Found:
    for source in evidence.of(Fidelity):
        data = source.data
        prompts = [document.prompt_tokens for document in data.documents]
        texts = [document.text_tokens for document in data.documents]
        yield (
            f"Fidelity of {pair_of(data)}:",
            f"{plural(len(prompts), 'document')} of up to {count(max(prompts))} tokens, and texts of up to {max(texts)}"
            " right behind them, which favours methods that choose once, at the prompt's end.",
        )
        wide = [method for (method, budget), cell in data.cells.items() if cell.read > budget + 0.5]
        if wide:
            methods = listed([f"“{label(method)}”" for method in dict.fromkeys(wide)])
            yield "Not at equal cost:", f"{methods} read more than their budget; compare them at the tokens they read."


def _drifts(evidence: Evidence) -> Found:
    for source in evidence.of(Drift):
        prompts, tokens = len(source.data.documents), source.data.inputs.tokens
        if prompts < FEW:
            what = f"{plural(prompts, 'prompt')}, {count(tokens)} tokens each, so intervals are wide."
            yield f"Drift, {source.name}:", what


def _answers(evidence: Evidence) -> Found:
    for source in evidence.of(Evaluation):
        if source.data.of_books:
            books = max(entry.items for entry in source.data.entries)
            if books < FEW:
                yield f"{source.data.task}:", f"{plural(books, 'prompt')}, so intervals are wide."
            continue
        entries = [entry for entry in source.data.entries if not entry.group] or source.data.entries
        reach = [entry.scores[next(iter(entry.scores))] for entry in entries]
        widest = max((x.high - x.low for x in reach if x.low is not None and x.high is not None), default=0.0)
        if widest > WIDE:
            items = max(entry.items for entry in entries)
            yield f"{source.data.task}:", f"{plural(items, 'item')}; intervals are up to {plain(widest, 2)} wide."


def _speed(evidence: Evidence) -> Found:
    quality = pairs(evidence)
    benches = ranked(evidence)
    both = any(pair_of(source.data) in quality for source in benches)
    for source in benches:
        data, name = source.data, pair_of(source.data) or ""
        if assumed := synthetic(data):
            yield (
                f"Speed of {name} is synthetic:",
                f"{', '.join(assumed)}. Times of a step are real, the tokens that a step emits are assumed.",
            )
        elif any(row.acceptance_per_position for row in data.rows):
            yield (
                f"Speed of {name}:",
                "sparse methods do not write vanilla's text, so each τ is of another text; a higher τ is no merit of"
                " the method.",
            )
        for row in data.rows:
            if rest := unexplained_ms(row):
                yield (
                    f"{name}, {case_name((row.batch, row.context))}:",
                    f"vanilla took {plain(row.step_ms, 2)} ms where its parts, timed alone, sum to"
                    f" {plain(row.step_ms - rest, 2)}; ratios to it may flatter by up to"
                    f" {percent(rest / (row.step_ms - rest))}.",
                )
        if both and name not in quality:
            yield f"Quality of {name}", "was not measured: its speed shows other shapes."
    if benches and quality and not both:
        speeds = listed([pair_of(source.data) or "" for source in benches])
        yield "Different pairs:", f"quality is that of {listed(quality)}, speed that of {speeds}."
    if quality and not benches:
        yield "No speed was measured:", "how much time is saved is not shown."
    for other in evidence.of(AttentionBench):
        if other.data.data == "synthetic":
            yield (
                "Attention alone",
                "was timed on synthetic caches: times are real, the tokens it kept mean nothing.",
            )


SECTION = Section("limits", "Limits", "", build)
