"""Reports of run directories, of several runs beside each other, and of answers to tasks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import SEARCH, dustin_profile
from html_page import Page
from result_files import RESULTS, evaluation, overhead, recovery, stability
from tiny_pair import TinyPair

from dustin_profile.reporting.report import compose
from dustin_profile.reporting.sections import SECTIONS
from dustin_profile.reporting.sources import Evidence, gather
from dustin_runtime.files import read_json

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def run(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory that a search, an evaluation and a drift have filled."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    common = (*tiny_pair.options, "--quiet")
    small = ("--method", "vanilla", "--method", "dustin", "--run-dir", folder)
    needle = ("--length", 300, "--depth-at", 0, "--depth-at", 1, "--needle-count", 2)
    fidelity = ("--context", 140, "--documents", 2, "--tokens", 8, "--method", "dustin", "--method", "streaming")
    for command in (
        ("search", *common, "--run-dir", folder, *SEARCH),
        ("eval", "needle", folder, *common, *needle, *small),
        ("eval", "fidelity", folder, *common, *fidelity),
    ):
        outcome = dustin_profile(*command)
        assert outcome.code == 0, outcome.err
    drift = dustin_profile("drift", folder, *common, "--context", 64, "--documents", 1, "--tokens", 8, "--json")
    assert drift.code == 0, drift.err
    (folder / "drift.json").write_text(drift.out)
    return folder


def report(*arguments: object) -> tuple[dict[str, Any], Page, str]:
    outcome = dustin_profile("report", *arguments, "--json", "--quiet")
    assert (outcome.code, outcome.err) == (0, "")
    document: dict[str, Any] = json.loads(outcome.out)
    text = Path(document["page"]).read_text()
    return document, Page(text), text


def test_a_run_directory_explains_its_config(run: Path, tmp_path: Path) -> None:
    document, page, text = report(run, "-o", tmp_path / "page.html")
    expected = ["summary", "config", "arr", "budget", "fidelity", "proxy", "drift", "eval", "needle", "heads"]
    assert [key for key in expected if key not in {"budget"}] == [s for s in document["sections"] if s in expected]
    assert list(document["omitted"]) == [
        "budget",
        "recovery",
        "generation",
        "speed",
        "attention",
        "overhead",
        "stability",
    ]
    results = read_json(run / "results.json")
    chosen = results["selection"]
    history = chosen["budget"] - chosen["m"] - chosen["sink"] - chosen["window"]
    assert (
        f"{history} of them: what the target attended to last, in its layer {chosen['history']['layer']}" in page.text
    )
    assert "dustin-run generate --config tiny/config.yaml" in page.text
    assert f"tokenizer: {results['pair']['tokenizer']}" in page.text
    assert "No speed was measured:" in page.text
    heads = read_json(run / "srh" / "heads-target.json")
    row = page.table("Retrieval heads").row("tiny-target target, tiny")
    assert row[1] == f"{heads['accepted']} of {heads['samples']}"
    names = {Path(path).stem for path in document["written"]}
    assert {"heads-target-1", "heads-draft-2", "needle-1", "needle-2", "config-m", "arr", "drift"} <= names
    drift = read_json(run / "drift.json")["methods"]["dustin"]["mean_kl"]
    assert page.table("What each budget keeps").row("k = 64")[-1] == f"{drift:.3f}"
    assert str(tmp_path.parent) not in text
    assert str(run.parent) not in text


def test_it_goes_beside_what_it_reports_on(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shown = dustin_profile("report", copy)
    assert shown.code == 0, shown.err
    assert shown.out.splitlines()[0] == f"{copy / 'report.html'}: 11 sections from 7 files"
    assert "not shown: Decoding speed; made by dustin-run bench" in shown.out
    monkeypatch.chdir(tmp_path)
    shown = dustin_profile("report", RESULTS / "arr-smollm2.json", "-q")
    assert (tmp_path / "report.html").is_file(), shown.err
    assert [path.name for path in tmp_path.rglob("*.tmp")] == []
    # A report in a run directory is none of the next one's inputs.
    assert dustin_profile("report", copy, "-q").out.startswith(f"{copy / 'report.html'}: 11 sections from 7 files")


def test_runs_are_told_apart_and_read_once(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    evidence = gather([run, other, run / "results.json", run])
    assert len(evidence.sources) == 14
    page_text = {section.key: content for section, content in compose(evidence).sections}
    captions = [block.text for block in page_text["arr"].blocks if hasattr(block, "text")]
    assert len(set(captions)) == 2
    assert all(name in " ".join(captions) for name in ("tiny/results.json", "other/results.json"))


def test_every_section_can_do_without_data() -> None:
    assert [section.build(Evidence(())) for section in SECTIONS] == [None] * len(SECTIONS)
    assert len({section.key for section in SECTIONS}) == len(SECTIONS)


def test_searches_at_several_budgets_become_a_curve() -> None:
    evidence = gather([RESULTS / "arr-qwen-coder1.5b_0.5b.json", RESULTS / "arr-qwen-coder1.5b_0.5b-k512.json"])
    found = {section.key: content for section, content in compose(evidence).sections}["budget"].figures
    assert len(found) == 1
    curves = found[0].draw.keywords["curves"]  # type: ignore[attr-defined]
    own = next((x, y) for style, x, y in curves if style.own)
    means = [
        read_json(RESULTS / f"arr-qwen-coder1.5b_0.5b{k}.json")["policies"]["hybrid"]["arr"]["mean"]
        for k in ("", "-k512")
    ]
    assert own == ([256, 512], means)
    alone = gather([RESULTS / "arr-smollm2.json"])
    assert "budget" not in [section.key for section, _ in compose(alone).sections]


def test_needles_are_a_grid_and_answers_a_table(tmp_path: Path) -> None:
    groups = [{"length": length, "depth": depth} for length in ("8192", "1024") for depth in ("0.5", "0.0")]
    found = evaluation("needle", groups, {"vanilla": [1.0, 1.0, 1.0, 1.0], "streaming": [0.25, 0.5, 0.75, 1.0]})
    (tmp_path / "needle.json").write_text(json.dumps(found))
    evidence = gather([tmp_path / "needle.json"])
    sections = {section.key: content for section, content in compose(evidence).sections}
    grid = sections["needle"].figures[1].draw.keywords  # type: ignore[attr-defined]
    assert grid["table"] == [[1.0, 0.5], [0.75, 0.25]]
    assert (grid["x_names"], grid["y_names"]) == (["1,024", "8,192"], ["0.0", "0.5"])
    _, page, _ = report(tmp_path / "needle.json", "-o", tmp_path / "page.html")
    assert "summary" not in sections  # nothing of the project's own was measured
    row = page.table("Scores by group of items and method").row("StreamingLLM k = 128")
    assert row[1:5] == ["0.625 [0.500, 0.750]", "−0.375 [−0.500, −0.250]", "10", "3"]


def test_longbench_has_its_averages(tmp_path: Path, changed: Callable[..., Path]) -> None:
    groups = [{"task": "qasper"}, {"task": "gov_report"}]
    found = evaluation("longbench", groups, {"vanilla": [0.5, 0.25], "dustin": [0.5, 0.125]})
    average = {"method": "dustin", "budget": 128, "tasks": 2, "plain": 0.3125, "weighted": 0.3}
    found["averages"] = [average | {"categories": {"Single-Doc QA": 0.5, "Summarization": 0.125}}]
    (tmp_path / "longbench.json").write_text(json.dumps(found))
    document, page, _ = report(tmp_path / "longbench.json", "-o", tmp_path / "page.html")
    assert document["sections"][0] == "summary"
    assert "facts found; −0.062 [−0.188, +0.062] against full verification, paired." in page.text
    assert "needle" in document["omitted"]
    assert not {"summary", "limits", "provenance"} & set(document["omitted"])
    table = page.table("Averages over tasks")
    assert table.rows[0][-2:] == ["Single-Doc QA", "Summarization"]
    assert table.row("Dustin (hybrid)") == ["Dustin (hybrid)", "128", "2", "0.312", "0.300", "0.500", "0.125"]
    scores = page.table("Scores by group of items and method")
    assert [row[0] for row in scores.rows if len(row) == 1] == ["all items", "task qasper", "task gov_report"]


def test_attention_is_taken_apart(tmp_path: Path) -> None:
    for made in (recovery(), stability(), overhead()):
        (tmp_path / f"{made['kind']}.json").write_text(json.dumps(made))
    evidence = gather(sorted(tmp_path.glob("*.json")))
    sections = {section.key: content for section, content in compose(evidence).sections}
    assert {"summary", "budget", "recovery", "overhead", "stability"} <= sections.keys()
    ages = sections["recovery"].figures[0].draw.keywords["curves"]  # type: ignore[attr-defined]
    assert [(style.label, x, y) for style, x, y in ages] == [
        ("history of all heads", [1, 4], [1 / 64, 4 / 64]),
        ("Dustin-T", [1, 4], [1 / 64, 4 / 64]),
    ]
    assert sections["overhead"].figures[0].synthetic == ["synthetic caches"]
    _, page, _ = report(*sorted(tmp_path.glob("*.json")), "-o", tmp_path / "page.html")
    summary = page.table("What each budget keeps")
    assert summary.rows[0] == ["budget", "of context", "ARR", "of the oracle's"]
    assert summary.row("k = 128") == ["k = 128", "12.5\xa0%", "0.625 [0.500, 0.750]", "83\xa0%"]
    split = page.table("The split of the budget by kind of document").row("all documents 10 documents")
    assert split[2:5] == ["+0.250 [+0.125, +0.375]", "+0.062 [−0.062, +0.188]", "88"]
    costs = page.table("Cost of choosing: target with draft")
    assert costs.row("Dustin (hybrid)", 1) == ["Dustin (hybrid)", "2.00", "12.5\xa0%", "6.2\xa0%", "synthetic"]
    agreed = page.table("Agreement of head rankings")
    assert agreed.row("length 512 and 1024") == ["length 512 and 1024", "0.75 [0.62, 0.88]", "0.50 [0.38, 0.62]"]
    assert "Attention alone" in page.text  # it is named as not measured


def test_folders_of_runs_are_searched(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "all" / "pairs" / "tiny")
    shutil.copy(RESULTS / "bench-qwen7b-1xh200.json", tmp_path / "all" / "bench.json")
    evidence = gather([tmp_path / "all"])
    names = [source.name for source in evidence.sources]
    assert names[0] == "all/bench.json"
    assert {"all/pairs/tiny/config.yaml", "all/pairs/tiny/srh/heads-draft.json"} <= set(names)
    assert {source.is_run for source in evidence.sources if source.run == "all/pairs/tiny"} == {True}
    needle = gather([run / "needle"])
    assert [source.name for source in needle.sources] == ["needle/results.json"]
