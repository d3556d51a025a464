"""When enough documents have been traced: an order of which every beginning is like the whole, and how much another
choice than the search's could gain.

Only documents that a search would choose on are asked: held-out ones decide nothing, not even their number. Looking
after every batch stops a little too early more often than the level of one interval says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dustin_profile.evaluation.draw import Draw
from dustin_profile.search.phases import SearchOptions, SearchResult, search, usable
from dustin_profile.statistics import Interval, held_out_names, interval, split, upper_ends
from dustin_profile.traces.resident import to_device
from dustin_profile.traces.store import TraceStore
from dustin_profile.traces.windows import Windows

BATCH = 4
"""Documents between two looks. The same for any number of processes, or they would stop at different ones."""
_SEED = 0

Known = dict[Hashable, Tensor]
"""Of a document's id and the choices so far: what the search measured."""


@dataclass(frozen=True)
class Decision:
    """The rule by which tracing ends.

    Attributes:
        held_out: share of the documents that the search will not see.
        within: ARR that another choice may at most gain, and half-width of hybrid minus history alone.
        least: documents that are looked at before anything is decided.
        device: where traces are ranked.
    """

    options: SearchOptions
    held_out: float
    within: float
    least: int
    device: str = "cpu"
    _known: Known = field(default_factory=dict, repr=False, compare=False)

    def batches(self, documents: Sequence[dict[str, Any]]) -> list[list[int]]:
        """Indices of documents (`id`, `source`), in the order in which they are traced."""
        order = in_order([d["id"] for d in documents], [d["source"] for d in documents], self.held_out)
        return [order[first : first + BATCH] for first in range(0, len(order), BATCH)]

    def reached(self, store: TraceStore) -> dict[str, Any] | None:
        """How much more documents could still change, by a search on those traced.

        Returns:
            JSON: `documents` chosen on; `could_gain`, ARR that another target layer, another draft layer of a round or
            another m than the chosen one gains at most, upper ends of paired 95 % intervals; `hybrid_minus_dustin_t`
            with its interval; `within`, the largest of those ends and of that interval's half-width. None if fewer
            than two documents can be chosen on.

        Raises:
            NothingMeasuredError: a document's traces are empty or not finite.
        """
        entries = store.entries
        held = split([e["id"] for e in entries], [e["source"] for e in entries], self.held_out)
        searched = store.subset({entry["id"] for entry in entries} - held)
        if len(searched) < 2:
            return None
        found = search(Remembered(searched, self._known, torch.device(self.device)), self.options)
        gains = could_gain(found)
        curve = found.curve.per_document
        hybrid = interval((curve[:, found.curve.m] - curve[:, 0]).numpy(), _SEED)
        within = max(*gains.values(), _half_width(hybrid))
        return {
            "documents": len(searched),
            "could_gain": {name: round(value, 6) for name, value in gains.items()},
            "hybrid_minus_dustin_t": hybrid._asdict(),
            "within": round(within, 6),
        }

    def decided(self, store: TraceStore) -> bool:
        """Whether tracing may end. Raises NothingMeasuredError, as `reached`."""
        found = self.reached(store)
        return found is not None and bool(found["within"] <= self.within)


def in_order(ids: Sequence[str], sources: Sequence[str], held_out: float) -> list[int]:
    """Documents in a seeded order that does not depend on theirs.

    Sources take turns, and `split` holds out of the first n documents those that it holds out of all, for every n that
    has the sources to split by (four, or fewer than four in all): none is seen by one search and reported by the next.
    Where sources have unequal numbers of documents, that ends with the documents of one side.

    Returns:
        Indices.
    """
    held = split(ids, sources, held_out)
    shuffled = Draw(_SEED, "documents").shuffled(sorted(range(len(ids)), key=ids.__getitem__))
    turns: Counter[tuple[bool, str]] = Counter()
    queues: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for index in shuffled:
        side = ids[index] in held
        turns[side, sources[index]] += 1
        queues[side].append((turns[side, sources[index]], index))
    kept_out, chosen_on = (sorted(queues[side], key=lambda turn: turn[0]) for side in (True, False))
    order: list[int] = []
    taken = 0
    while kept_out or chosen_on:
        due = held_out_names(len(order) + 1, held_out) > taken
        out = bool(kept_out) and (due or not chosen_on)
        taken += out
        order.append((kept_out if out else chosen_on).pop(0)[1])
    return order


def could_gain(found: SearchResult) -> dict[str, float]:
    """ARR that another choice of each phase may gain over documents of this kind: the largest upper end of the paired
    95 % intervals of all others minus the chosen one, not below 0."""
    chosen = [values[:, layer] for values, layer in zip(found.draft.rounds, found.draft.layers, strict=False)]
    # A round that gained nothing was compared with going without it.
    chosen += chosen[-1:] * (len(found.draft.rounds) - len(chosen))
    rounds = [_most(values, best) for values, best in zip(found.draft.rounds, chosen, strict=True)]
    target, curve = found.target, found.curve
    return {
        "target_layer": _most(target.per_document, target.per_document[:, target.layer]),
        "draft_layers": max(rounds),
        "m": _most(curve.per_document, curve.per_document[:, curve.m]),
    }


def _half_width(found: Interval) -> float:
    return math.inf if found.low is None or found.high is None else (found.high - found.low) / 2


def _most(values: Tensor, chosen: Tensor) -> float:
    """Of values [documents, choices], NaN where there was no choice, against those chosen [documents]."""
    gains = (values - chosen.unsqueeze(1))[:, ~values.isnan().any(0)]
    return max(0.0, float(upper_ends(gains.numpy(), _SEED).max()))


class Remembered:
    """Documents of which nothing is measured twice (implements `phases.Rows`): a look costs what is new.

    Args:
        known: what searches with the same options measured before; what this one measures is added.
    """

    def __init__(self, store: TraceStore, known: Known, device: torch.device) -> None:
        self.store, self.known, self.device = store, known, device

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> Windows:
        return to_device(self.store[index], self.device)

    def rows(self, measure: Callable[[Windows], Tensor], choices: Hashable) -> Tensor:
        """As `phases.over_documents`."""
        keys = [(entry["id"], choices) for entry in self.store.entries]
        for index, key in enumerate(keys):
            if key not in self.known:
                (windows,) = usable([self[index]])
                self.known[key] = measure(windows).double().mean(-1).cpu()
        return torch.stack([self.known[key] for key in keys])
