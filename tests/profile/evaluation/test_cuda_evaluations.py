"""Evaluations on a GPU find what they find on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import dustin_profile
from tiny_pair import TinyPair

from dustin_runtime.policies import POLICIES

pytestmark = pytest.mark.gpu

DEVICES = ("cpu", "cuda")
TEXTS = ("--context", 300, "--documents", 2, "--tokens", 24, "--budget", 48, "--budget", 64)
METHODS = [option for name in POLICIES for option in ("--method", name)]


def run(*arguments: object) -> dict[str, Any]:
    outcome = dustin_profile(*arguments, "--quiet", "--json")
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def both(pair: TinyPair, folder: Path, *arguments: object) -> list[dict[str, Any]]:
    """Of both devices."""
    common = (*pair.options[:-2], "--dtype", "float32")
    return [run(*arguments, *common, "--device", device, "--run-dir", folder / device) for device in DEVICES]


def assert_close(found: dict[str, Any], expected: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        assert found[name]["mean"] == pytest.approx(expected[name]["mean"], abs=1e-3), name


def test_fidelity_of_every_policy(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    cpu, gpu = (result["summary"] for result in both(tiny_pair, tmp_path, "eval", "fidelity", config, *TEXTS))
    cells = [name for name in cpu if "-k" in name]
    assert len(cells) > 2 * 14
    for name in cells:
        assert_close(gpu[name], cpu[name], ("kl", "arr", "agreement"))
        assert gpu[name]["read"] == pytest.approx(cpu[name]["read"], abs=0.5), name


def test_sampled_subsets(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    cpu, gpu = both(tiny_pair, tmp_path, "eval", "subsets", config, *TEXTS, "--subsets", 4)
    for one, other in zip(cpu["documents"], gpu["documents"], strict=True):
        for subset, same in zip(one["subsets"], other["subsets"], strict=True):
            assert (same["kl"], same["arr"]) == pytest.approx((subset["kl"], subset["arr"]), abs=1e-3)


def test_drift_of_every_method(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    options = ("--context", 200, "--documents", 3, "--tokens", 20, "--batch", 2)
    cpu, gpu = (result["summary"] for result in both(tiny_pair, tmp_path, "drift", config, *options, *METHODS))
    assert len(cpu) == len(POLICIES)
    for name, cell in cpu.items():
        assert_close(gpu[name], cell, ("kl", "agreement"))
    for name in ("vanilla", "sd", "magicdec", "triforce"):
        assert gpu[name]["kl"]["mean"] < 1e-6


def test_answers_of_every_method(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    options = ("--length", 300, "--length", 400, "--needle-count", 2, "--depth-at", 0.5, "--batch", 3)
    both(tiny_pair, tmp_path, "eval", "needle", config, *options, *METHODS)
    for path in (tmp_path / "cpu" / "needle" / "rows").glob("*.jsonl"):
        assert answers(path) == answers(tmp_path / "cuda" / "needle" / "rows" / path.name), path.name


def answers(path: Path) -> dict[str, str]:
    """By item."""
    return {row["id"]: row["text"] for row in map(json.loads, path.read_text().splitlines())}
