"""Stability of rankings: planted scores, brute force, and the command on the tiny pair."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from commands import SRH, Outcome, dustin_profile
from scipy.stats import kendalltau, t
from tiny_pair import TinyPair

from dustin_profile.evaluation.stability import PromptScores, analyse, between, parts, sizes
from dustin_profile.srh.ranking import agreement, kendall
from dustin_runtime.errors import ConflictError
from dustin_runtime.files import read_json, write_json

USAGE, CONFLICT, MISSING, NOTHING = 2, 4, 6, 8
HEADS = 8


def scores(
    tables: Callable[[int, int, float, np.random.Generator], np.ndarray], needles: int = 6, **inputs: Any
) -> PromptScores:
    """A prompt per needle, length and depth; `tables` makes its [2, HEADS] scores."""
    cells = [(n, length, depth) for length in (100, 200) for depth in (0.0, 1.0) for n in range(needles)]
    random = np.random.default_rng(7)
    made_from = {"model": {"id": "m", "sha256": "1"}, "mode": "forced", "needles_sha256": "n", "haystack": "a"} | inputs
    return PromptScores(
        "run",
        made_from,
        np.stack([tables(*cell, random) for cell in cells]),
        *(np.asarray(column) for column in zip(*cells, strict=True)),
    )


def noisy(needle: int, length: int, depth: float, random: np.random.Generator) -> np.ndarray:
    return np.arange(HEADS) / HEADS + random.normal(0, 0.3, (2, HEADS))


def test_tau_of_all_layers_is_scipys() -> None:
    random = np.random.default_rng(0)
    first, second = random.integers(0, 4, (2, 30, 9)).astype(float)  # many ties
    first[3] = 1.0
    want = [kendalltau(a, b).statistic for a, b in zip(first, second, strict=True)]
    np.testing.assert_allclose(kendall(first, second), want, atol=1e-12)
    assert np.isnan(kendall(first, second)[3])


def test_same_scores_everywhere_agree_in_all() -> None:
    def same(needle: int, length: int, depth: float, random: np.random.Generator) -> np.ndarray:
        return np.tile(np.arange(HEADS, 0.0, -1), (2, 1))

    found = analyse([scores(same)], draws=5)
    assert [entry["needles"] for entry in found["sizes"]] == [1, 2, 3]
    assert [entry["prompts"] for entry in found["sizes"]] == [4, 8, 12]
    for entry in (*found["sizes"], *found["lengths"], *found["depths"]):
        for name in ("top4_overlap", "kendall_tau"):
            assert (entry[name]["mean"], entry[name]["low"], entry[name]["high"]) == (1, 1, 1)
    assert found["chance_overlap"] == 0.5


def test_what_depends_on_depth_alone_shows_there_alone() -> None:
    def turned(needle: int, length: int, depth: float, random: np.random.Generator) -> np.ndarray:
        row = np.arange(HEADS, dtype=float)
        return np.stack([row, row[::-1] if depth else row])

    found = analyse([scores(turned)], draws=3)
    assert found["lengths"][0]["kendall_tau"]["mean"] == 1
    (depths,) = found["depths"]
    assert (depths["first"], depths["second"]) == (0.0, 1.0)
    assert depths["kendall_tau"]["mean"] == pytest.approx(0)  # +1 in one layer, -1 in the other
    assert depths["per_layer"] == [1.0, 0.0]


def test_subsets_are_beside_the_needles_left_out() -> None:
    """Were they compared with all, one outlier among two needles would agree with itself."""

    def opposite(needle: int, length: int, depth: float, random: np.random.Generator) -> np.ndarray:
        return np.tile(np.arange(HEADS, dtype=float)[:: 1 if needle else -1], (2, 1))

    (entry,) = sizes(scores(opposite, needles=2), draws=4, seed=0)
    assert entry["kendall_tau"]["mean"] == -1
    assert entry["top4_overlap"]["high"] == 0


def test_intervals_leave_out_a_needle_at_a_time() -> None:
    sample = scores(noisy)
    (entry,) = parts(sample, "length")

    def tau(keep: np.ndarray) -> float:
        sides = [sample.tables[keep & (sample.length == length)].mean(0) for length in (100, 200)]
        return agreement(*sides).kendall

    whole = tau(np.ones(len(sample.needle), dtype=bool))
    left = np.asarray([tau(sample.needle != needle) for needle in range(6)])
    reach = t.ppf(0.975, 5) * np.sqrt(5 / 6 * ((left - left.mean()) ** 2).sum())
    assert entry["kendall_tau"]["mean"] == pytest.approx(whole)
    assert entry["kendall_tau"]["low"] == pytest.approx(max(whole - reach, -1))
    assert entry["kendall_tau"]["high"] == pytest.approx(min(whole + reach, 1))
    assert parts(scores(noisy, needles=1), "length")[0]["kendall_tau"]["low"] is None


def test_runs_are_paired_by_their_needles_or_vary_apart() -> None:
    first = scores(noisy)
    same = between(first, scores(noisy, haystack="b"))
    assert same["differs"] == {"haystack": ["a", "b"]} and same["paired"]
    assert (
        same["kendall_tau"]["mean"] == same["kendall_tau"]["low"] == 1
    )  # the same noise: nothing but the name differs
    other = between(first, scores(noisy, needles=4, needles_sha256="o"))
    assert not other["paired"]
    assert other["kendall_tau"]["low"] < other["kendall_tau"]["mean"]
    with pytest.raises(ConflictError, match="ranked different ones"):
        analyse([first, scores(noisy, model={"id": "m", "sha256": "2"})], draws=2)


@pytest.fixture(scope="module")
def ranked(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("heads") / "first"
    done = dustin_profile("srh", *tiny_pair.options, *SRH, "--length", 320, "--run-dir", run, "--quiet")
    assert done.code == 0, done.err
    return run


def stability(*options: object) -> Outcome:
    return dustin_profile("eval", "stability", *options, "--draws", 5)


def test_the_command_needs_no_model(tiny_pair: TinyPair, ranked: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was a dark night. The wind blew over the hills, and nobody came. " * 200)
    other = tmp_path / "second"
    options = (*tiny_pair.options, *SRH, "--length", 320, "--haystack", book, "--run-dir", other, "--quiet")
    assert dustin_profile("srh", *options).code == 0
    found = stability(ranked, other, "--run-dir", tmp_path / "out", "--json")
    assert found.code == 0, found.err
    document = json.loads(found.out)
    folder = tmp_path / "out" / "stability"
    assert document == read_json(folder / "results.json")
    assert document["runs"] == ["first", "second"]
    for side, layers in (("target", 4), ("draft", 3)):
        part = document[side]
        assert (part["needles"], part["prompts"], part["layers"]) == (3, 12, layers)
        assert [entry["needles"] for entry in part["sizes"]] == [1]
        assert [(entry["first"], entry["second"]) for entry in part["lengths"]] == [(256, 320)]
        assert part["runs"][0]["differs"]["haystack"][1] == "book.txt"
    text = (folder / "results.md").read_text()
    assert "second: haystack" in text and str(tmp_path) not in text + json.dumps(document)
    assert (folder / "results.png").read_bytes()[1:4] == b"PNG"
    assert set(pandas.read_parquet(folder / "rows.parquet")["side"]) == {"target", "draft"}
    shown = stability(ranked, "--quiet")
    assert "the other 2" in shown.out
    assert (ranked / "stability" / "results.json").exists()


@pytest.mark.usefixtures("plain_pictures")
def test_what_is_missing_is_named(ranked: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(ranked, tmp_path / "run"))
    assert stability(run, ranked, run).error == (
        "RUN: two run directories have one name; the results tell them apart by it"
    )
    part = run / "srh" / "draft" / "256-1.json"
    entries = read_json(part)
    write_json(part, {})
    damaged = stability(run)
    assert (damaged.code, damaged.error) == (
        MISSING,
        f"{part}: is not a part of scores; delete it and run dustin-profile srh again",
    )
    part.unlink()
    assert stability(run).error == f"{part}: not measured yet; let dustin-profile srh finish"
    write_json(part, entries)
    for path in (run / "srh" / "draft").glob("[0-9]*.json"):
        write_json(path, [entry | {"accepted": False} for entry in read_json(path)])
    nothing = stability(run)
    assert (nothing.code, nothing.error) == (
        NOTHING,
        f"{run / 'srh' / 'draft'}: no needle was retrieved; rank with --mode forced",
    )
    (tmp_path / "empty").mkdir()
    absent = stability(tmp_path / "empty")
    assert absent.code == MISSING
    assert absent.error.endswith("srh/target: no scores of heads; measure them with dustin-profile srh")
    for path, what in ((ranked / "srh" / "heads-target.json", "is a file"), (tmp_path / "none", "no such folder")):
        refused = dustin_profile("eval", "stability", path)
        assert (refused.code, refused.error.partition(": ")[2].partition(";")[0]) == (absent.code, what)
    assert not (tmp_path / "none").exists()
