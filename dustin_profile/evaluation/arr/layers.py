"""ARR layer by layer, and as history grows old (arXiv 2606.24957, Figures 2, 4 and 12)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dustin_profile.evaluation.arr.forced import ForcedRows
from dustin_profile.evaluation.arr.policies import ORACLE, kept, rules
from dustin_profile.search.arr import mass
from dustin_profile.search.evaluate import top
from dustin_profile.search.signals import TraceSignals
from dustin_profile.statistics import interval
from dustin_profile.traces.windows import Windows
from dustin_runtime.config import Selection
from dustin_runtime.selection import select

LAYER_ORACLE, OWN_HISTORY = "oracle-by-layer", "history-by-layer"
LAYER_POLICIES = {
    LAYER_ORACLE: "top k of the layer's own truth",
    ORACLE: "one list for all layers, top k of their mean truth",
    OWN_HISTORY: "a list per layer, chosen by that layer's history as Dustin-T chooses",
    "dustin": "the configured list",
    "dustin-t": "history alone",
    "dustin-d": "lookahead alone",
    "streaming": "first and last tokens",
}
PAST, PAST_LAYER, PAST_KEPT = "all-heads", "history-layer", "dustin-t"
DISTANCE_RULES = {
    PAST: "one past query of all evaluation heads, top k, nothing protected (the paper's Figure 2)",
    PAST_LAYER: "the same of the configured history layer's heads alone",
    PAST_KEPT: "the history layer with sink and window kept, as Dustin-T serves; at distance 1 it is dustin-t",
}


def layer_arr(rows: ForcedRows, windows: Windows, selection: Selection) -> dict[str, list[float]]:
    """ARR of every layer's own attention, mean over the windows of a document, by policy."""
    lists = kept(TraceSignals(windows, selection), [rule for rule in rules() if rule.name in LAYER_POLICIES])
    found: dict[str, list[float]] = {name: [] for name in LAYER_POLICIES}
    for layer, truth in enumerate(rows.truth):
        own = {
            LAYER_ORACLE: top(truth, windows.prefix, selection.budget),
            OWN_HISTORY: _as_dustin_t(windows.history[layer].float(), windows, selection),
        }
        for name, positions in (lists | own).items():
            found[name].append(_arr(truth, positions))
    return found


def distance_arr(
    rows: ForcedRows, windows: Windows, selections: Sequence[Selection], distances: Sequence[int]
) -> list[dict[str, Any]]:
    """Entries of ARR by rule, distance and budget, mean over the windows of a document."""
    entries = []
    for selection in selections:
        best = _arr(windows.truth, top(windows.truth, windows.prefix, selection.budget))
        for index, distance in enumerate(distances):
            lists = {
                PAST: top(rows.past[index], windows.prefix, selection.budget),
                PAST_LAYER: top(rows.past_history[index], windows.prefix, selection.budget),
                PAST_KEPT: _as_dustin_t(rows.past_history[index], windows, selection),
            }
            for rule, positions in lists.items():
                entries.append(
                    {
                        "rule": rule,
                        "distance": distance,
                        "budget": selection.budget,
                        "arr": _arr(windows.truth, positions),
                        "oracle": best,
                    }
                )
    return entries


def summarise_layers(documents: Sequence[Mapping[str, list[float]]]) -> dict[str, list[dict[str, Any]]]:
    """By policy, per layer the mean over documents with its interval."""
    return {
        policy: [
            interval(values, seed=0, share=True)._asdict()
            for values in zip(*(document[policy] for document in documents), strict=True)
        ]
        for policy in documents[0]
    }


def summarise_distances(documents: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The entries of `distance_arr` as means over documents, with what they lack to the oracle, paired."""
    return [
        {
            **{key: entries[0][key] for key in ("rule", "distance", "budget")},
            "arr": interval([entry["arr"] for entry in entries], seed=0, share=True)._asdict(),
            "below_oracle": interval([entry["oracle"] - entry["arr"] for entry in entries], seed=0)._asdict(),
        }
        for entries in zip(*documents, strict=True)
    ]


def _as_dustin_t(scores: Tensor, windows: Windows, selection: Selection) -> Tensor:
    return select(
        None, scores, windows.prefix, budget=selection.budget, m=0, sink=selection.sink, window=selection.window
    )


def _arr(truth: Tensor, positions: Tensor) -> float:
    """Mean over windows; what does not lie on the prefix lies on new tokens, which are always read."""
    lost = truth.double().sum(-1) - mass(truth, positions).sum(-1)
    return float(1 - lost.mean())
