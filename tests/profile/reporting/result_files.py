"""Result files for reports: the committed ones, and small ones of kinds that are not committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dustin_runtime.files import read_json

RESULTS = Path(__file__).parents[3] / "results"


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
