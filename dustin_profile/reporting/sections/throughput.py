"""A search for throughput: which configurations no other one beats in both ARR and predicted speed."""

from __future__ import annotations

from dustin_profile.reporting.blocks import Cell, Row, Table
from dustin_profile.reporting.documents.search import Candidate, Throughput
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
