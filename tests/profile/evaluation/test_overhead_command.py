"""`dustin-profile eval overhead` on the tiny pair's shapes: the table, resumption, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest
from commands import Outcome, dustin_profile

from dustin_profile.evaluation import overhead as stage
from dustin_runtime.config import load_config, save_config
from dustin_runtime.files import read_json, write_json

USAGE, CONFLICT, MISSING = 2, 4, 6
NAMES = ["dustin", "dustin-t", "dustin-d", "quest, pages of 16", "all heads of the draft", "all heads of both models"]


def overhead(config: Path, run: Path, *options: object) -> Outcome:
    return dustin_profile(
        "eval", "overhead", config, "--device", "cpu", "--repeats", 3, "--run-dir", run, "--quiet", *options
    )


def test_a_table_by_length_without_any_model(config: Path, tmp_path: Path) -> None:
    found = overhead(config, tmp_path, "--length", 300, "--length", 150, "--batch", 2, "--json")
    assert found.code == 0, found.err
    document = json.loads(found.out)
    folder = tmp_path / "overhead"
    assert document == read_json(folder / "results.json")
    assert [row["context"] for row in document["rows"]] == [150, 300]
    for row in document["rows"]:
        assert list(row["estimators"]) == NAMES
        for one in row["estimators"].values():
            assert one["of_full"] == pytest.approx(one["min_ms"] / row["full"]["min_ms"])
            assert 0 < one["min_ms"] <= one["ms"] <= one["max_ms"]
        # Each reads the step's three new tokens too.
        assert row["sparse"]["bytes"] / row["full"]["bytes"] == pytest.approx((64 + 3) / (row["context"] + 3))
    assert document["data"] == "synthetic" and document["inputs"]["batch"] == 2
    assert len(pandas.read_parquet(folder / "rows.parquet")) == 2 * (2 + len(NAMES))
    assert (folder / "results.png").read_bytes()[1:4] == b"PNG"
    text = (folder / "results.md").read_text()
    assert "Synthetic caches, 2 rows" in text and str(tmp_path) not in text + json.dumps(document)


@pytest.mark.usefixtures("plain_pictures")
def test_lengths_that_are_timed_are_not_timed_again(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []
    original = stage._measure

    def interrupt(*arguments: object) -> object:
        timed.append(1)
        if len(timed) == 2:
            raise KeyboardInterrupt
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "_measure", interrupt)
    options = ("--length", 150, "--length", 300)
    assert overhead(config, tmp_path, *options).code == 130
    first = read_json(tmp_path / "overhead" / "length-150.json")
    found = overhead(config, tmp_path, *options, "--json")
    assert len(timed) == 3
    assert json.loads(found.out)["rows"][0] == first
    one = overhead(config, tmp_path, "--length", 150, "--json")
    assert [row["context"] for row in json.loads(one.out)["rows"]] == [150, 300]
    other = overhead(config, tmp_path, *options, "--batch", 2)
    assert other.code == CONFLICT
    assert "overhead: made with batch = 1, now 2" in other.error
    write_json(tmp_path / "overhead" / "length-150.json", {})
    broken = overhead(config, tmp_path, *options)
    assert broken.code == MISSING
    assert broken.error.endswith("length-150.json: is not a result; delete the file to time its length again")


def test_a_config_without_lookahead_is_refused(config: Path, tmp_path: Path) -> None:
    served = load_config(config)
    selection = served.selection.model_copy(update={"lookahead": (), "m": 0})
    path = tmp_path / "config.yaml"
    save_config(served.model_copy(update={"selection": selection}), path)
    refused = overhead(path, tmp_path)
    assert (refused.code, refused.error) == (
        USAGE,
        "selection.lookahead: names no draft layer, so half of the comparison is missing",
    )
