"""What is refused: one line with file and remedy, the exit code of its kind, nothing written. And what only looks
dangerous: names that are markup."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Outcome, dustin_profile
from html_page import Page
from result_files import RESULTS

from dustin_runtime.files import read_json

USAGE, CONFLICT, MISSING, CONFIG = 2, 4, 6, 7
ARR, FIDELITY, BENCH = "arr-smollm2.json", "fidelity-smollm2.json", "bench-qwen7b-1xh200.json"
HOSTILE = '</td><script>alert("1")</script><img src=x onerror=alert(2)>|$x_{1}$`&amp;'


def refused(outcome: Outcome, code: int, *words: str) -> None:
    assert (outcome.code, outcome.out) == (code, "")
    for word in words:
        assert word in outcome.error


def report(*runs: Path, output: Path) -> Outcome:
    outcome = dustin_profile("report", *runs, "--output", output, "--quiet")
    if outcome.code:
        assert not output.exists()
        assert not list(output.parent.glob("*.tmp")) + list(output.parent.glob(".*.tmp"))
    return outcome


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["no such file"]),
        ((RESULTS / ARR).read_text()[:5000], ["not JSON (line ", "half-written", "make it again"]),
        ("", ["not JSON (line 1), perhaps half-written"]),
        ("[1, 2]", ["not a result", "it names no kind", "dustin-profile eval"]),
        ('{"a": 1}', ["not a result", "it names no kind"]),
        ('{"kind": "someone-elses"}', ["not a result", "its kind is 'someone-elses'"]),
        ('{"kind": "dustin-bench"}', ["not a whole dustin-bench file (pair: is missing)", "dustin-run bench"]),
        ('{"kind": "dustin-study-lists"}', ["dustin-study-lists file (inputs: is missing)", "tools/study_lists.py"]),
        ('{"kind": "dustin-results", "version": 99}', ["of a newer dustin: upgrade"]),
        ('{"kind": ["dustin-bench"]}', ["not a result"]),
    ],
)
def test_files_that_are_no_results(content: str | None, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    if content is not None:
        path.write_text(content)
    refused(report(path, output=tmp_path / "page.html"), MISSING, str(path), *words)


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        (ARR, lambda d: d["policies"]["hybrid"]["arr"].pop("mean"), ["policies.hybrid.arr.mean: is missing"]),
        (ARR, lambda d: d["m"].update(chosen=10**6), ["m: chosen is 1000000, and the curve has 109 values"]),
        (ARR, lambda d: d["policies"]["oracle"]["arr"].update(mean=float("nan")), ["policies.oracle.arr.mean"]),
        (ARR, lambda d: d["selection"].update(m=9999), ["selection: m: 9999 is out of range"]),
        (FIDELITY, lambda d: d.update(documents=[]), ["documents: List should have at least 1 item"]),
        (BENCH, lambda d: d["rows"][3].update(tokens_per_s="fast"), ["rows.3.tokens_per_s"]),
    ],
)
def test_results_that_lack_something(
    name: str,
    edit: Callable[[dict[str, Any]], object],
    words: list[str],
    changed: Callable[..., Path],
    tmp_path: Path,
) -> None:
    path = changed(name, edit)
    refused(report(path, output=tmp_path / "page.html"), MISSING, f"{path}: not a whole", *words)


def test_folders_that_hold_nothing_or_half(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "notes.json").write_text('{"text": "not ours, and left alone"}')
    refused(report(empty, output=tmp_path / "page.html"), MISSING, f"{empty}: holds no results")
    half = tmp_path / "half"
    half.mkdir()
    shutil.copy(RESULTS / ARR, half / "results.json")
    words = ("results.json: stands without config.yaml", "run the same dustin-profile search again")
    refused(report(half, output=tmp_path / "page.html"), MISSING, *words)
    (half / "config.yaml").write_text("schema_version: 1\npair: {}\n")
    refused(report(half, output=tmp_path / "page.html"), CONFIG, "config.yaml")
    shutil.copy(RESULTS / "arr-smollm2.yaml", half / "config.yaml")
    (half / "fidelity").mkdir()
    (half / "fidelity" / "results.json").write_text('{"kind": "dustin-fid')
    refused(report(half, output=tmp_path / "page.html"), MISSING, "fidelity/results.json: not JSON")


def test_results_of_two_configs_are_not_mixed(tmp_path: Path, undrawn: None) -> None:
    run = tmp_path / "run"
    (run / "fidelity").mkdir(parents=True)
    shutil.copy(RESULTS / ARR, run / "results.json")
    shutil.copy(RESULTS / "arr-smollm2.yaml", run / "config.yaml")
    found = read_json(RESULTS / FIDELITY)
    (run / "fidelity" / "results.json").write_text(json.dumps(found))
    assert report(run, output=tmp_path / "page.html").code == 0
    (tmp_path / "page.html").unlink()
    found["inputs"]["selection"]["m"] = 50
    (run / "fidelity" / "results.json").write_text(json.dumps(found))
    words = ("fidelity/results.json: made with selection.m = 50", "config.yaml has 85", "give it as a RUN of its own")
    refused(report(run, output=tmp_path / "page.html"), CONFLICT, *words)
    # Given by itself it is another run, to be compared.
    assert report(RESULTS / ARR, run / "fidelity" / "results.json", output=tmp_path / "page.html").code == 0
    (tmp_path / "page.html").unlink()
    (run / "fidelity" / "results.json").unlink()
    shutil.copy(RESULTS / "arr-qwen-coder1.5b_0.5b.json", run / "results.json")
    words = ("results.json: made with selection.budget = 256", "config.yaml has 128")
    refused(report(run, output=tmp_path / "page.html"), CONFLICT, *words)
    found = read_json(RESULTS / ARR)
    found["pair"]["draft"]["id"] = "another"
    (run / "results.json").write_text(json.dumps(found))
    refused(report(run, output=tmp_path / "page.html"), CONFLICT, "results.json: made with pair.draft = another")


@pytest.mark.usefixtures("undrawn")
def test_files_that_no_report_wrote_are_not_replaced(tmp_path: Path) -> None:
    page, notes = tmp_path / "page.html", tmp_path / "page.md"
    notes.write_text("mine")
    refused(
        dustin_profile("report", RESULTS / ARR, "-o", page, "--no-figures"), USAGE, "page.md exists and is no report"
    )
    assert notes.read_text() == "mine"
    notes.unlink()
    page.write_text("<html>mine</html>")
    refused(
        dustin_profile("report", RESULTS / ARR, "-o", page, "--no-figures"), USAGE, "page.html exists and is no report"
    )
    page.unlink()
    for _ in range(2):  # its own it does replace
        assert dustin_profile("report", RESULTS / ARR, "-o", page, "--no-figures").code == 0


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(dustin_profile("report", RESULTS / ARR, "-o", "/proc/nowhere/page.html"), MISSING, "--output", "/proc")
    (tmp_path / "page.html").mkdir()
    outcome = dustin_profile("report", RESULTS / ARR, "-o", tmp_path / "page.html")
    refused(outcome, USAGE, "page.html: is a folder; name a file")
    assert dustin_profile("report").code == USAGE


def test_a_report_that_fails_leaves_the_former_one(
    tmp_path: Path, undrawn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    assert report(RESULTS / ARR, output=page).code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr("dustin_profile.reporting.page.html", lambda made: made.nothing)
    with pytest.raises(AttributeError):
        report(RESULTS / ARR, RESULTS / FIDELITY, output=page)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_names_that_are_markup_stay_text(changed: Callable[..., Path], tmp_path: Path) -> None:
    def rename(document: dict[str, Any]) -> None:
        document["pair"]["target"]["id"] = document["provenance"]["device"] = HOSTILE
        document["traces"]["models"]["target"]["id"] = HOSTILE
        document["policies"][HOSTILE] = document["policies"]["streaming"]
        document["hybrid_minus"][HOSTILE] = document["hybrid_minus"]["streaming"]
        document["provenance"]["arguments"] = {HOSTILE: HOSTILE}

    def rename_method(document: dict[str, Any]) -> None:
        for row in document["rows"]:
            row["method"] = HOSTILE if row["method"] == "magicdec" else row["method"]
        document["synthetic"] = [HOSTILE]

    output = tmp_path / "page.html"
    outcome = dustin_profile(
        "report", changed(ARR, rename), changed(BENCH, rename_method), "-o", output, "--title", HOSTILE, "-q"
    )
    assert outcome.code == 0, outcome.err
    source = output.read_text()
    page = Page(source)
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert not [name for _, found in page.tags for name in found if name.startswith("on")]
    assert page.text.count(HOSTILE) > 5
    assert any(row[0] == HOSTILE for row in page.table("Attention recovered by policy").rows)
    for line in output.with_suffix(".md").read_text().splitlines():
        assert "<script" not in line.replace("\\<", "")
    for picture in (tmp_path / "page-figures").glob("*.svg"):
        assert "<script" not in picture.read_text()
