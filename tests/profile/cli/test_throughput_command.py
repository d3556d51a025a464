"""`search --objective throughput` and `latency` on two tiny models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import SEARCH, TRACE, Outcome, dustin_profile, dustin_run
from tiny_pair import TinyPair

from dustin_profile import plots
from dustin_profile.latency.measure import GPU_PREPARING_S
from dustin_runtime.config import load_config
from dustin_runtime.files import digest, read_json, write_json

pytestmark = pytest.mark.usefixtures("plain_pictures")

STEPS = [*("--budgets", "48", "--budgets", "64", "--depths", "4", "--depths", "2", "--depths", "3"), "--batch", "2"]
THROUGHPUT = [*TRACE, "--draft-layers", "2", "--objective", "throughput", *STEPS]
LATENCY = ["--context", "256", "--draft-layers", "2", *STEPS]


@pytest.fixture(scope="module")
def found(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; its pictures are real."""
    run = tmp_path_factory.mktemp("throughput") / "run"
    outcome = dustin_profile("search", *tiny_pair.options, "--run-dir", run, *THROUGHPUT, "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out) == read_json(run / "results.json")
    return run


@pytest.fixture
def run(found: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(found, tmp_path / "run"))


def search(pair: TinyPair, run: Path, *options: object) -> Outcome:
    return dustin_profile("search", *pair.options, "--run-dir", run, *THROUGHPUT, *options)


def test_the_config_is_the_chosen_candidate(found: Path) -> None:
    results, config, latency = (
        read_json(found / "results.json"),
        load_config(found),
        read_json(found / "latency.json"),
    )
    record = results["throughput"]
    chosen = record["candidates"][record["chosen"]]
    assert (config.depth, config.selection.budget, config.selection.m, config.draft_cache) == (
        chosen["depth"],
        chosen["budget"],
        chosen["m"],
        "full",
    )
    assert config.guard is not None
    assert (config.guard.m, config.guard.depth, config.guard.draft_cache) == (chosen["m"], 4, "full")  # as traced
    if chosen["m"]:
        assert [entry.layer for entry in config.selection.lookahead] == chosen["draft_layers"]
    assert results["selection"] == config.selection.model_dump(mode="json")
    assert results["policies"]["hybrid"]["arr"]["mean"] == pytest.approx(chosen["arr"]["mean"], abs=1e-9)
    assert {(entry["depth"], entry["budget"]) for entry in record["candidates"]} == {
        (depth, k) for depth in (2, 3, 4) for k in (48, 64)
    }
    assert config.provenance["search"] == {
        "objective": "throughput",
        "rule": {"choose": "within-1se"},
        "candidates": len(record["candidates"]),
        "latency_sha256": digest(latency),
    }
    predicted = config.evidence["predicted"]
    assert predicted["tokens_per_s"]["mean"] == pytest.approx(chosen["tokens_per_s"]["mean"], abs=1e-3)
    assert (predicted["batch"], predicted["context"]) == (2, 256)
    assert latency["inputs"]["budgets"] == [48, 64] and latency["inputs"]["depths"] == [2, 3, 4]
    assert latency["device"].startswith("cpu") and latency["versions"]["torch"]
    assert len([row for row in latency["measurements"] if not row["fitted"]]) == 4
    assert {path.name for path in found.glob("*.png")} == {"arr.png", "throughput.png"}
    text = (found / "results.md").read_text()
    assert "## ARR against speed" in text and "| chosen |" in text


def test_a_finished_run_measures_nothing_again(run: Path, tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dustin_runtime.models.weights.load_decoder", None)
    before = read_json(run / "results.json")
    again = search(tiny_pair, run)
    assert again.code == 0, again.err
    assert "measured on cpu" in again.err
    assert read_json(run / "results.json")["throughput"] == before["throughput"]
    for text in ("ARR against speed", "tokens/s, predicted", "chosen", "of lossless greedy verification"):
        assert text in again.out


def test_cut_after_the_traces_it_goes_on_with_the_steps(run: Path, tiny_pair: TinyPair) -> None:
    for name in ("latency.json", "config.yaml", "results.json"):
        (run / name).unlink()
    shutil.rmtree(run / "search")
    traces = {path.name: path.stat().st_mtime_ns for path in (run / "traces").glob("*.safetensors")}
    assert search(tiny_pair, run).code == 0
    assert {path.name: path.stat().st_mtime_ns for path in (run / "traces").glob("*.safetensors")} == traces
    assert load_config(run).provenance["search"]["latency_sha256"] == digest(read_json(run / "latency.json"))


def test_the_picture_is_drawn(found: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    record = read_json(found / "results.json")["throughput"]
    plots.throughput_front(tmp_path / "front.png", record)
    for entry in record["candidates"]:  # of one document
        entry["arr"] |= {"low": None, "high": None}
    plots.throughput_front(tmp_path / "alone.png", record)
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("front.png", "alone.png"))


def test_the_report_has_the_front(run: Path) -> None:
    outcome = dustin_profile("report", run)
    assert outcome.code == 0, outcome.err
    page = (run / "report.html").read_text()
    record = read_json(run / "results.json")["throughput"]
    chosen = record["candidates"][record["chosen"]]
    assert "ARR against predicted speed" in page
    assert f"k = {chosen['budget']}, m = {chosen['m']}, depth {chosen['depth']}" in page
    results = read_json(run / "results.json")
    results["throughput"]["chosen"] = len(record["candidates"])
    write_json(run / "results.json", results)
    damaged = dustin_profile("report", run)
    assert "candidate" in damaged.err and "is named" in damaged.err


def test_the_config_is_served_and_guarded(found: Path, tiny_pair: TinyPair) -> None:
    served = dustin_run(
        "generate", "--config", found, *tiny_pair.options, "a prompt of some words", "--max-new-tokens", "4"
    )
    assert served.code == 0, served.err
    checked = dustin_profile("check", found, "--baseline", found / "results.json", *tiny_pair.options)
    assert checked.code == 0, checked.err
    assert "hybrid +0.0000" in checked.out


def test_both_caches_of_the_draft_are_candidates_and_the_assumed_one_says_so(run: Path, tiny_pair: TinyPair) -> None:
    outcome = search(tiny_pair, run, "--draft-cache", "sink+window", "--overwrite")
    assert outcome.code == 0, outcome.err
    config = load_config(run)
    assert config.draft_cache == "sink+window" and config.draft_budget == config.selection.budget
    assert "ARR of sink+window is assumed to be that of a draft that reads everything" in outcome.out
    assert len(list((run / "windowed").glob("0*.json"))) == 5
    (run / "windowed" / "00001.json").unlink()
    before = read_json(run / "results.json")["throughput"]
    assert search(tiny_pair, run, "--draft-cache", "sink+window").code == 0
    assert read_json(run / "results.json")["throughput"] == before
    (run / "windowed" / "00001.json").write_text('{"agrees": {}}')
    damaged = search(tiny_pair, run, "--draft-cache", "sink+window")
    assert damaged.code == 6 and "delete the file to read its document again" in damaged.error


def test_latency_is_a_command_of_its_own(run: Path, tiny_pair: TinyPair, tmp_path: Path) -> None:
    options = [*tiny_pair.options, *LATENCY]
    document = read_json(run / "latency.json")
    kept = dustin_profile("latency", *options, "--run-dir", run, "--json")
    assert kept.code == 0 and json.loads(kept.out) == document
    shown = dustin_profile("latency", *options, "--run-dir", run)
    assert "off on steps that were not fitted" in shown.out and "batch 2, 256 tokens of context" in shown.out
    refused = dustin_profile("latency", *options, "--run-dir", run, "--batch", "3")
    assert refused.code == 4
    assert "measured with batch = 2, now 3: give another --run-dir, or --overwrite to measure again" in refused.error
    again = dustin_profile("latency", *options, "--run-dir", run, "--batch", "3", "--overwrite", "--json")
    assert json.loads(again.out)["inputs"]["batch"] == 3


def test_times_of_another_device_are_searched_with_but_not_passed_for_this_one(run: Path, tiny_pair: TinyPair) -> None:
    write_json(run / "latency.json", read_json(run / "latency.json") | {"device": "NVIDIA H200"})
    refused = dustin_profile("latency", *tiny_pair.options, *LATENCY, "--run-dir", run)
    assert refused.code == 4 and "device = NVIDIA H200" in refused.error
    outcome = search(tiny_pair, run, "--overwrite")
    assert outcome.code == 0 and "NVIDIA H200" in outcome.out
    assert load_config(run).evidence["predicted"]["device"] == "NVIDIA H200"


def test_a_damaged_measurement_is_named(run: Path, tiny_pair: TinyPair) -> None:
    (run / "latency.json").write_text("{}")
    refused = search(tiny_pair, run)
    assert refused.code == 6 and "latency.json: is not a measurement of steps; delete it" in refused.error


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--choose", "least-arr", "--least-arr", "1", "--overwrite"], 2, "ask for less, or give larger --budgets"),
        (["--depths", "5"], 2, "--depths 5: give 1 to 4, the depth that is traced; for more, raise --depth"),
        (["--budgets", "256"], 2, "--budgets 256: give 22 to 255, less than --context 256"),
        (["--budgets", "21"], 2, "--budgets 21: give 22 to 255"),
        (["--budget", "64"], 2, "--budget 64: give it or --budgets, not both"),
        (["--batch", "0"], 2, "--batch 0: must be at least 1"),
        (["--least-arr", "0.5"], 2, "--least-arr 0.5: add --choose least-arr"),
        (["--choose", "least-arr", "--least-arr", "1.5"], 2, "--least-arr 1.5: give an ARR above 0"),
        (["--sampler", "tpe"], 2, "--sampler tpe: --objective throughput enumerates"),
        (["--draft-cache", "both"], 4, "objective.draft_cache = full, now both"),
        (["--objective", "arr"], 2, "--batch: says nothing about --objective arr"),
    ],
)
def test_what_is_refused(run: Path, tiny_pair: TinyPair, options: list[str], code: int, message: str) -> None:
    outcome = search(tiny_pair, run, *options)
    assert (outcome.code, message in outcome.error) == (code, True), outcome.err


def test_a_search_with_other_times_is_refused_before_steps_are_timed(
    run: Path, tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "latency.json").unlink()
    monkeypatch.setattr("dustin_profile.latency.stage._measure", None)
    refused = search(tiny_pair, run)
    assert refused.code == 4 and "search: made with steps.latency_sha256 = " in refused.error
    assert ", now to be measured: give another --run-dir, or --overwrite to discard it" in refused.error
    assert "objective.choose = within-1se, now least-arr" in search(tiny_pair, run, "--choose", "least-arr").error


def test_a_rule_that_lets_none_through_changes_nothing(run: Path, tiny_pair: TinyPair) -> None:
    kept = [path for path in run.rglob("*") if path.is_file() and path.suffix != ".png" and path.name != "seconds.json"]
    before = {path: path.read_bytes() for path in kept}
    refused = search(tiny_pair, run, "--choose", "least-arr", "--least-arr", "1", "--overwrite")
    assert refused.code == 2
    assert {path: path.read_bytes() for path in before} == before
    assert search(tiny_pair, run, "--choose", "least-arr", "--least-arr", "0.1", "--overwrite").code == 0
    results = read_json(run / "results.json")
    text = (run / "results.md").read_text()
    low, high = results["m"]["flat"]
    assert low <= results["m"]["highest"] <= high
    if not low <= results["m"]["chosen"] <= high:
        assert f"within 0.001 of the highest ARR, that of m = {results['m']['highest']}, from {low} to {high}" in text
        assert "resampled documents choose" not in text


def test_a_run_keeps_to_its_objective(run: Path, tiny_pair: TinyPair) -> None:
    refused = dustin_profile("search", *tiny_pair.options, "--run-dir", run, *SEARCH)
    assert (refused.code == 4 and "objective" in refused.error) or "budget" in refused.error
    assert dustin_profile("search", *tiny_pair.options, "--run-dir", run, *SEARCH, "--overwrite").code == 0
    results = read_json(run / "results.json")
    assert "throughput" not in results and "search" not in results["provenance"]
    assert "predicted" not in load_config(run).evidence
    inputs: dict[str, Any] = read_json(run / "search" / "inputs.json")
    assert not {"objective", "steps"} & inputs.keys()


def test_default_budgets_and_a_single_one(run: Path, tiny_pair: TinyPair) -> None:
    arguments = [*TRACE, "--draft-layers", "1", "--objective", "throughput", "--depths", "2", "--overwrite"]
    for options, expected in (([], {128}), (["--budget", "40"], {40})):
        outcome = dustin_profile("search", *tiny_pair.options, "--run-dir", run, *arguments, *options, "--json")
        assert outcome.code == 0, outcome.err
        assert {entry["budget"] for entry in json.loads(outcome.out)["throughput"]["candidates"]} == expected


def test_a_dry_run_prices_the_steps(tiny_pair: TinyPair, tmp_path: Path) -> None:
    for command, options in (("search", THROUGHPUT), ("latency", LATENCY)):
        priced = dustin_profile(
            command, *tiny_pair.options, *options, "--run-dir", tmp_path / "no", "--dry-run", "--json"
        )
        assert priced.code == 0, priced.err
        stages = {row["stage"]: row for row in json.loads(priced.out)["stages"]}
        assert stages["latency"]["seconds"] > 0 and stages["latency"]["gpu_bytes"] > 0
        assert ("search" in stages) == (command == "search")
    assert not (tmp_path / "no").exists()


def test_a_dry_run_prices_the_kernels_that_a_gpu_compiles() -> None:
    priced = dustin_profile("latency", "--pair", "smollm2", "--dry-run", "--json")
    assert priced.code == 0, priced.err
    seconds = {row["device"]: row["seconds"] for row in json.loads(priced.out)["stages"]}
    assert 10 * GPU_PREPARING_S < seconds["h200"] <= seconds["a100"] < 30 * GPU_PREPARING_S + 30
