"""Result files to report on, and pictures that are not drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dustin_profile.reporting import report
from dustin_profile.reporting.blocks import Figure
from dustin_profile.reporting.drawing import Drawn
from dustin_runtime.files import read_json

RESULTS = Path(__file__).parents[3] / "results"


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are empty: to draw them takes longer than all the rest."""
    monkeypatch.setattr(report, "draw", lambda figure: _blank(figure))


def _blank(figure: Figure) -> Drawn:
    return Drawn(figure, "<svg></svg>", "<svg></svg>", b"\x89PNG")


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """A committed result with something in it changed."""

    def change(name: str, edit: Callable[[dict[str, Any]], object]) -> Path:
        document = read_json(RESULTS / name)
        edit(document)
        path = tmp_path / name
        path.write_text(json.dumps(document))
        return path

    return change


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
