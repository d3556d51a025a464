"""Result files for reports: the committed ones, and small ones of kinds that are not committed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from dustin_profile.evaluation.longbench.averages import averages
from dustin_profile.evaluation.runner import Cell, Run
from dustin_profile.evaluation.summary import summarise
from dustin_profile.reporting.measured import Method
from dustin_profile.reporting.report import Report, compose
from dustin_profile.reporting.sources import gather
from dustin_profile.statistics import interval
from dustin_runtime.files import read_json

RESULTS = Path(__file__).parents[3] / "results"
QWEN = RESULTS / "eval-qwen-coder1.5b_0.5b"
"""Every evaluation of that pair, a folder each."""
DRAFT = "recipe:smollm2-135m-draft"
"""Of the embedded pair."""


def evaluation(task: str, groups: list[dict[str, str]], scores: dict[str, list[float]]) -> dict[str, Any]:
    """What `dustin-profile eval` writes: a score per method and group, and the mean over groups for all items."""
    selection = read_json(RESULTS / "arr-smollm2.json")["selection"]
    models = {side: {"id": side, "revision": None, "sha256": "0" * 64} for side in ("target", "draft")}

    def entry(method: str, group: dict[str, str], value: float, full: float) -> dict[str, Any]:
        own, gain = _estimate(value), _estimate(value - full)
        return {
            "method": method,
            "budget": None if method == "vanilla" else 128,
            "group": group,
            "items": 10,
            "scores": {"found": own, "recall": own},
            "minus_vanilla": None if method == "vanilla" else {"found": gain, "recall": gain},
            "same_text": None if method == "vanilla" else 3,
            "tau": 1.0 if method == "vanilla" else 2.5,
            "tokens_read": 900.0,
            "tokens_per_s": 12.25,
        }

    entries = []
    for method, values in scores.items():
        full = scores["vanilla"]
        entries.append(entry(method, {}, sum(values) / len(values), sum(full) / len(full)))
        entries += [entry(method, *row) for row in zip(groups, values, full, strict=True)]
    return {
        "kind": "dustin-eval",
        "version": 1,
        "task": task,
        "pair": {side: {"id": side} for side in ("target", "draft")},
        "inputs": {"models": models, "dtype": "float32", "device": "cpu", "depth": 3, "selection": selection},
        "entries": entries,
        "provenance": {"versions": {"dustin": "0.1.0"}, "device": "cpu (x86_64, 1 threads)"},
    }


def _estimate(value: float) -> dict[str, Any]:
    return {"mean": value, "low": value - 0.125, "high": value + 0.125, "method": "t", "documents": 10}


def _pair() -> dict[str, Any]:
    return {side: {"id": side, "layers": 2, "query_heads": 2} for side in ("target", "draft")}


def recovery() -> dict[str, Any]:
    """What `dustin-profile eval arr` writes."""
    arr = {(policy, k): share + k / 1024 for policy, share in _SHARES.items() for k in (64, 128)}
    group = {"group": "all documents", "documents": 10, "windows": 40, "m": 99, "best_m": 88, "flat": [80, 99]}
    group["arr"] = {name: _estimate(arr[name, 128]) for name in ("dustin", "dustin-t", "dustin-d")}
    group["minus_dustin"] = {"dustin-t": _estimate(-0.25), "dustin-d": _estimate(-0.0625)}
    return {
        "kind": "dustin-arr",
        "version": 1,
        "pair": _pair(),
        "selection": read_json(RESULTS / "arr-smollm2.json")["selection"],
        "depth": 3,
        "split": "held-out",
        "traces": [{"data": "books", "context": 1024}],
        "documents": {"a": {}},
        "budgets": [
            {"policy": policy, "budget": k, "read": float(k), "arr": _estimate(value)}
            | {"below_oracle": None if policy == "oracle" else _estimate(arr["oracle", k] - value)}
            for (policy, k), value in arr.items()
        ],
        "splits": [group],
        "layers": {name: [_estimate(0.5), _estimate(0.75)] for name in ("oracle", "dustin", "streaming")},
        "distances": [
            {"rule": rule, "distance": age, "budget": 128, "arr": _estimate(0.5), "below_oracle": _estimate(age / 64)}
            for rule in ("all-heads", "dustin-t")
            for age in (4, 1)
        ],
        "forced_pass": {"device": "cpu (x86_64)", "dtype": "float32"},
        "provenance": {"versions": {"dustin": "0.1.0"}},
    }


_SHARES = {
    **{"oracle": 0.625, "dustin": 0.5, "dustin-t": 0.375, "dustin-d": 0.4375, "streaming": 0.25},
    **{"history-top": 0.3, "lookahead-top": 0.4375},
}


def stability() -> dict[str, Any]:
    """What `dustin-profile eval stability` writes."""
    agreement = {"top4_overlap": _estimate(0.75), "kendall_tau": _estimate(0.5)}
    side = {"needles": 10, "prompts": 90, "chance_overlap": 0.4375}
    side["sizes"] = [agreement | {"needles": needles, "prompts": 9 * needles} for needles in (1, 2)]
    side["lengths"] = [agreement | {"first": 512, "second": 1024}]
    side["depths"] = [agreement | {"first": 0.1, "second": 0.5}]
    side["runs"] = [agreement | {"first": "here", "second": "there"}]
    return {
        "kind": "dustin-stability",
        "version": 1,
        "target": side | {"model": "target"},
        "draft": side | {"model": "draft"},
        "provenance": {"versions": {"dustin": "0.1.0"}},
    }


def overhead() -> dict[str, Any]:
    """What `dustin-profile eval overhead` writes."""

    def timing(ms: float) -> dict[str, Any]:
        return {"ms": 2 * ms, "min_ms": ms}

    return {
        "kind": "dustin-overhead",
        "version": 1,
        "data": "synthetic",
        "inputs": {
            "pair": _pair(),
            "selection": read_json(RESULTS / "arr-smollm2.json")["selection"],
            "depth": 3,
            "batch": 2,
            "device": "cpu (x86_64)",
            "dtype": "float32",
        },
        "timing": "CPU wall clock",
        "rows": [
            {
                "context": context,
                "full": timing(context / 64) | {"kernel": "torch reference"},
                "sparse": timing(2.0),
                "estimators": {
                    name: timing(context / 512) | {"of_full": 0.125, "of_sparse_step": 0.0625}
                    for name in ("dustin", "dustin-t")
                },
            }
            for context in (512, 1024)
        ],
        "provenance": {"versions": {"dustin": "0.1.0"}},
    }


def answers(
    task: str,
    figure: str,
    scores: Mapping[Method, Sequence[float]],
    *,
    pair: str = "",
    groups: Sequence[Mapping[str, str]] = (),
    tokens: int = 16,
    read: Mapping[Method, float] | None = None,
) -> dict[str, Any]:
    """What `dustin-profile eval` writes, by its own hand: a score per method and document.

    Args:
        pair: goes before the models' ids.
        groups: of the items, in turn.
        tokens: that every item generates.
        read: tokens read where they are not the budget.
    """

    def rows(method: Method, values: Sequence[float]) -> list[dict[str, Any]]:
        return [
            {
                "id": str(number),
                "document": f"document {number}",
                "group": dict(groups[number % len(groups)]) if groups else {},
                "scores": {figure: value},
                "text": f"{value}",
                "tau": 1.0 if method[0] == "vanilla" else 2.5,
                "tokens_read": (read or {}).get(method, method[1] or 4096.0),
                "tokens_per_s": 12.5,
                "prompt_tokens": 4096,
                "tokens": tokens,
                "steps": 8,
            }
            for number, value in enumerate(values)
        ]

    selection = read_json(RESULTS / "arr-smollm2.json")["selection"]
    inputs = {"models": _models(pair), "items": {"seed": 0}, "depth": 3, "selection": selection}
    run = SimpleNamespace(
        task=SimpleNamespace(name=task),
        rows={Cell(*method): rows(method, values) for method, values in scores.items()},
        pair=SimpleNamespace(
            identity=lambda: SimpleNamespace(
                model_dump=lambda: {side: {"id": one["id"]} for side, one in _models(pair).items()}
            ),
            provenance=lambda: {},
        ),
        inputs=lambda: inputs,
        device="cpu",
    )
    found = summarise(cast(Run, run))
    if task == "longbench":
        found["averages"] = averages(found)
    return found


def fidelity(kl: Mapping[Method, Sequence[float]], *, pair: str = "", agreement: float = 0.875) -> dict[str, Any]:
    """What `dustin-profile eval fidelity` writes: the KL of every method on each document, half of it missing from ARR.

    A method reads its budget, SnapKV 30 tokens more.
    """
    texts = len(next(iter(kl.values())))
    documents: list[dict[str, Any]] = [
        {"id": f"text {number}", "prompt_tokens": 1024, "text_tokens": 64, "cells": {}}
        | {"full": {"loss": 2.0, "read": 1056.0}}
        for number in range(texts)
    ]
    summary: dict[str, Any] = {"full": {"perplexity": 8.0}}
    for (method, k), values in kl.items():
        read = float(k or 0) + (30.0 if method == "snapkv" else 0.0)
        for document, value in zip(documents, values, strict=True):
            cell = {"kl": value, "agreement": agreement, "arr": 1 - value / 2, "loss": 2.0 + value, "read": read}
            document["cells"][f"{method}-k{k}"] = cell
        means = {"kl": values, "arr": [1 - value / 2 for value in values], "agreement": [agreement] * texts}
        summary[f"{method}-k{k}"] = {
            name: interval(found, seed=0)._asdict() for name, found in (means | {"loss_difference": values}).items()
        } | {"perplexity": 9.0, "read": read}
    selection = read_json(RESULTS / "arr-smollm2.json")["selection"]
    inputs = {"version": 1, "models": _models(pair), "data_sha256": "a", "tokens": 64, "depth": 3}
    inputs |= {"selection": selection, "context": 1024}
    return {"kind": "dustin-fidelity", "inputs": inputs, "summary": summary, "documents": documents}


def _models(pair: str) -> dict[str, Any]:
    return {side: {"id": f"{pair}{side}", "revision": None, "sha256": "0" * 64} for side in ("target", "draft")}


def searched_again(search: Mapping[str, Any], times: int) -> dict[str, Any]:
    """What a search would have found on the same traces at a budget several times as large.

    Every share of attention that is missed is divided by the same number, so that differences and intervals still fit
    their policies, and every split of the budget is multiplied by it.
    """

    def kept(value: float) -> float:
        return 1 - (1 - value) / times

    def estimate(found: Mapping[str, Any], change: Callable[[float], float]) -> dict[str, Any]:
        return {**found, **{name: change(found[name]) for name in ("mean", "low", "high")}}

    def policy(found: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **{name: estimate(found[name], kept) for name in ("arr", "prefix_arr")},
            "in_sample_arr": kept(found["in_sample_arr"]),
            "per_document": {name: kept(value) for name, value in found["per_document"].items()},
        }

    chosen, m = search["selection"], search["m"]
    return {
        **search,
        "selection": {**chosen, "budget": times * chosen["budget"], "m": times * chosen["m"]},
        "policies": {name: policy(found) for name, found in search["policies"].items()},
        "hybrid_minus": {
            name: estimate(gain, lambda value: value / times) for name, gain in search["hybrid_minus"].items()
        },
        "m": {
            **m,
            "chosen": times * m["chosen"],
            "interval": [times * end for end in m["interval"]],
            "flat": [times * end for end in m["flat"]],
            "curve": [kept(value) for value in m["curve"] for _ in range(times)],
        },
    }


def composed(folder: Path, *documents: dict[str, Any]) -> Report:
    """The report of some documents, as files `0.json`, `1.json` and so on."""
    folder.mkdir(exist_ok=True)
    for number, document in enumerate(documents):
        (folder / f"{number}.json").write_text(json.dumps(document))
    return compose(gather(sorted(folder.glob("*.json"))))
