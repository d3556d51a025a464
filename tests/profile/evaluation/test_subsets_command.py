"""`dustin-profile eval subsets` on the tiny pair: the table, resumption, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest
from commands import Outcome, dustin_profile
from tiny_pair import TinyPair

from dustin_profile.evaluation import subsets as stage
from dustin_runtime.files import read_json, write_json

USAGE, CONFLICT, MISSING = 2, 4, 6
SMALL = ("--context", 140, "--documents", 3, "--tokens", 12, "--subsets", 4)


def subsets(pair: TinyPair, config: Path, run: Path, *options: object) -> Outcome:
    return dustin_profile("eval", "subsets", config, *pair.options, "--run-dir", run, "--quiet", *SMALL, *options)


def test_correlations_of_every_size_in_one_table(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    found = subsets(tiny_pair, config, tmp_path, "--json")
    assert found.code == 0, found.err
    document = json.loads(found.out)
    folder = tmp_path / "subsets"
    assert document == read_json(folder / "results.json")
    assert list(document["summary"]) == ["32", "64", "all"]  # half and all of the config's; twice does not fit
    assert document["summary"]["all"]["subsets"] == 3 * 2 * 4
    for entry in document["documents"]:
        for one in entry["subsets"]:
            assert 0 < one["arr"] <= 1 and one["kl"] >= 0 and 0 <= one["agreement"] <= 1
        assert [one["sharpness"] for one in entry["subsets"][:4]] == pytest.approx([0, 2 / 3, 4 / 3, 2])
    assert document["summary"]["all"]["pearson_log"]["mean"] < 0
    assert len(pandas.read_parquet(folder / "rows.parquet")) == 24
    assert (folder / "results.png").read_bytes()[1:4] == b"PNG"
    text = (folder / "results.md").read_text()
    assert "| all | 24 |" in text and str(tmp_path) not in text + json.dumps(document)


@pytest.mark.usefixtures("plain_pictures")
def test_documents_that_are_done_are_not_drawn_again(
    tiny_pair: TinyPair, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = subsets(tiny_pair, config, tmp_path / "whole", "--budget", 40, "--json")
    measured = []
    original = stage.prepare

    def interrupt(*arguments: object, **named: object) -> object:
        measured.append(1)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return original(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "prepare", interrupt)
    assert subsets(tiny_pair, config, tmp_path / "run", "--budget", 40).code == 130
    found = subsets(tiny_pair, config, tmp_path / "run", "--budget", 40, "--json")
    assert len(measured) == 2 + 2
    assert json.loads(found.out) == json.loads(whole.out)
    other = subsets(tiny_pair, config, tmp_path / "run", "--budget", 40, "--seed", 1)
    assert other.code == CONFLICT
    assert "subsets: made with seed = 0, now 1" in other.error
    write_json(tmp_path / "run" / "subsets" / "document-0001.json", {})
    broken = subsets(tiny_pair, config, tmp_path / "run", "--budget", 40)
    assert broken.code == MISSING
    assert broken.error.endswith("document-0001.json: is not a result; delete the file to measure its document again")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", 128], "--budget 128: covers a prompt of 128 tokens"),
        (["--budget", 12], "--budget: "),
        (["--tokens", 140], "--tokens 140: leaves no prompt of --context 140"),
    ],
)
def test_bad_options(options: list[object], message: str, tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    refused = subsets(tiny_pair, config, tmp_path, *options)
    assert (refused.code, refused.out) == (USAGE, "")
    assert refused.error.startswith(message)
