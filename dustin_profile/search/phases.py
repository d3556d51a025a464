"""The three phases of the configuration search (arXiv 2606.24957, Alg. 1). Every document counts once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from dustin_profile.choices import Heuristic
from dustin_profile.search.arr import arr, first_best, gains
from dustin_profile.search.budget import Budget, trial_splits
from dustin_profile.search.curve import HistoryList, arr_curve, layer_parts, lookahead_sum
from dustin_profile.traces.windows import Documents, Windows
from dustin_runtime.errors import NothingMeasuredError, UsageError


@dataclass(frozen=True)
class SearchOptions:
    """What the paper fixes or leaves open about the search."""

    budget: Budget
    draft_layers: int = 3
    """Rounds of phase 2: draft layers appended, one a round."""
    stop_when_flat: bool = False
    """End phase 2 once no candidate increases the mean ARR (the prose of Sec. 4.2.2) instead of after all rounds
    (Alg. 1). The first layer is always taken: phase 3 can still give the draft no token."""
    heuristic: Heuristic = "m"
    """How B_search is read (see `trial_splits`)."""


class TargetPhase(NamedTuple):
    """Phase 1: the layer whose history alone recovers most."""

    layer: int
    per_document: Tensor
    """[documents, target layers] fp64 ARR."""


class DraftPhase(NamedTuple):
    """Phase 2: the draft layers in the order in which they were appended."""

    layers: tuple[int, ...]
    rounds: tuple[Tensor, ...]
    """Per round, [documents, draft layers] fp64: ARR with that layer appended, mean over the trial splits; NaN for
    layers that were chosen before. One round more than `layers` if the last one gained nothing."""


class CurvePhase(NamedTuple):
    """Phase 3: the split."""

    m: int
    per_document: Tensor
    """[documents, m] fp64 ARR for every m from 0 to k - sink - window."""


class SearchResult(NamedTuple):
    """The three phases."""

    target: TargetPhase
    draft: DraftPhase
    curve: CurvePhase


def search(documents: Documents, options: SearchOptions) -> SearchResult:
    """Run the three phases.

    Raises:
        ConfigError: the budget is invalid.
        UsageError: more draft layers are asked for than the draft has, or none.
        NothingMeasuredError: there are no documents, or their traces are empty or not finite.
    """
    target = find_target_layer(documents, options.budget)
    draft = find_draft_layers(documents, target.layer, options)
    return SearchResult(target, draft, find_split(documents, target.layer, draft.layers, options.budget))


def find_target_layer(documents: Documents, budget: Budget) -> TargetPhase:
    """Phase 1: the target layer with the best ARR when its history chooses every token that is not protected."""

    def measure(windows: Windows) -> Tensor:
        parts = layer_parts(windows.history)
        recovered = [HistoryList.of(windows, part, budget).recovered_alone() for part in parts]
        return arr(windows, torch.cat(recovered))

    per_document = over_documents(documents, measure, "target")
    return TargetPhase(first_best(per_document.mean(0)), per_document)


def find_draft_layers(documents: Documents, target_layer: int, options: SearchOptions) -> DraftPhase:
    """Phase 2: append, `options.draft_layers` times, the draft layer that gives the best ARR with those chosen."""
    splits = trial_splits(options.budget, options.heuristic)
    if options.draft_layers < 1:
        raise UsageError(f"draft_layers: {options.draft_layers} is too few; give 1 or more")
    chosen: list[int] = []
    rounds: list[Tensor] = []
    reached = -torch.inf

    def measure(windows: Windows) -> Tensor:
        layers = len(windows.lookahead)
        if options.draft_layers > layers:
            raise UsageError(f"draft_layers: {options.draft_layers} is more than the draft's {layers} layers")
        history = HistoryList.of(windows, windows.history[target_layer].float(), options.budget)
        before = lookahead_sum(windows, chosen)
        parts = [history.recovered(before + part, splits) for part in layer_parts(windows.lookahead)]
        result = arr(windows, torch.cat(parts).mean(-1))
        result[chosen] = torch.nan
        return result

    for _ in range(options.draft_layers):
        per_document = over_documents(documents, measure, ("draft", target_layer, *chosen))
        mean = per_document.mean(0)
        best = first_best(mean)
        rounds.append(per_document)
        if options.stop_when_flat and not gains(float(mean[best]), reached):
            break
        chosen.append(best)
        reached = float(mean[best])
    return DraftPhase(tuple(chosen), tuple(rounds))


def find_split(documents: Documents, target_layer: int, draft_layers: Sequence[int], budget: Budget) -> CurvePhase:
    """Phase 3: the exact curve on the chosen layers, and its best m."""

    def measure(windows: Windows) -> Tensor:
        return arr_curve(windows, target_layer, draft_layers, budget).mT

    per_document = over_documents(documents, measure, ("split", target_layer, *draft_layers))
    return CurvePhase(first_best(per_document.mean(0)), per_document)


@runtime_checkable
class Rows(Protocol):
    """Documents that know what was measured of them before, with the same options."""

    def rows(self, measure: Callable[[Windows], Tensor], choices: Hashable) -> Tensor: ...


def over_documents(
    documents: Documents, measure: Callable[[Windows], Tensor], choices: Hashable | None = None
) -> Tensor:
    """Mean of `measure(windows)` [..., W] over each document's windows: [documents, ...] fp64, on the CPU.

    Args:
        choices: what a search measures, by all that it rests on beside its options; for documents that are `Rows`.

    Raises:
        NothingMeasuredError: there are no documents, or one has no windows or a value that is not finite.
    """
    if choices is not None and isinstance(documents, Rows):
        return documents.rows(measure, choices)
    return torch.stack([measure(windows).double().mean(-1).cpu() for windows in usable(documents)])


def usable(documents: Documents) -> Iterator[Windows]:
    """The documents, read one at a time and refused where nothing can be said about them.

    Raises:
        NothingMeasuredError: there are none, or one has no windows or a value that is not finite.
    """
    if not len(documents):
        raise NothingMeasuredError("no document has traces; collect traces from at least one")
    for index in range(len(documents)):
        windows = documents[index]
        if not len(windows.prefix):
            raise NothingMeasuredError(f"{windows.document}: no window was traced; its continuation is too short")
        for name in ("truth", "tail", "history", "lookahead"):
            if not getattr(windows, name).isfinite().all():
                raise NothingMeasuredError(f"{windows.document}: {name} is not finite; collect its traces again")
        yield windows
