"""`dustin-profile eval pg19` on the tiny pair: speed and perplexity side by side, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from commands import Outcome, dustin_profile
from tiny_pair import TinyPair

from dustin_profile.evaluation import fidelity_stage
from dustin_profile.evaluation.pg19 import _ratio
from dustin_profile.evaluation.repetition import distinct
from dustin_runtime.files import read_json

USAGE, CONFLICT, MISSING = 2, 4, 6
SMALL = ("--data", "topics", "--context", 140, "--documents", 2, "--tokens", 12)
METHODS = ("--method", "vanilla", "--method", "sd", "--method", "dustin", "--method", "streaming")


def pg19(pair: TinyPair, config: Path, run: Path, *options: object) -> Outcome:
    return dustin_profile("eval", "pg19", config, *pair.options, "--run-dir", run, *SMALL, *options)


def test_speed_and_perplexity_of_the_same_prompts(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    found = pg19(tiny_pair, config, tmp_path, *METHODS, "--budget", 64, "--budget", 32, "--json")
    assert found.code == 0, found.err
    document = json.loads(found.out)
    folder = tmp_path / "pg19"
    assert document == read_json(folder / "results.json")
    entries = {(entry["method"], entry["budget"]): entry for entry in document["entries"]}
    assert list(entries) == [
        *(("vanilla", None), ("sd", None), ("dustin", 32), ("dustin", 64)),
        *(("streaming", 32), ("streaming", 64)),
    ]
    full = entries["vanilla", None]
    assert entries["sd", None]["perplexity"] == full["perplexity"]
    assert full["speed_over_vanilla"] is full["kl"] is None
    alone = dustin_profile(
        *("eval", "fidelity", config, *tiny_pair.options, "--run-dir", tmp_path, "--quiet", *SMALL),
        *("--method", "dustin", "--method", "streaming", "--budget", 64, "--budget", 32, "--json"),
    )
    summary = json.loads(alone.out)["summary"]
    assert full["perplexity"] == pytest.approx(summary["full"]["perplexity"])
    for cell, entry in entries.items():
        assert entry["items"] == 2 and entry["speed_by_document"]["mean"] > 0
        if cell[1]:
            assert entry["perplexity"] == pytest.approx(summary[f"{cell[0]}-k{cell[1]}"]["perplexity"])
            assert entry["kl"] == pytest.approx(summary[f"{cell[0]}-k{cell[1]}"]["kl"])
            assert entry["speed_over_vanilla"]["mean"] > 0
            assert entry["tau_by_document"]["mean"] >= 1
    assert (folder / "results.png").read_bytes()[1:4] == b"PNG"
    text = (folder / "results.md").read_text()
    assert "2 prompts of 128 tokens, 12 tokens each" in text
    assert str(tmp_path) not in text + json.dumps(document)


@pytest.mark.usefixtures("plain_pictures")
def test_both_parts_continue_where_they_stopped(
    tiny_pair: TinyPair, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    original = fidelity_stage.prepare

    def interrupt(*arguments: object, **named: object) -> object:
        measured.append(1)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return original(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(fidelity_stage, "prepare", interrupt)
    assert pg19(tiny_pair, config, tmp_path, "--quiet").code == 130
    rows = (tmp_path / "pg19" / "rows" / "dustin-k64.jsonl").read_bytes()
    shown = pg19(tiny_pair, config, tmp_path, "--quiet")
    assert shown.code == 0, shown.err
    assert len(measured) == 3
    assert (tmp_path / "pg19" / "rows" / "dustin-k64.jsonl").read_bytes() == rows
    assert "books continued" in shown.out and "distinct" in shown.out
    other = pg19(tiny_pair, config, tmp_path, "--quiet", "--method", "streaming")
    assert other.code == CONFLICT
    assert "perplexity: made with cells = ['dustin-k64'], now ['streaming-k64']" in other.error
    assert not (tmp_path / "pg19" / "rows" / "streaming-k64.jsonl").exists()  # refused before it generates


def test_methods_that_read_everything_share_one_perplexity(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    found = pg19(tiny_pair, config, tmp_path, "--method", "vanilla", "--method", "magicdec", "--json")
    assert found.code == 0, found.err
    vanilla, magicdec = json.loads(found.out)["entries"]
    assert vanilla["perplexity"] == magicdec["perplexity"] > 1
    assert magicdec["budget"] is magicdec["kl"] is None


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--budget", 128], USAGE, "--budget 128: covers a prompt of 128 tokens"),
        (["--tokens", 140], USAGE, "--tokens 140: leaves no prompt of --context 140"),
        (["--method", "eagle"], USAGE, "--method eagle: unknown"),
        (["--data", "absent.txt"], MISSING, "absent.txt: no such file"),
    ],
)
def test_bad_options(
    options: list[object], code: int, message: str, tiny_pair: TinyPair, config: Path, tmp_path: Path
) -> None:
    refused = pg19(tiny_pair, config, tmp_path, "--quiet", *options)
    assert (refused.code, refused.out) == (code, "")
    assert refused.error.startswith(message)


def test_repetition_is_seen() -> None:
    assert distinct(["one", "two", "three", "four", "five"]) == 1
    assert distinct(["a", "b", "c", "d"] * 10) == pytest.approx(4 / 37)
    assert distinct(["short"]) == 1


def test_speeds_are_compared_document_by_document() -> None:
    own = {"a": {"tokens_per_s": 4.0}, "b": {"tokens_per_s": 9.0}, "c": {"tokens_per_s": None}}
    found = _ratio(own, {"a": {"tokens_per_s": 2.0}, "b": {"tokens_per_s": 3.0}, "c": {"tokens_per_s": 1.0}})
    assert found is not None
    assert found["mean"] == pytest.approx(math.sqrt(6)) and found["documents"] == 2
