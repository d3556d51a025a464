"""The stage that searches: three phases on the search split, figures from the held-out split, one YAML.

With a measured latency it searches for throughput instead: the phases at every budget, and one candidate of many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from dustin_profile.provenance import arguments, device_name, versions
from dustin_profile.rundir import check_stage, open_stage
from dustin_profile.search.budget import Budget
from dustin_profile.search.evaluate import Policy, Recovery, evaluate
from dustin_profile.search.guard import Judged, fit_guard
from dustin_profile.search.phases import SearchOptions, SearchResult, search
from dustin_profile.search.split_fit import fit_split
from dustin_profile.search.study import StudyResult, write_study
from dustin_profile.settings import SearchSettings, Settings, StepsToTime
from dustin_profile.statistics import flat_top, interval, m_interval, split
from dustin_profile.traces.collect import Heads
from dustin_profile.traces.resident import resident
from dustin_profile.traces.store import TraceStore
from dustin_profile.traces.windows import Documents
from dustin_runtime.config import DustinConfig, LayerHeads, Selection, save_config
from dustin_runtime.files import digest, write_json, write_text
from dustin_runtime.loading import Pair

if TYPE_CHECKING:
    from dustin_profile.latency.stage import Latency
    from dustin_profile.search.throughput import Chosen
    from dustin_profile.traces.windowed import Windowed

RESULTS_VERSION = 1
SEARCH_VERSION = 1
"""Raised when the same inputs would be searched differently."""


@dataclass(frozen=True)
class Found:
    """What the search ends with."""

    config: DustinConfig
    results: dict[str, Any]


def run_search(
    run_dir: Path,
    pair: Pair,
    store: TraceStore,
    heads: dict[str, Heads],
    settings: Settings,
    *,
    depth: int,
    budget: int,
    device: str,
    seconds: Mapping[str, float],
    timed: Timed | None = None,
) -> Found:
    """Search, evaluate, and write `config.yaml`, `results.json`, `results.md` and `arr.png` to the run directory; for
    throughput `throughput.png` too.

    Args:
        heads: `history` and `evaluation` of the target, `lookahead` of the draft.
        device: where traces are ranked.
        seconds: time spent per stage, for the provenance.
        timed: to search for throughput; budget and depth are then chosen too.

    Raises:
        ConfigError: the budget leaves nothing to choose.
        ConflictError: the run directory holds a search with other settings.
        UsageError: no candidate has the ARR that is asked for.
        MissingError: for throughput, the traces do not say what the draft would have proposed.
    """
    chosen = settings.search
    entries = store.entries
    held_out = split([e["id"] for e in entries], [e["source"] for e in entries], chosen.held_out)
    ids = [entry["id"] for entry in entries]
    place = torch.device(device)
    searched = resident(store.subset(set(ids) - held_out), place)
    reported = resident(store.subset(held_out or ids), place)
    folder = run_dir / "search"
    steps = timed_inputs(timed.steps, timed.latency.sha256) if timed else None
    inputs = search_inputs(settings, budget, digest(store.inputs), steps)
    check_stage(folder, inputs, settings.overwrite)
    # Before anything is discarded: the rule may let none through.
    best = _fastest(searched, reported, settings, timed) if timed else None
    open_stage(folder, inputs, settings.overwrite)

    draft_cache: Literal["full", "sink+window"] = "full"
    if best:
        candidate = best.candidate
        found, budget, depth = candidate.split.found, candidate.split.budget, candidate.depth
        draft_cache = candidate.draft_cache
    else:
        found = search(searched, search_options(chosen, budget))
    limits = Budget(budget, chosen.sink, chosen.window)
    curve = found.curve.per_document.mean(0).tolist()
    study = write_study(
        folder / "study.log",
        curve,
        name=digest(inputs)[:16],
        sampler=chosen.sampler,
        seed=chosen.seed,
        trials=chosen.trials,
        attributes={"budget": budget, "target_layer": found.target.layer, "draft_layers": list(found.draft.layers)},
    )
    if best:  # what is the fastest need not be the top of the curve
        study = study._replace(m=found.curve.m)
    selection = Selection(
        budget=budget,
        sink=chosen.sink,
        window=chosen.window,
        m=study.m,
        history=LayerHeads(layer=found.target.layer, heads=tuple(heads["history"][found.target.layer])),
        lookahead=tuple(LayerHeads(layer=d, heads=tuple(heads["lookahead"][d])) for d in found.draft.layers),
        retrieval_heads=tuple(tuple(heads["history"][layer]) for layer in range(pair.target_shape.layers)),
    )
    if chosen.fit_split:
        selection = selection.model_copy(update={"split": fit_split(searched, selection)})
    measured = evaluate(
        reported, target_layer=found.target.layer, draft_layers=found.draft.layers, m=study.m, budget=limits
    )
    in_sample = evaluate(
        searched, target_layer=found.target.layer, draft_layers=found.draft.layers, m=study.m, budget=limits
    )
    judged = Judged(found.target.layer, found.draft.layers, study.m, limits)
    guard = fit_guard(searched, reported, judged, held_out=bool(held_out), depth=int(store.inputs["depth"]))
    results = _results(pair, store, heads, settings, depth, selection, found, study, measured, in_sample, held_out)
    provenance = pair.provenance() | {
        "data": store.inputs["data"],
        "data_sha256": store.inputs["data_sha256"],
        "seed": chosen.seed,
        "versions": versions(),
        "device": device_name(device),
        "arguments": arguments(settings),
        "stage_seconds": {name: round(value, 1) for name, value in seconds.items()},
    }
    evidence = _evidence(results)
    if best:
        results["throughput"] = best.record
        evidence["predicted"] = _predicted(best.record)
        provenance["search"] = {
            "objective": "throughput",
            "rule": best.record["rule"],
            "candidates": len(best.record["candidates"]),
            "latency_sha256": best.record["latency"]["sha256"],
        }
    config = DustinConfig(
        pair=pair.identity(),
        depth=depth,
        selection=selection,
        draft_cache=draft_cache,
        rope=pair.rope,
        guard=guard,
        evidence=evidence,
        provenance=provenance,
    )
    if guard:
        results["guard"] = guard.model_dump(mode="json")
    if stopping := store.stopping:
        results["stopping"] = stopping
    results["provenance"] = provenance
    _write(run_dir, config, results)
    return Found(config, results)


@dataclass(frozen=True)
class Timed:
    """What a search for throughput has beside traces."""

    latency: Latency
    steps: StepsToTime
    windowed: Windowed | None
    """What a draft with a window proposes, where that may be chosen."""


def search_inputs(settings: Settings, budget: int, traces: str, steps: dict[str, Any] | None) -> dict[str, Any]:
    """What a search is made from.

    Args:
        traces: by their digest.
        steps: of `timed_inputs`, of a search for throughput.
    """
    inputs = {"version": SEARCH_VERSION, "traces": traces} | asdict(settings.search) | {"budget": budget}
    if not settings.search.fit_split:
        del inputs["fit_split"]  # a search from before there was a choice is the same
    return inputs | ({"objective": asdict(settings.objective), "steps": steps} if steps else {})


def timed_inputs(steps: StepsToTime, latency_sha256: str) -> dict[str, Any]:
    """What of the timed steps decides what is chosen."""
    return {"budgets": list(steps.budgets), "depths": list(steps.depths), "latency_sha256": latency_sha256}


def _fastest(searched: Documents, reported: Documents, settings: Settings, timed: Timed) -> Chosen:
    from dustin_profile.search.throughput import search_throughput

    options = [search_options(settings.search, k) for k in timed.steps.budgets]
    return search_throughput(
        searched,
        reported,
        options,
        timed.steps.depths,
        timed.latency,
        settings.objective,
        settings.search.seed,
        timed.windowed,
    )


def search_options(settings: SearchSettings, budget: int) -> SearchOptions:
    """What the phases are given; they refuse what is wrong."""
    limits = Budget(budget, settings.sink, settings.window)
    return SearchOptions(limits, settings.draft_layers, settings.stop_when_flat, settings.heuristic)


def _results(
    pair: Pair,
    store: TraceStore,
    heads: dict[str, Heads],
    settings: Settings,
    depth: int,
    selection: Selection,
    found: SearchResult,
    study: StudyResult,
    measured: Mapping[Policy, Recovery],
    in_sample: Mapping[Policy, Recovery],
    held_out: set[str],
) -> dict[str, Any]:
    seed = settings.search.seed
    reported = [entry for entry in store.entries if not held_out or entry["id"] in held_out]
    hybrid = measured["hybrid"].arr
    return {
        "kind": "dustin-results",
        "version": RESULTS_VERSION,
        "pair": pair.identity().model_dump(),
        "traces": store.inputs,
        "depth": depth,
        "selection": selection.model_dump(mode="json"),
        "template": settings.data.template,
        "split": "held_out" if held_out else "in_sample: there is one document only",
        "documents": {
            side: {e["id"]: {"source": e["source"], "sha256": e["sha256"], "windows": e["windows"]} for e in chosen}
            for side, chosen in (
                ("search", [e for e in store.entries if e["id"] not in held_out]),
                ("reported", reported),
            )
        },
        "policies": {
            name: {
                "arr": interval(recovery.arr.numpy(), seed, share=True)._asdict(),
                "prefix_arr": interval(recovery.prefix_arr.numpy(), seed, share=True)._asdict(),
                "in_sample_arr": float(in_sample[name].arr.mean()),
                "per_document": {e["id"]: x for e, x in zip(reported, recovery.arr.tolist(), strict=True)},
            }
            for name, recovery in measured.items()
        },
        "hybrid_minus": {
            name: interval((hybrid - recovery.arr).numpy(), seed)._asdict()
            for name, recovery in measured.items()
            if name != "hybrid"
        },
        "m": {
            "chosen": study.m,
            "interval": m_interval(found.curve.per_document.numpy(), seed),
            "flat": list(flat_top(found.curve.per_document.mean(0).tolist())),
            "highest": int(found.curve.per_document.mean(0).argmax()),
            "sampler": settings.search.sampler,
            "trials": study.trials,
            "curve": [round(value, 6) for value in found.curve.per_document.mean(0).tolist()],
        },
        "layers": {
            "target_history_arr": [round(value, 6) for value in found.target.per_document.mean(0).tolist()],
            "draft_rounds_arr": [_without_nan(values.mean(0)) for values in found.draft.rounds],
        },
        "heads": {name: {str(layer): list(x) for layer, x in chosen.items()} for name, chosen in heads.items()},
    }


def _without_nan(values: torch.Tensor) -> list[float | None]:
    return [None if value != value else round(value, 6) for value in values.tolist()]


def _evidence(results: dict[str, Any]) -> dict[str, Any]:
    """The part of the results that travels with the config."""

    def short(value: dict[str, Any]) -> dict[str, Any]:
        return {key: round(x, 5) if isinstance(x, float) else x for key, x in value.items()}

    return {
        "split": results["split"],
        "arr": {name: short(policy["arr"]) for name, policy in results["policies"].items()},
        "prefix_arr": {name: round(policy["prefix_arr"]["mean"], 5) for name, policy in results["policies"].items()},
        "hybrid_minus": {name: short(value) for name, value in results["hybrid_minus"].items()},
        "m_interval": results["m"]["interval"],
        "m_flat": results["m"]["flat"],
    }


def _predicted(record: dict[str, Any]) -> dict[str, Any]:
    """What the config should do where its latency was measured; nobody has seen it do so."""
    chosen = record["candidates"][record["chosen"]]
    return {
        "tokens_per_s": {key: round(x, 3) if isinstance(x, float) else x for key, x in chosen["tokens_per_s"].items()},
        "tau": round(chosen["tau"]["mean"], 3),
        "step_ms": round(chosen["step_ms"], 3),
        "batch": record["batch"],
        "context": record["context"],
        "device": record["latency"]["device"],
    }


def _write(run_dir: Path, config: DustinConfig, results: dict[str, Any]) -> None:
    from dustin_profile.plots import split_curve, throughput_front
    from dustin_profile.report import markdown

    (run_dir / "config.yaml").unlink(missing_ok=True)  # an earlier one must not stand beside newer results
    write_json(run_dir / "results.json", results)
    write_text(run_dir / "results.md", markdown(results))
    curve, m = results["m"]["curve"], results["m"]
    lines = {name: results["policies"][name]["in_sample_arr"] for name in ("oracle", "streaming")}
    split_curve(run_dir / "arr.png", curve, m["chosen"], tuple(m["flat"]), lines)
    if record := results.get("throughput"):
        throughput_front(run_dir / "throughput.png", record)
    save_config(config, run_dir / "config.yaml")  # last: it says that the run is complete
