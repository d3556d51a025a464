"""A search for throughput: which configurations no other one beats in both ARR and predicted speed."""

from __future__ import annotations

from dustin_profile.reporting.blocks import Cell, Row, Table
from dustin_profile.reporting.documents.search import Candidate, Latency, Throughput, Timing
from dustin_profile.reporting.wording import cell, count, listed, percent, plain, plural

HEADER = ("configuration", "draft layers", "draft cache", "ARR (95 %)", "step ms", "τ", "tokens/s, predicted (95 %)")


def front_table(found: Throughput, title: str) -> Table:
    """The chosen configuration among those on the front, the fastest first."""
    shown = found.front if found.chosen in found.front else [found.chosen, *found.front]
    device = found.latency
    note = (
        "Speed is predicted, not measured: from what the draft gets right on the traced continuations (τ, of lossless"
        f" greedy verification), and a model of the time of a step. Batch {found.batch}, {count(found.context)} tokens"
        f" of synthetic context, {device.device}, {device.dtype}; the model is off by"
        f" {percent(device.max_relative_error)} at most on steps that it was not fitted to. ARR is that of the traced"
        " depth."
    )
    if any(found.candidates[index].assumed_arr for index in shown):
        note += " ARR of sink+window is assumed to be that of a draft that reads everything."
    return Table(
        f"ARR against predicted speed: of {plural(len(found.candidates), 'candidate')} for {title}, those that no"
        " other one beats in both.",
        HEADER,
        [_row(found.candidates[index], index == found.chosen) for index in shown],
        note=note,
        text_columns=frozenset({0, 1, 2}),
    )


def rests_on(search: Throughput, timed: Latency) -> bool:
    """Whether a search was made with these steps, rather than with those that they have replaced."""
    same = (search.batch, search.context) == (timed.inputs.batch, timed.inputs.context)
    return same and search.latency == Timing(**timed.model_dump(include=set(Timing.model_fields)))


STEPS_HEADER = ("step", "draft layers scored", "draft cache", "ms", "predicted", "off by", "fitted")


def steps_table(found: Latency, title: str) -> Table:
    """The steps that the model of a step's time was fitted to, and those that it was not."""
    served = found.inputs
    return Table(
        f"Time of a step on {found.device}, {found.dtype}, for {title}: measured, and predicted by the model that the"
        " fitted ones made.",
        STEPS_HEADER,
        [
            Row(
                [
                    Cell(f"k = {count(step.budget)}, depth {step.depth}" + ("" if step.history else ", no history")),
                    Cell(str(step.layers)),
                    Cell("sink+window" if step.windowed else "full"),
                    Cell(plain(step.ms, 2)),
                    Cell(plain(step.predicted_ms, 2)),
                    Cell(percent(abs(step.predicted_ms / step.ms - 1))),
                    Cell("yes" if step.fitted else "no"),
                ],
                strong=not step.fitted,
            )
            for step in found.measurements
        ],
        note=f"Batch {served.batch}, {count(served.context)} tokens of synthetic context.",
        text_columns=frozenset({0, 2, 6}),
    )


def _row(entry: Candidate, chosen: bool) -> Row:
    return Row(
        [
            Cell(f"k = {count(entry.budget)}, m = {count(entry.m)}, depth {entry.depth}", "chosen" if chosen else ""),
            Cell(listed([str(layer) for layer in entry.draft_layers]) if entry.draft_layers else "none"),
            Cell(entry.draft_cache),
            cell(entry.arr),
            Cell(plain(entry.step_ms, 2)),
            cell(entry.tau, 2),
            cell(entry.tokens_per_s, 1),
        ],
        strong=chosen,
    )
