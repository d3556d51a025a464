"""Reports of run directories, of several runs beside each other, and of answers to tasks."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import SEARCH, dustin_profile
from html_page import Page
from result_files import DRAFT, QWEN, RESULTS, evaluation, overhead, recovery, searched_again, stability
from tiny_pair import TinyPair

from dustin_profile.evaluation.arr.layers import LAYER_POLICIES
from dustin_profile.evaluation.arr.policies import rules
from dustin_profile.evaluation.oracle import ORACLES
from dustin_profile.method_styles import style
from dustin_profile.reporting.blocks import Row, Table
from dustin_profile.reporting.report import compose
from dustin_profile.reporting.sections import SECTIONS
from dustin_profile.reporting.sources import Evidence, gather
from dustin_runtime.files import read_json
from dustin_runtime.method_names import METHODS

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def run(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory that a search and evaluations have filled."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    common = (*tiny_pair.options, "--quiet")
    small = ("--method", "vanilla", "--method", "dustin", "--run-dir", folder)
    needle = ("--length", 300, "--depth-at", 0, "--depth-at", 1, "--needle-count", 2)
    fidelity = ("--context", 140, "--documents", 2, "--tokens", 8, "--method", "dustin", "--method", "streaming")
    drift = ("--context", 64, "--documents", 2, "--tokens", 8, "--bucket", 4, "--method", "sd", "--method", "dustin")
    drift += ("--budget", 64, "--budget", 48, "--budget", 32)
    for command in (
        ("search", *common, "--run-dir", folder, *SEARCH),
        ("eval", "needle", folder, *common, *needle, *small),
        ("eval", "fidelity", folder, *common, *fidelity),
        ("drift", folder, *common, *drift),
    ):
        outcome = dustin_profile(*command)
        assert outcome.code == 0, outcome.err
    return folder


@pytest.fixture
def twice(tmp_path: Path) -> Path:
    """A search of the committed Qwen pair on the same traces at k = 512, twice the budget."""
    path = tmp_path / "arr-qwen-coder1.5b_0.5b-k512.json"
    path.write_text(json.dumps(searched_again(read_json(RESULTS / "arr-qwen-coder1.5b_0.5b.json"), 2)))
    return path


def report(*arguments: object) -> tuple[dict[str, Any], Page, str]:
    outcome = dustin_profile("report", *arguments, "--json", "--quiet")
    assert (outcome.code, outcome.err) == (0, "")
    document: dict[str, Any] = json.loads(outcome.out)
    text = Path(document["page"]).read_text()
    return document, Page(text), text


def test_a_run_directory_explains_its_config(run: Path, tmp_path: Path) -> None:
    document, page, text = report(run, "-o", tmp_path / "page.html")
    expected = [
        "summary",
        "methods",
        "config",
        "arr",
        "budget",
        "fidelity",
        "proxy",
        "drift",
        "eval",
        "needle",
        "heads",
    ]
    assert [key for key in expected if key not in {"budget"}] == [s for s in document["sections"] if s in expected]
    assert list(document["omitted"]) == [
        "budget",
        "recovery",
        "studies",
        "books",
        "generation",
        "speed",
        "attention",
        "overhead",
        "stability",
        "profiling",
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
    assert {"heads-target-1", "heads-draft-2", "needle-1", "config-m", "arr", "drift"} <= names
    drift = read_json(run / "drift" / "results.json")["summary"]
    kept = page.table("What each budget keeps")
    place = kept.rows[0].index("drift, nats")
    for k in (64, 48, 32):
        assert kept.row(f"k = {k}")[place] == f"{drift[f'dustin-k{k}']['kl']['mean']:.3f}"
    assert "Drift: of texts generated behind prompts of 64 tokens." in page.text
    given = read_json(run / "fidelity" / "results.json")["documents"]
    longest = max(one["prompt_tokens"] + one["text_tokens"] for one in given)
    assert f"against full verification, on given texts of {longest:,} tokens." in page.text
    assert str(tmp_path.parent) not in text
    assert str(run.parent) not in text


def test_drift_stands_by_budget_with_what_its_texts_are_worth(run: Path, tmp_path: Path) -> None:
    _, page, _ = report(run, "-o", tmp_path / "page.html")
    summary = read_json(run / "drift" / "results.json")["summary"]
    table = page.table("Drift")
    assert [row[0] for row in table.rows if len(row) == 1] == ["full verification", "k = 64", "k = 48", "k = 32"]
    for label, nth, name in (("classic SD", 0, "sd"), ("Dustin (hybrid)", 1, "dustin-k48")):
        cell, row = summary[name], table.row(label, nth)
        assert row[5:] == [f"{cell['tau']:.2f}", f"{cell['read']:.0f}", f"{cell['repeated']:.2f}"]
        assert row[2].endswith(" to 4") and row[3].endswith(" to 8")
    assert "2 prompts of 64 tokens, 8 generated behind each, 1 at a time, greedy; cpu" in page.text
    assert "as generation goes on: tiny-target with tiny-draft, k = 64." in page.text


def test_it_goes_beside_what_it_reports_on(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shown = dustin_profile("report", copy)
    assert shown.code == 0, shown.err
    assert shown.out.splitlines()[0] == f"{copy / 'report.html'}: 12 sections from 7 files"
    assert "not shown: Decoding speed; made by dustin-run bench" in shown.out
    monkeypatch.chdir(tmp_path)
    shown = dustin_profile("report", RESULTS / "arr-smollm2.json", "-q")
    assert (tmp_path / "report.html").is_file(), shown.err
    assert [path.name for path in tmp_path.rglob("*.tmp")] == []
    # A report in a run directory is none of the next one's inputs.
    assert dustin_profile("report", copy, "-q").out.startswith(f"{copy / 'report.html'}: 12 sections from 7 files")


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


def test_every_method_has_a_look_of_its_own() -> None:
    names = [*METHODS, *ORACLES, *LAYER_POLICIES, *(rule.name for rule in rules())]
    looks = {name: style(name) for name in names}
    assert [name for name, look in looks.items() if look.label == name and name != "vanilla"] == []
    drawn = {(look.colour, look.marker, look.dash) for look in looks.values()}
    assert len(drawn) == len(looks)


def test_searches_at_several_budgets_become_a_curve(twice: Path) -> None:
    files = [RESULTS / "arr-qwen-coder1.5b_0.5b.json", twice]
    evidence = gather(files)
    found = {section.key: content for section, content in compose(evidence).sections}["budget"].figures
    assert len(found) == 1
    curves = found[0].draw.keywords["curves"]  # type: ignore[attr-defined]
    own = next((x, y) for style, x, y in curves if style.own)
    means = [read_json(path)["policies"]["hybrid"]["arr"]["mean"] for path in files]
    assert own == ([256, 512], means) and means[0] < means[1]
    alone = gather([RESULTS / "arr-smollm2.json"])
    assert "budget" not in [section.key for section, _ in compose(alone).sections]


def test_needles_are_a_grid_and_answers_a_table(tmp_path: Path) -> None:
    groups = [{"length": length, "depth": depth} for length in ("8192", "1024") for depth in ("0.5", "0.0")]
    shares = {name: [1.0, 1.0, 1.0, 1.0] for name in ("vanilla", "snapkv")} | {"streaming": [0.25, 0.5, 0.75, 1.0]}
    found = evaluation("needle", groups, shares)
    (tmp_path / "needle.json").write_text(json.dumps(found))
    evidence = gather([tmp_path / "needle.json"])
    sections = {section.key: content for section, content in compose(evidence).sections}
    same, other = sections["needle"].figures
    assert same.caption.startswith("vanilla; SnapKV, k = 128: ") and other.caption.startswith("StreamingLLM, k = 128: ")
    grid = other.draw.keywords  # type: ignore[attr-defined]
    assert grid["table"] == [[1.0, 0.5], [0.75, 0.25]]
    assert (grid["x_names"], grid["y_names"]) == (["1,024", "8,192"], ["0.0", "0.5"])
    _, page, _ = report(tmp_path / "needle.json", "-o", tmp_path / "page.html")
    assert "summary" not in sections  # nothing of the project's own was measured
    table = page.table("Scores by group of items and method")
    row = table.row("StreamingLLM k = 128")
    assert row[1:] == ["0.625 [0.500, 0.750]", "−0.375 [−0.500, −0.250]", "10", "3", "900", "2.50"]
    assert table.rows[0] == ["method", "facts found", "minus vanilla", "items", "same text", "tokens read", "τ"]
    assert "Measured on cpu, float32." in page.text and "tokens/s is what one reader sees" not in page.text


def test_longbench_has_its_averages(tmp_path: Path, changed: Callable[..., Path]) -> None:
    groups = [{"task": "qasper"}, {"task": "gov_report"}]
    found = evaluation("longbench", groups, {"vanilla": [0.5, 0.25], "dustin": [0.5, 0.125]})
    average = {"method": "dustin", "budget": 128, "tasks": 2, "plain": 0.3125, "weighted": 0.3}
    found["averages"] = [average | {"categories": {"Single-Doc QA": 0.5, "Summarization": 0.125}}]
    (tmp_path / "longbench.json").write_text(json.dumps(found))
    document, page, _ = report(tmp_path / "longbench.json", "-o", tmp_path / "page.html")
    assert document["sections"][0] == "summary"
    assert "average of 2 tasks; −0.062 [−0.188, +0.062] against full verification, paired." in page.text
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
    drafted, aged, by_layer = sections["recovery"].figures
    assert (drafted.name, by_layer.name) == ("recovery-lookahead", "recovery-layers")
    assert "At k = 128 it misses 0.188 [0.062, 0.312]." in drafted.caption
    gap = drafted.draw.keywords["gap"]  # type: ignore[attr-defined]
    assert gap == ([64, 128], [0.5, 0.5625], [0.6875, 0.75])
    ages = aged.draw.keywords["curves"]  # type: ignore[attr-defined]
    assert [(style.label, x, y) for style, x, y in ages] == [
        ("history of all heads", [1, 4], [1 / 64, 4 / 64]),
        ("Dustin-T", [1, 4], [1 / 64, 4 / 64]),
    ]
    assert sections["overhead"].figures[0].synthetic == ["synthetic caches"]
    _, page, _ = report(*sorted(tmp_path.glob("*.json")), "-o", tmp_path / "page.html")
    summary = page.table("What each budget keeps")
    assert summary.rows[0] == ["budget", "of context", "ARR", "of the oracle's"]
    assert summary.row("k = 128") == ["k = 128", "12.5\xa0% of 1,024", "0.625 [0.500, 0.750]", "83\xa0%"]
    split = page.table("The split of the budget by kind of document").row("all documents 10 documents")
    assert split[2:5] == ["+0.250 [+0.125, +0.375]", "+0.062 [−0.062, +0.188]", "88"]
    costs = page.table("Cost of choosing: target with draft")
    assert costs.row("Dustin (hybrid)", 1) == ["Dustin (hybrid)", "2.00", "12.5\xa0%", "6.2\xa0%", "synthetic"]
    agreed = page.table("Agreement of head rankings")
    assert agreed.row("length 512 and 1024") == ["length 512 and 1024", "0.75 [0.62, 0.88]", "0.50 [0.38, 0.62]"]
    assert "Attention alone" in page.text  # it is named as not measured


def test_an_analysis_of_traces_alone_has_no_layers(tmp_path: Path) -> None:
    found = recovery() | {"layers": None, "distances": None}
    del found["forced_pass"]
    (tmp_path / "results.json").write_text(json.dumps(found))
    sections = {section.key: content for section, content in compose(gather([tmp_path / "results.json"])).sections}
    assert [figure.name for figure in sections["recovery"].figures] == ["recovery-lookahead"]
    found["budgets"] = [row for row in found["budgets"] if row["budget"] == 128]
    (tmp_path / "results.json").write_text(json.dumps(found))
    _, page, _ = report(tmp_path / "results.json", "-o", tmp_path / "page.html")
    assert page.table("The split of the budget by kind of document").row("all documents 10 documents")[4] == "88"


def test_sampled_subsets_say_what_arr_is_worth(tmp_path: Path) -> None:
    path = RESULTS / "eval-smollm2" / "subsets" / "results.json"
    data = read_json(path)
    sections = {section.key: content for section, content in compose(gather([path])).sections}
    groups = sections["proxy"].figures[0].draw.keywords["groups"]  # type: ignore[attr-defined]
    assert [style.label for style, *_ in groups] == ["k = 128", "k = 256", "k = 512"]
    points = {(x, y) for _, xs, ys in groups for x, y in zip(xs, ys, strict=True)}
    assert points == {(one["arr"], one["kl"]) for document in data["documents"] for one in document["subsets"]}
    _, page, _ = report(path, "-o", tmp_path / "page.html")
    table = page.table(f"ARR with KL over sampled subsets: smollm2 with {DRAFT}")
    row, within = table.row("k = 256"), data["summary"]["256"]["spearman"]
    assert row[5] == f"{within['mean']:+.3f} [{within['low']:+.3f}, {within['high']:+.3f}]".replace("-", "−")
    assert table.row("all, documents together")[4:] == ["−0.877", "−0.903", "−0.836"]
    assert "Over 144 sampled subsets, which no policy chose, the two correlate within a document" in page.text
    assert "predicts better as a rule." in page.text and "Over all documents together" not in page.text
    data["summary"]["all"]["pooled"] |= {"pearson": -0.5, "spearman": -0.6}  # weaker than within any
    (tmp_path / "parted.json").write_text(json.dumps(data))
    _, page, _ = report(tmp_path / "parted.json", "-o", tmp_path / "parted.html")
    assert "predicts better as a rule. Over all documents together these are −0.50 and −0.60" in page.text


def test_subsets_that_do_not_vary_have_no_correlation(tmp_path: Path) -> None:
    data = read_json(RESULTS / "eval-smollm2" / "subsets" / "results.json")
    for found in data["summary"].values():
        names = ("pearson", "spearman", "pearson_log")
        found |= dict.fromkeys(names) | {"pooled": dict.fromkeys(names)}
    (tmp_path / "subsets.json").write_text(json.dumps(data))
    _, page, _ = report(tmp_path / "subsets.json", "-o", tmp_path / "page.html")
    assert "Over the sampled subsets one of the two does not vary." in page.text
    assert page.table(f"ARR with KL over sampled subsets: smollm2 with {DRAFT}").row("k = 256")[4:] == ["", "", ""]


def test_continued_books_are_judged_by_perplexity(tmp_path: Path) -> None:
    path = RESULTS / "eval-smollm2" / "pg19" / "results.json"
    document, page, _ = report(path, "-o", tmp_path / "page.html")
    assert "books" in document["sections"] and "eval" in document["omitted"]
    table = page.table("Perplexity, speed and repetition")
    own = table.row("Dustin (hybrid) k = 256")
    assert own[1:4] == ["29.58", "−1.9 % [−11.2, +8.3]", "0.043 [0.018, 0.067]"]
    assert own[5:] == ["3.48 [2.59, 4.37]", "7.70 [3.68, 11.72]", "1.01 [0.49, 2.08]", "0.47"]
    assert table.row("classic SD")[1:4] == ["30.16", "", "0"]
    assert "29.6of the books' own text; 30.2 in full: −1.9 % [−11.2, +8.3]." in page.text
    assert "3 prompts, so intervals are wide." in page.text
    found = compose(gather([path])).drawn
    marks = found["books"].figure.draw.keywords["marks"]  # type: ignore[attr-defined]
    assert [mark.label for mark in marks] == ["Dustin (hybrid), k = 256", "StreamingLLM, k = 256"]


def test_a_real_speed_of_a_pair_with_quality_leads(tmp_path: Path, twice: Path) -> None:
    first, last = (
        ("arr-smollm2", "bench-qwen7b-1xh200"),
        ("arr-qwen-coder1.5b_0.5b", "bench-qwen-coder1.5b_0.5b-1xh200"),
    )
    files = [RESULTS / f"{name}.json" for name in first]
    files += [twice, *(RESULTS / f"{name}.json" for name in last)]
    pair = "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M with Qwen2.5-Coder-0.5B-Instruct.Q4_K_M"
    made = compose(gather(files))
    sections = {section.key: content for section, content in made.sections}
    kept, saved = sections["summary"].figures
    assert kept.caption == f"Attention kept at k = 256, with 95 % intervals: {pair}."  # what the speed was measured at
    assert (pair in saved.caption, saved.synthetic) == (True, [])
    _, page, _ = report(*files, "-o", tmp_path / "page.html")
    real, assumed = page.text.index(f"Speed, {pair} on NVIDIA H200:"), page.text.index("Speed, qwen7b:0.5b")
    assert real < assumed
    said = page.text[real:assumed]
    assert "a token takes 47\xa0% of vanilla's time (1.56× classic SD and 1.38× MagicDec)" in said
    assert "Nothing is synthetic; τ, here 4.56" in said
    assert "gains 1.42× to 2.15×; with classic SD's τ it would be 1.26× to 2.01×" in said
    assert "Quality was measured at up to 8,192 tokens." in said and "other pairs" not in said
    assert "This is synthetic: random weights" in page.text[assumed:]
    assert "Quality of qwen7b:0.5b" in page.text and "Different pairs" not in page.text
    alone = compose(gather([files[0], files[1]])).sections
    limits = next(content for section, content in alone if section.key == "limits")
    assert any("Different pairs:" in getattr(block, "leads", ()) for block in limits.blocks)


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2 / own draft", f"smollm2 / {DRAFT}"])
def test_a_bench_is_of_the_pair_whose_quality_is_shown_however_it_is_named(name: str, tmp_path: Path) -> None:
    bench = read_json(RESULTS / "bench-qwen-coder1.5b_0.5b-1xh200.json") | {"pair": name}
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    _, page, _ = report(RESULTS / "arr-smollm2.json", tmp_path / "bench.json", "-o", tmp_path / "page.html")
    same = name != "SmolLM2 / own draft"
    assert ("Different pairs" in page.text, "on other pairs" in page.text) == (not same, not same)
    assert (f"Speed, smollm2 with {DRAFT} on NVIDIA H200" in page.text) == same


def test_a_bench_over_ranks_says_how_many_devices_it_had(tmp_path: Path) -> None:
    bench = read_json(RESULTS / "bench-qwen7b-1xh200.json") | {"ranks": 2}
    for row in bench["rows"]:
        row["components_ms"]["all_reduce"] = 1.5
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    _, page, _ = report(tmp_path / "bench.json", "-o", tmp_path / "page.html")
    assert " on 2 × NVIDIA H200, bfloat16" in page.text
    assert "Speed, qwen7b:0.5b on 2 × NVIDIA H200" in page.text


def test_acceptance_of_real_runs_is_shown_by_position(tmp_path: Path) -> None:
    path = RESULTS / "bench-qwen-coder1.5b_0.5b-1xh200.json"
    shown = {figure.name: figure for _, content in compose(gather([path])).sections for figure in content.figures}
    assert {"acceptance-8x4096", "acceptance-8x16384"} <= shown.keys()
    curves = shown["acceptance-8x16384"].draw.keywords["curves"]  # type: ignore[attr-defined]
    rows = [row for row in read_json(path)["rows"] if row["context"] == 16384 and row["acceptance_per_position"]]
    assert [y for _, _, y in curves] == [row["acceptance_per_position"] for row in rows]
    assert [style.label for style, *_ in curves][-1] == "Dustin (hybrid), 512"
    _, page, _ = report(path, "-o", tmp_path / "page.html")
    table = page.table("Decoding speed by method")
    assert table.row("Dustin (hybrid) draft reads 512", 2)[-1] == "0.92 0.89 0.88 0.87"
    forced = compose(gather([RESULTS / "bench-qwen7b-1xh200.json"])).sections
    assert not [figure for _, content in forced for figure in content.figures if "acceptance" in figure.name]


def test_budgets_say_what_each_figure_was_measured_on_and_captions_differ(tmp_path: Path) -> None:
    names = ("arr-smollm2.json", "fidelity-smollm2.json", "eval-smollm2/arr/results.json")
    files = [RESULTS / name for name in (*names, "eval-smollm2/kinds/results.json")]
    sections = {section.key: content for section, content in compose(gather(files)).sections}
    captions = [figure.caption for figure in sections["budget"].figures]
    assert len(captions) == 4 - 1 and len(set(captions)) == len(captions)
    table = next(block for block in sections["summary"].blocks if isinstance(block, Table))
    row = next(row for row in table.rows if isinstance(row, Row) and row.cells[0].text == "k = 128")
    cells = dict(zip(table.header, row.cells, strict=True))
    assert cells["of context"].sub == "of 1,024"
    texts = read_json(files[1])["documents"]
    longest = max(one["prompt_tokens"] + one["text_tokens"] for one in texts)
    assert f"Same choice and KL: against full verification, on given texts of {longest:,} tokens." in table.note
    assert "Drift" not in table.note  # nobody measured it
    shutil.copy(QWEN / "fidelity" / "results.json", tmp_path / "qwen.json")
    both = {section.key: content for section, content in compose(gather([*files, tmp_path / "qwen.json"])).sections}
    table = next(block for block in both["summary"].blocks if isinstance(block, Table))
    # Two pairs on texts of two lengths: each is named.
    pair = "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M with Qwen2.5-Coder-0.5B-Instruct.Q4_K_M"
    assert f"16,384 tokens ({pair}) and {longest:,} tokens (smollm2 with {DRAFT})." in table.note


def test_all_committed_results_are_one_report(tmp_path: Path) -> None:
    document, page, text = report(RESULTS, "--no-figures", "-o", tmp_path / "page.html")
    files = {source["file"] for source in document["sources"]}
    expected = {str(path.relative_to(RESULTS.parent)) for path in RESULTS.rglob("results.json")}
    assert len(expected) >= 15 and expected <= files
    assert document["omitted"] == {}
    assert set(document["sections"]) == {section.key for section in SECTIONS}
    # The fastest rows are of another draft than the answers.
    said = "answers were compared with vanilla's with a draft that reads all, with which it gains up to 1.65×."
    assert said in page.text
    # A config that holds more than the search's results, of a later version, is not described twice.
    assert page.headings.count(f"smollm2 with {DRAFT}, k = 128") >= 1
    assert not [heading for heading in page.headings if "arr-smollm2.json" in heading]
    assert len(text) < 1_000_000


def test_what_was_chosen_on_is_not_shown_as_held_out(tmp_path: Path) -> None:
    for split, shown in (("held-out", True), ("all", False)):
        (tmp_path / "arr.json").write_text(json.dumps(recovery() | {"split": split}))
        sections = {section.key for section, _ in compose(gather([tmp_path / "arr.json"])).sections}
        assert ("summary" in sections) == shown
        assert "budget" in sections  # which names the documents


def test_a_search_without_policies_draws_nothing_of_them(tmp_path: Path) -> None:
    search = read_json(RESULTS / "arr-smollm2.json") | {"policies": {}, "hybrid_minus": {}}
    (tmp_path / "arr.json").write_text(json.dumps(search))
    sections = {section.key for section, _ in compose(gather([tmp_path / "arr.json"])).sections}
    assert "arr" not in sections and "config" in sections


def test_a_slow_device_and_single_rows_read_right(tmp_path: Path) -> None:
    bench = read_json(RESULTS / "bench-qwen-coder1.5b_0.5b-1xh200.json")
    bench["roofline"] |= {"bytes_per_s": 1.2e10, "device": "cpu"}
    bench["rows"] = [row | {"batch": 1} for row in bench["rows"] if row["context"] == bench["rows"][0]["context"]]
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    _, page, _ = report(tmp_path / "bench.json", "-o", tmp_path / "page.html")
    assert "Floor at 12 GB/s (cpu)" in page.text
    assert "1 row of " in page.text and "1 rows" not in page.text


def test_a_vanilla_slower_than_its_parts_is_said(tmp_path: Path) -> None:
    bench = read_json(RESULTS / "bench-qwen-coder1.5b_0.5b-1xh200.json")
    row = next(row for row in bench["rows"] if row["method"] == "vanilla")
    row["step_ms"] += 0.5
    row["components_ms"]["rest"] += 0.5
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    _, page, _ = report(tmp_path / "bench.json", "-o", tmp_path / "page.html")
    assert re.search(rf"vanilla took {row['step_ms']:.2f} ms where its parts, timed alone, sum to 1\.\d\d;", page.text)


def test_every_committed_result_is_read() -> None:
    """As `dustin-profile report results` reads them.

    Those of a draft's training are shown by its recipe.
    """
    kinds = {source.data.kind for source in gather([RESULTS]).sources if hasattr(source.data, "kind")}
    paths = [path for path in RESULTS.rglob("*.json") if path.parent.name != "draft-smollm2"]
    assert kinds == {read_json(path)["kind"] for path in paths}


def test_steps_that_were_timed_stand_beside_what_was_predicted_of_them(tmp_path: Path) -> None:
    """Under the search that rests on them, and alone."""
    run = RESULTS / "throughput-qwen-coder1.5b_0.5b"
    timed = read_json(run / "latency.json")
    for given in (run, run / "latency.json"):
        _, page, _ = report(given, "-o", tmp_path / "page.html", "--no-figures")
        assert ("ARR against predicted speed" in page.text) == (given == run)
        (table,) = [table for table in page.tables if table.caption.startswith("Time of a step on NVIDIA H200")]
        assert [row[-1] for row in table.rows[1:]].count("no") == 4 and len(table.rows) == 1 + len(
            timed["measurements"]
        )
        last = timed["measurements"][-1]
        assert table.rows[-1][3:5] == [f"{last['ms']:.2f}", f"{last['predicted_ms']:.2f}"]


def test_steps_of_two_devices_and_of_another_search_are_all_shown(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(RESULTS / "throughput-qwen-coder1.5b_0.5b", run)
    timed = read_json(run / "latency.json")
    (run / "latency.json").write_text(json.dumps(timed | {"max_relative_error": 0.5}))
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "latency.json").write_text(json.dumps(timed | {"device": f"card {name}"}))
    _, page, _ = report(
        run, tmp_path / "a" / "latency.json", tmp_path / "b" / "latency.json", "-o", tmp_path / "page.html"
    )
    found = [table.caption.split(":")[0] for table in page.tables if table.caption.startswith("Time of a step")]
    assert [caption.split(", bfloat16")[0] for caption in found] == [
        f"Time of a step on {device}" for device in ("NVIDIA H200", "card a", "card b")
    ]
    assert not any("k = 1024" in caption for caption in found)  # the search was made with other steps
    timed["measurements"][3]["ms"] = 0
    (run / "latency.json").write_text(json.dumps(timed))
    outcome = dustin_profile("report", run, "-o", tmp_path / "page.html", "-q")
    assert outcome.code == 6 and "measurements.3.ms" in outcome.error


def test_a_method_that_is_no_longer_known_is_shown_by_its_name(tmp_path: Path) -> None:
    path = RESULTS / "study-lists" / "bench-7b-1xh200.json"
    gone = {row["method"] for row in read_json(path)["rows"]} - set(METHODS)
    assert gone
    _, page, _ = report(path, "-o", tmp_path / "page.html", "--no-figures")
    assert all(name in page.text for name in gone)


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
