"""`dustin-profile eval arr` on a search of the tiny pair: tables, resumption, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas
import pytest
from commands import SEARCH, TRACE, Outcome, dustin_profile
from tiny_pair import TinyPair

from dustin_profile.evaluation.arr import stage
from dustin_profile.evaluation.arr.policies import rules
from dustin_runtime.config import load_config, save_config
from dustin_runtime.files import read_json, write_json

USAGE, CONFLICT, MISSING = 2, 4, 6
DISTANCES = ("--distance", 1, "--distance", 8)


@pytest.fixture(scope="module")
def searched(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    done = dustin_profile("search", *tiny_pair.options, *SEARCH, "--run-dir", run, "--quiet")
    assert done.code == 0, done.err
    return run


@pytest.fixture
def run(searched: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(searched, tmp_path / "run"))


def arr(pair: TinyPair, run: Path, *options: object) -> Outcome:
    models = pair.options if "--forced-pass" in options else ()
    return dustin_profile("eval", "arr", run, *models, *options)


def test_traces_alone_give_budgets_and_splits(run: Path) -> None:
    found = dustin_profile("eval", "arr", run, "--json")  # no model is asked for
    assert found.code == 0, found.err
    document = json.loads(found.out)
    assert document == read_json(run / "arr" / "results.json")
    results = read_json(run / "results.json")
    held_out = results["documents"]["reported"]
    assert set(document["documents"]) == set(held_out)
    entries = {(entry["policy"], entry["budget"]): entry for entry in document["budgets"]}
    assert {budget for _, budget in entries} == {32, 64, 128}
    for ours, theirs in (("dustin", "hybrid"), ("dustin-t", "dustin_t"), ("oracle", "oracle")):
        assert entries[ours, 64]["arr"] == pytest.approx(results["policies"][theirs]["arr"])
    assert document["layers"] is None and document["distances"] is None
    assert document["splits"][-1]["arr"]["dustin"]["mean"] == pytest.approx(entries["dustin", 64]["arr"]["mean"])
    frame = pandas.read_parquet(run / "arr" / "rows.parquet")
    windows = sum(entry["windows"] for entry in held_out.values())
    assert len(frame) == windows * 3 * len(rules())
    for figure in ("budgets", "lookahead", "splits"):
        assert (run / "arr" / f"{figure}.png").read_bytes()[1:4] == b"PNG"
    text = (run / "arr" / "results.md").read_text()
    assert "## By budget" in text and "## By target layer" not in text
    assert str(run) not in text + json.dumps(document)
    assert (run / "config.yaml").exists()
    shown = dustin_profile("eval", "arr", run, "--quiet", "--budget", 32)
    assert "oracle minus it" in shown.out


@pytest.mark.usefixtures("plain_pictures")
def test_a_pass_adds_layers_and_distances_and_continues(
    tiny_pair: TinyPair, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = arr(tiny_pair, run, "--forced-pass", *DISTANCES, "--split", "all", "--run-dir", run / "whole", "--json")
    assert whole.code == 0, whole.err
    document = json.loads(whole.out)
    assert len(document["documents"]) == 5
    assert len(document["layers"]["dustin"]) == 4
    assert {(entry["rule"], entry["distance"]) for entry in document["distances"]} == {
        (rule, distance) for rule in ("all-heads", "history-layer", "dustin-t") for distance in (1, 8)
    }
    by_budget = {entry["budget"]: entry for entry in document["budgets"] if entry["policy"] == "dustin-t"}
    for entry in document["distances"]:
        if entry["rule"] == "dustin-t" and entry["distance"] == 1:
            assert entry["arr"]["mean"] == pytest.approx(by_budget[entry["budget"]]["arr"]["mean"], abs=2e-3)
    assert "## By distance of history" in (run / "whole" / "arr" / "results.md").read_text()

    measured = []
    original = stage._document

    def interrupt(*arguments: object) -> object:
        measured.append(1)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "_document", interrupt)
    options = ("--forced-pass", *DISTANCES, "--split", "all")
    assert arr(tiny_pair, run, *options).code == 130
    again = arr(tiny_pair, run, *options, "--json")
    assert len(measured) == 3 + 3  # two documents are not run again
    assert json.loads(again.out) == document
    # Without the pass, what it left is kept where it was made from the same; a picture of other inputs is not.
    kept = dustin_profile("eval", "arr", run, "--split", "all", "--json")
    assert json.loads(kept.out) == document
    other = dustin_profile("eval", "arr", run, "--split", "all", "--budget", 32, "--json")
    assert json.loads(other.out)["layers"] is None and "is of other budgets; give --forced-pass" in other.err
    assert not [name for name in ("layers", "distances") if (run / "arr" / f"{name}.png").exists()]


@pytest.mark.usefixtures("plain_pictures")
def test_several_traces_are_kinds_of_documents(tiny_pair: TinyPair, run: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was a dark night. The wind blew over the hills, and nobody came. " * 200)
    traced = dustin_profile(
        "trace", *tiny_pair.options, *TRACE, "--documents", 2, "--data", book, "--run-dir", tmp_path / "other", "-q"
    )
    assert traced.code == 0, traced.err
    folders = ("--traces", run / "traces", "--traces", tmp_path / "other" / "traces")
    found = arr(tiny_pair, run, *folders, "--json")
    assert found.code == 0, found.err
    groups = [entry["group"] for entry in json.loads(found.out)["splits"]]
    assert groups == ["topics", "book.txt", "all documents"]
    twice = arr(tiny_pair, run, "--traces", run / "traces", "--traces", run / "traces")
    assert (twice.code, twice.error[:28]) == (USAGE, "--traces: two folders hold t")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", 256], "--budget 256: covers the shortest traced prompt, 256 tokens"),
        (["--distance", 4], "--distance: is of --forced-pass alone"),
        (["--pair", "qwen7b:0.5b"], "--pair: is of --forced-pass alone; add it"),
        (["--device", "cpu"], "--device: is of --forced-pass alone; add it"),
        (["--dtype", "auto"], "--dtype: is of --forced-pass alone; add it"),
        (["--forced-pass", "--distance", 256], "--distance 256: the shortest prompt has 256 tokens"),
    ],
)
def test_bad_options(options: list[object], message: str, tiny_pair: TinyPair, run: Path) -> None:
    refused = arr(tiny_pair, run, *options)
    assert (refused.code, refused.out) == (USAGE, "")
    assert refused.error.startswith(message)


def test_traces_that_are_not_the_configs_are_refused_by_field(tiny_pair: TinyPair, run: Path, tmp_path: Path) -> None:
    config = load_config(run)
    history = config.selection.history.model_copy(update={"heads": (0,)})
    selection = config.selection.model_copy(update={"history": history})
    other = tmp_path / "other.yaml"
    save_config(config.model_copy(update={"selection": selection}), other)
    refused = arr(tiny_pair, other, "--traces", run / "traces", "--split", "all")
    assert refused.code == CONFLICT
    assert f"history heads of layer {history.layer}: --traces" in refused.error
    save_config(config, other)
    unknown = arr(tiny_pair, other, "--traces", run / "traces")
    assert (unknown.code, unknown.error) == (
        USAGE,
        "--split held-out: no results of the search lie beside the config; give --split all",
    )
    assert arr(tiny_pair, other).error.startswith(f"--traces: {other} is a file")
    absent = arr(tiny_pair, other, "--traces", tmp_path / "none", "--split", "all")
    assert (absent.code, absent.error) == (
        MISSING,
        f"{tmp_path / 'none'}: no traces; collect them with dustin-profile trace or search",
    )


def test_a_damaged_shard_is_named(run: Path) -> None:
    for shard in (run / "traces").glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:100])
    broken = dustin_profile("eval", "arr", run, "--split", "all")
    assert broken.code == MISSING
    assert "00000.safetensors: damaged (" in broken.error
    again = "run the same dustin-profile trace or search again, which collects it anew"
    assert broken.error.endswith(f"): delete it and {again}")
    for shard in (run / "traces").glob("*.safetensors"):
        shard.unlink()
    absent = dustin_profile("eval", "arr", run, "--split", "all")
    assert (absent.code, absent.error.partition(": ")[2]) == (MISSING, f"no such file: {again}")


@pytest.mark.parametrize("content", ["{}", "[]", "", '{"kind": "dustin-results"}'])
def test_damaged_results_of_the_search_are_named(run: Path, content: str) -> None:
    (run / "results.json").write_text(content)
    broken = dustin_profile("eval", "arr", run)
    assert broken.code == MISSING
    assert broken.error.startswith(f"{run / 'results.json'}: ")
    remedy = "the file is damaged: run the same dustin-profile search again, or give --split all"
    assert broken.error.endswith(remedy)
    assert dustin_profile("eval", "arr", run, "--split", "all", "--budget", 32, "--json").code == 0


def test_data_without_a_traced_document_is_named(tiny_pair: TinyPair, run: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("It was a dark night, and nobody came over the hills. " * 800)
    refused = arr(tiny_pair, run, "--forced-pass", "--data", tmp_path / "other.txt")
    assert refused.code == CONFLICT
    assert f"--data {tmp_path / 'other.txt'}: has no document topics#" in refused.error
    assert refused.error.endswith("which the run was measured on (topics): say where that is with --data")


@pytest.mark.usefixtures("plain_pictures")
def test_another_attention_or_a_damaged_result_is_named(tiny_pair: TinyPair, run: Path) -> None:
    options = ("--forced-pass", *DISTANCES, "--quiet")
    assert arr(tiny_pair, run, *options).code == 0
    part = next((run / "arr" / "forced").glob("????????????????.json"))
    write_json(part, {})
    broken = arr(tiny_pair, run, *options)
    assert broken.code == MISSING
    assert broken.error.endswith(f"{part.name}: is not a result; delete the file to measure its document again")
    other = arr(tiny_pair, run, *options, "--budget", 32)
    assert other.code == CONFLICT
    assert "arr/forced: made with budgets = [32, 64, 128], now [32]" in other.error
    assert arr(tiny_pair, run, *options, "--budget", 32, "--overwrite").code == 0
