"""An end of the search for heads before all prompts: the order of prompts, the interval, and what is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from dustin_profile.prompts import Sample
from dustin_profile.settings import HeadSettings
from dustin_profile.srh import stage
from dustin_profile.srh.ranking import rank
from dustin_profile.srh.score import Score
from dustin_profile.srh.stage import HeadPrompts, find_heads, read_entries
from dustin_profile.srh.stopping import HALVES, batches, overlap
from dustin_profile.srh.store import Entry, Key
from dustin_runtime.files import read_json
from dustin_runtime.loading import Pair, open_pair
from dustin_runtime.models.decoder import Decoder

LAYERS, HEADS = 6, 32


@pytest.mark.parametrize("grid", [(10, 5, 3), (7, 5, 3), (4, 2, 2), (9, 3, 3), (1, 3, 2)])
def test_every_batch_holds_each_needle_and_what_is_measured_stays_balanced(grid: tuple[int, int, int]) -> None:
    needles, depths, lengths = (range(count) for count in grid)
    keys = [Key(length, depth / 7, needle) for length, depth, needle in product(lengths, depths, needles)]
    found = batches(keys)
    assert sorted(key for batch in found for key in batch) == sorted(keys)
    assert batches(keys[::-1]) == found
    for end in range(1, len(found) + 1):
        measured = [key for batch in found[:end] for key in batch]
        assert sorted(key.needle for key in found[end - 1]) == list(needles)
        for part, size in (
            (lambda key: key.depth, len(depths)),
            (lambda key: key.length, len(lengths)),
            (lambda key: key[:2], len(depths) * len(lengths)),
            (lambda key: (key.needle, key.depth), len(needles) * len(depths)),
            (lambda key: (key.needle, key.length), len(needles) * len(lengths)),
        ):
            counts = Counter(map(part, measured))
            assert max(counts.values()) - (min(counts.values()) if len(counts) == size else 0) <= 3


def entries(table: Callable[[int], np.ndarray], needles: int, prompts: int = 3) -> list[Entry]:
    return [
        {"needle": needle, "accepted": True, "span": table(needle).tolist()}
        for needle in range(needles)
        for _ in range(prompts)
    ]


def noise(seed: int) -> Callable[[int], np.ndarray]:
    random = np.random.default_rng(seed)
    return lambda needle: random.random((LAYERS, HEADS))


def test_halves_agree_fully_on_what_is_the_same_for_all_needles_and_by_chance_on_noise() -> None:
    steady = np.random.default_rng(0).random((LAYERS, HEADS))
    found = overlap(entries(lambda needle: steady, 10), "span")
    assert found == {"mean": 1.0, "low": 1.0, "high": 1.0, "halves": 126}
    chance = [overlap(entries(noise(seed), 10), "span") for seed in range(8)]
    assert np.mean([one["mean"] for one in chance if one]) == pytest.approx(4 / HEADS, abs=0.04)
    assert all(one and one["low"] <= one["mean"] <= one["high"] < 0.4 for one in chance)


def test_one_needles_own_heads_do_not_pass_for_those_of_others() -> None:
    """Prompts of a needle resemble each other: with them on both sides, halves of prompts would agree."""
    own = np.random.default_rng(3).random((10, LAYERS, HEADS))
    found = overlap(entries(lambda needle: own[needle], 10, prompts=50), "span")
    assert found and found["high"] < 0.4


def test_how_many_halves_there_are() -> None:
    steady = np.zeros((1, 4))
    for needles, halves in ((4, 3), (5, 10), (9, 126), (12, HALVES)):
        found = overlap(entries(lambda needle: steady, needles, 1), "span")
        assert found and found["halves"] == halves
    assert overlap(entries(lambda needle: steady, 3), "span") is None
    rejected = [entry | {"accepted": False} for entry in entries(lambda needle: steady, 10)]
    assert overlap(rejected, "span") is None


@pytest.fixture(scope="module")
def pair(tiny_pair: Any) -> Pair:
    return open_pair(str(tiny_pair.target), str(tiny_pair.draft), offline=True)


FULL = HeadSettings(lengths=(256, 320), depths=(0.0, 0.5, 1.0), needle_count=4, mode="forced")
STOPPING = replace(FULL, stop_when_stable=True, stable_overlap=0.9, least_prompts=10)
ALL, BATCH = 24, 4


class Synthetic:
    """In a model's place: scores that a function gives."""

    def __init__(self, table: Callable[[int], np.ndarray]) -> None:
        self.table = table
        self.measured: list[Key] = []

    def score_all(self, samples: Sequence[Sample]) -> list[Score]:
        self.measured += map(Key.of, samples)
        tables = [torch.from_numpy(self.table(sample.needle)).float() for sample in samples]
        return [Score(True, "answer", table, table) for table in tables]


def find(folder: Path, pair: Pair, settings: HeadSettings, model: Any = None) -> Path:
    load = model or (lambda: pair.load_target(torch.float32, "cpu"))
    return find_heads(folder, pair, load, torch.float32, "target", "forced", settings, HeadPrompts(pair, settings))


def never() -> Decoder:
    raise AssertionError("there is nothing to measure")


def found_with(
    table: Callable[[int], np.ndarray],
    folder: Path,
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    settings: HeadSettings,
) -> tuple[dict[str, Any], list[Key]]:
    prober = Synthetic(table)
    monkeypatch.setattr(stage, "_prober", lambda *arguments: prober)
    return read_json(find(folder, pair, settings, mock.Mock())), prober.measured


def test_a_steady_score_stops_after_the_least_prompts(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    steady = np.random.default_rng(0).random((LAYERS, HEADS))
    found, measured = found_with(lambda needle: steady, tmp_path, pair, monkeypatch, STOPPING)
    assert found["samples"] == len(measured) == 12  # the batch that holds the tenth
    assert sorted(measured) == sorted(key for batch in batches(HeadPrompts(pair, FULL).keys)[:3] for key in batch)
    assert found["stopping"] == {
        "asked_prompts": ALL,
        "used_prompts": 12,
        "least_prompts": 10,
        "stable_overlap": 0.9,
        "top4_overlap": {"mean": 1.0, "low": 1.0, "high": 1.0, "halves": 3},
    }


def test_noise_does_not_stop(tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    found, measured = found_with(noise(1), tmp_path, pair, monkeypatch, replace(STOPPING, stable_overlap=0.5))
    assert found["samples"] == len(measured) == ALL
    assert found["stopping"]["used_prompts"] == ALL
    assert found["stopping"]["top4_overlap"]["low"] < 0.5


EASY = replace(STOPPING, stable_overlap=0.01)
"""That any scores reach."""


def test_stopping_is_a_full_run_over_its_first_prompts_and_goes_on_from_there(tmp_path: Path, pair: Pair) -> None:
    full = find(tmp_path / "full", pair, FULL)
    assert "stopping" not in read_json(full)
    early = find(tmp_path / "early", pair, EASY)
    found = read_json(early)
    used = {key for batch in batches(HeadPrompts(pair, FULL).keys)[:3] for key in batch}
    whole = read_entries(tmp_path / "full" / "target")
    chosen = [entry for entry in whole if Key(entry["length"], entry["depth"], entry["needle"]) in used]
    mean = np.mean([entry["span"] for entry in chosen], axis=0)
    np.testing.assert_allclose(found["scores"], mean, rtol=1e-5)
    assert found["ranking"] == rank(mean)
    assert (found["samples"], found["stopping"]["used_prompts"]) == (12, 12)
    assert sorted(map(str, read_entries(tmp_path / "early" / "target"))) == sorted(map(str, chosen))
    # More prompts that happen to be there change nothing.
    assert find(tmp_path / "full", pair, EASY, never).read_bytes() == early.read_bytes()
    # Without the option, what was measured is kept and the rest follows.
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "early" / "target").glob("*-n*.json")}
    assert len(kept) == 12
    find(tmp_path / "early", pair, FULL)
    find(tmp_path / "full", pair, FULL, never)
    for path in sorted((tmp_path / "full").rglob("*.json")):
        assert path.read_bytes() == (tmp_path / "early" / path.relative_to(tmp_path / "full")).read_bytes()


def test_a_resumed_run_stops_where_it_would_have(tmp_path: Path, pair: Pair) -> None:
    whole = find(tmp_path / "whole", pair, EASY)
    cut = find(tmp_path / "cut", pair, EASY)
    files = sorted((tmp_path / "cut" / "target").glob("*-n*.json"))
    for path in (cut, *files[2:9]):
        path.unlink()
    assert find(tmp_path / "cut", pair, EASY).read_bytes() == whole.read_bytes()
    assert {path.name: path.read_bytes() for path in (tmp_path / "cut" / "target").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "whole" / "target").iterdir()
    }
    assert find(tmp_path / "cut", pair, EASY, never).read_bytes() == whole.read_bytes()
