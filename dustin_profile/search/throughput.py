"""The search for throughput: every budget, number of draft layers, m, depth and draft cache that could be the best.

ARR is exact on the traced windows, whose depth stands for smaller ones: these verify fewer queries, which lie nearer to
the history, so their own ARR should be a little higher. Tokens per second are predicted: batch * tokens per step / time
of a step, the one walked on the trajectories (`tau`), the other from a measured model (`latency`).

A draft that keeps its first and last tokens has its own tokens per step; its lookahead is assumed to be that of the
draft that was traced, which reads everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dustin_profile.choices import DraftCache
from dustin_profile.latency.model import Step
from dustin_profile.latency.stage import Latency
from dustin_profile.search.choosing import choose, front
from dustin_profile.search.phases import SearchOptions
from dustin_profile.search.splits import SplitChoice, split_choices
from dustin_profile.search.tau import agreement, tokens_per_step
from dustin_profile.settings import ObjectiveSettings
from dustin_profile.statistics import interval
from dustin_profile.traces.windowed import Windowed
from dustin_profile.traces.windows import Documents


@dataclass(frozen=True)
class Candidate:
    """One configuration and what it is predicted to do."""

    split: SplitChoice
    depth: int
    draft_cache: DraftCache
    ms: float
    """Of a step."""
    tau: float
    """Tokens per step on the search documents."""
    reported_tau: Tensor
    """[reported documents] fp64, NaN where a continuation is too short."""
    tokens_per_s: float


@dataclass(frozen=True)
class Chosen:
    """What a search for throughput ends with; `record` goes to the results."""

    candidate: Candidate
    record: dict[str, Any]


def search_throughput(
    searched: Documents,
    reported: Documents,
    options: Sequence[SearchOptions],
    depths: Sequence[int],
    latency: Latency,
    objective: ObjectiveSettings,
    seed: int,
    windowed: Windowed | None = None,
) -> Chosen:
    """Enumerate the candidates and choose on the search documents.

    Args:
        options: one per budget.
        windowed: what a draft that keeps its first and last tokens proposes, if that may be chosen.

    Raises:
        UsageError: no candidate is good enough for the rule.
        MissingError: the traces do not say what the draft would have proposed.
        NothingMeasuredError, ConfigError: as `search`.
    """
    splits = [choice for one in options for choice in split_choices(searched, reported, one)]
    found: list[Candidate] = []
    for cache in ("full", "sink+window") if objective.draft_cache == "both" else (objective.draft_cache,):
        for k in dict.fromkeys(split.budget for split in splits):
            chosen_on, behind = (
                tokens_per_step(_agreements(side, k, windowed if cache == "sink+window" else None), depths)
                for side in (searched, reported)
            )
            for split, (place, depth) in product((s for s in splits if s.budget == k), enumerate(depths)):
                ms, tau = latency.milliseconds(_step(split, depth, cache)), float(chosen_on[:, place].nanmean())
                speed = 1e3 * latency.batch * tau / ms
                found.append(Candidate(split, depth, cache, ms, tau, behind[:, place], speed))
    speeds = [candidate.tokens_per_s for candidate in found]
    per_document = torch.stack([candidate.split.searched for candidate in found])
    best = choose(objective.choose, objective.least_arr, speeds, per_document)
    record = {
        "objective": "throughput",
        "rule": {"choose": objective.choose}
        | ({"least_arr": objective.least_arr} if objective.choose == "least-arr" else {}),
        "batch": latency.batch,
        "context": latency.document["inputs"]["context"],
        "chosen": best,
        "front": front(speeds, per_document.mean(1).tolist()),
        "candidates": [_entry(candidate, latency.batch, seed) for candidate in found],
        "windowed_draft": _windowed(found[best], latency),
        "latency": {
            "sha256": latency.sha256,
            "device": latency.document["device"],
            "dtype": latency.document["dtype"],
            "max_relative_error": latency.document["max_relative_error"],
        },
    }
    return Chosen(found[best], record)


def _agreements(documents: Documents, budget: int, windowed: Windowed | None) -> list[Tensor]:
    """Of every document; of a windowed draft where that is given. Raises MissingError as `agreement`."""
    if windowed is None:
        return [agreement(documents, index) for index in range(len(documents))]
    return [windowed[documents[index].document][budget] for index in range(len(documents))]


def _step(split: SplitChoice, depth: int, cache: DraftCache) -> Step:
    return Step(depth, split.budget, cache == "sink+window", split.layers, split.history)


def _tau(values: Tensor, depth: int, seed: int) -> dict[str, Any]:
    """Tokens per step with its interval, as JSON; a step emits 1 to depth + 1."""
    found = interval(values[~values.isnan()].numpy(), seed)
    if found.low is None or found.high is None:
        return found._asdict()
    return found._replace(low=max(found.low, 1.0), high=min(found.high, depth + 1.0))._asdict()


def _entry(candidate: Candidate, batch: int, seed: int) -> dict[str, Any]:
    """A candidate as JSON: chosen by the figures of the search documents; ARR and tokens/s of the reported ones."""
    split, per_s = candidate.split, 1e3 * batch / candidate.ms
    tau = _tau(candidate.reported_tau, candidate.depth, seed)
    return {
        "budget": split.budget,
        "m": split.m,
        "draft_layers": list(split.found.draft.layers) if split.m else [],
        "target_layer": split.found.target.layer,
        "depth": candidate.depth,
        "draft_cache": candidate.draft_cache,
        "step_ms": candidate.ms,
        "arr": interval(split.reported.numpy(), seed, share=True)._asdict(),
        "assumed_arr": candidate.draft_cache != "full" and split.m > 0,
        "tau": tau,
        "tokens_per_s": {name: tau[name] and per_s * tau[name] for name in ("mean", "low", "high")},
        "search": {
            "arr": float(split.searched.mean()),
            "tau": candidate.tau,
            "tokens_per_s": candidate.tokens_per_s,
        },
    }


def _windowed(chosen: Candidate, latency: Latency) -> dict[str, float]:
    """What a draft with a window would have to keep of its tokens per step to pay off in the chosen configuration."""
    full, windowed = (
        latency.milliseconds(_step(chosen.split, chosen.depth, cache)) for cache in ("full", "sink+window")
    )
    return {"step_ms": windowed, "full_step_ms": full, "least_share_of_tau": windowed / full}
