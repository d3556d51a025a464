"""The report of the committed results: every number is the file's, nothing is loaded, what is synthetic says so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import dustin_profile
from html_page import Page
from result_files import QWEN, RESULTS, searched_again

from dustin_profile.reporting.page import html
from dustin_profile.reporting.report import compose
from dustin_profile.reporting.sources import gather
from dustin_runtime.files import read_json, write_json

DRIFT = QWEN / "drift" / "results.json"
FILES = [*sorted(RESULTS.glob("*.json")), DRIFT]
SEARCH = "arr-qwen-coder1.5b_0.5b"


class Built:
    """A report of committed files, and of a search of the same pair at twice the budget, which goes before them."""

    def __init__(self, folder: Path) -> None:
        output = folder / "out" / "page.html"
        again = folder / f"{SEARCH}-k512.json"
        write_json(again, searched_again(read_json(RESULTS / f"{SEARCH}.json"), 2))
        self.files = [again, *FILES]
        outcome = dustin_profile("report", *self.files, "--output", output, "--json", "--quiet")
        assert (outcome.code, outcome.err) == (0, "")
        self.document: dict[str, Any] = json.loads(outcome.out)
        self.folder = output.parent
        self.source = output.read_text()
        self.page = Page(self.source)
        self.markdown = output.with_suffix(".md").read_text()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("report"))


def minus(text: str) -> str:
    return text.replace("-", "−")


def shown(value: dict[str, Any], decimals: int = 3, sign: str = "") -> str:
    """A mean and its interval as the tables show them."""
    form = f"{sign}.{decimals}f"
    return minus(f"{value['mean']:{form}} [{value['low']:{form}}, {value['high']:{form}}]")


def test_it_says_what_it_wrote_and_left_out(built: Built) -> None:
    document = built.document
    written = {Path(path) for path in document["written"]}
    assert written == {path for path in built.folder.rglob("*") if path.is_file()}
    assert Path(document["page"]).name == "page.html"
    assert {path.suffix for path in written} == {".html", ".md", ".png", ".svg"}
    pictures = {path.stem for path in (built.folder / "page-figures").glob("*.svg")}
    assert pictures == {path.stem for path in (built.folder / "page-figures").glob("*.png")}
    for path in written:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
    assert len(document["sources"]) == len(built.files)
    assert document["sections"][0] == "summary"
    assert list(document["omitted"]) == ["recovery", "studies", "books", "eval", "needle", "overhead", "stability"]
    for command in document["omitted"].values():
        assert command in built.page.text
        assert command in built.markdown


@pytest.mark.parametrize(("name", "nth"), [(f"{SEARCH}-k512", 0), (SEARCH, 1), ("arr-smollm2", 2)])
def test_arr_is_the_files(built: Built, name: str, nth: int) -> None:
    data = read_json(next(path for path in built.files if path.stem == name))
    table = built.page.table("Attention recovered by policy", nth)
    labels = {"oracle": "oracle, one list", "hybrid": "Dustin (hybrid)", "streaming": "StreamingLLM"}
    for policy, label in labels.items():
        row = table.row(label)
        found = data["policies"][policy]
        assert row[1] == shown(found["arr"])
        assert row[2] == (shown(data["hybrid_minus"][policy], sign="+") if policy != "hybrid" else "")
        assert row[3] == f"{found['prefix_arr']['mean']:.3f}"
        assert row[4] == f"{found['in_sample_arr']:.3f}"
    kept = built.page.table("What each budget keeps")
    pair = " with ".join(data["pair"][side]["id"].removesuffix(".gguf") for side in ("target", "draft"))
    start = next(number for number, row in enumerate(kept.rows) if row == [pair])
    summary = next(row for row in kept.rows[start:] if row[0] == f"k = {data['selection']['budget']}")
    assert summary[kept.rows[0].index("ARR")] == shown(data["policies"]["hybrid"]["arr"])
    gain = shown(data["hybrid_minus"]["streaming"], sign="+")
    assert summary[kept.rows[0].index("over StreamingLLM")] == gain
    assert f"Any m from {data['m']['flat'][0]} to {data['m']['flat'][1]} is within 0.001" in built.page.text


def test_fidelity_is_the_files(built: Built) -> None:
    summary = read_json(RESULTS / "fidelity-smollm2.json")["summary"]
    table = built.page.table("Fidelity by policy and budget", 1)  # the real pair's comes first
    for nth, budget in enumerate((512, 256, 128)):
        for method, label in (("dustin", "Dustin (hybrid)"), ("snapkv-8", "SnapKV, window 8"), ("quest", "Quest")):
            cell, row = summary[f"{method}-k{budget}"], table.row(label, nth)
            beyond = f" +{cell['read'] - budget:.0f} over k" if cell["read"] > budget + 0.5 else ""
            assert row[1] == f"{cell['read']:,.0f}{beyond}"
            median = f" median {cell['kl_median']:.4f}"
            assert row[2:5] == [shown(cell["kl"], 4) + median, shown(cell["agreement"]), shown(cell["arr"])]
            assert row[6] == f"{cell['perplexity']:.2f}"
    assert minus(f"{summary['arr_kl_rank_correlation']:+.3f}") in built.page.text
    assert "Median: over 78 windows" in built.page.text


def test_fidelity_of_an_older_file_has_no_medians(tmp_path: Path) -> None:
    data = read_json(RESULTS / "fidelity-smollm2.json")
    data["inputs"]["version"] = 1
    for cell in data["summary"].values():
        for name in ("kl_median", "arr_median", "windows"):
            if isinstance(cell, dict):
                cell.pop(name, None)
    for document in data["documents"]:
        for cell in document["cells"].values():
            cell.pop("windows", None)
    write_json(tmp_path / "old.json", data)
    outcome = dustin_profile("report", tmp_path / "old.json", "-o", tmp_path / "out", "--no-figures", "-q")
    assert outcome.code == 0, outcome.err
    page = Page((tmp_path / "out" / "report.html").read_text())
    row = page.table("Fidelity by policy and budget").row("Dustin (hybrid)")
    assert row[2] == shown(data["summary"]["dustin-k512"]["kl"], 4)
    assert "Median" not in page.text


def test_speed_is_the_files_and_says_that_it_is_synthetic(built: Built) -> None:
    bench = read_json(RESULTS / "bench-qwen7b-1xh200.json")
    table = built.page.table("Decoding speed by method", 3)  # the real pair's two come first, and the shapes of another
    rows = [row for row in table.rows[1:] if len(row) > 1]
    assert sorted(row[1] for row in rows) == sorted(f"{row['tokens_per_s']:,.0f}" for row in bench["rows"])
    assert sorted(row[4].partition(" ")[0] for row in rows) == sorted(f"{row['step_ms']:.2f}" for row in bench["rows"])
    assert {row[3] for row in rows} == {"synthetic"}
    best = max((row for row in bench["rows"] if row["method"] == "dustin"), key=lambda row: row["alpha"])
    assert f"{best['alpha']:.2f}×" in built.page.text
    for name in ("speed-3", "step-3", "speed-4", "step-4", "attention"):
        assert "SYNTHETIC: " in (built.folder / "page-figures" / f"{name}.svg").read_text()
    real = read_json(RESULTS / "bench-qwen-coder1.5b_0.5b-1xh200.json")
    table = built.page.table("Decoding speed by method")
    rows = [row for row in table.rows[1:] if len(row) > 1]
    assert sorted(row[1] for row in rows) == sorted(f"{row['tokens_per_s']:,.0f}" for row in real["rows"])
    assert {row[3] for row in rows} == {"real"}
    for name in ("speed-1", "step-1", "acceptance-1-8x4096", "headline-speed"):
        assert "SYNTHETIC" not in (built.folder / "page-figures" / f"{name}.svg").read_text()
    assert "where its parts, timed alone, sum to" not in built.page.text
    attention = read_json(RESULTS / "attention-1xh200.json")
    table = built.page.table("Attention of one verification, synthetic caches")
    assert [row[5] for row in table.rows[1:]] == [f"{row['speedup']:.2f}×" for row in attention["rows"]]
    assert {row[1] for row in table.rows[1:]} == {"synthetic"}


def test_times_of_profiling_are_the_files(built: Built) -> None:
    times = read_json(RESULTS / "profile-time-1xh200.json")
    rows = built.page.table("Time of profiling by stage").rows[1:]
    assert [row[0] for row in rows] == [row["part"] for row in times["rows"]]
    assert [row[4] for row in rows] == [f"{row['seconds']:.1f}" for row in times["rows"]]
    assert {row[2] for row in rows} == {"synthetic"}


def test_drift_and_generation_are_the_files(built: Built) -> None:
    drift = read_json(DRIFT)["summary"]
    table = built.page.table("Drift")
    assert len([row for row in table.rows[1:] if len(row) > 1]) == len(drift)
    for cell, label, nth in (
        ("sd", "classic SD", 0),
        ("dustin-k512", "Dustin (hybrid)", 0),
        ("dustin-k256", "Dustin (hybrid)", 1),
        ("dustin-t-k256", "Dustin-T (history)", 1),
        ("dustin-t-k128", "Dustin-T (history)", 2),
    ):
        found, row, buckets = drift[cell], table.row(label, nth), drift[cell]["by_tokens"]
        assert row[1] == shown(found["kl"])
        assert row[2:4] == [f"{b['kl']:.3f} to {b['tokens']}" for b in (buckets[0], buckets[-1])]
        assert row[4] == shown(found["agreement"])
        assert row[5:] == [f"{found['tau']:.2f}", f"{found['read']:,.0f}", f"{found['repeated']:.2f}"]
    pair = "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M with Qwen2.5-Coder-0.5B-Instruct.Q4_K_M"
    assert f"as generation goes on: {pair}, k = 256." in built.page.text
    methods = read_json(RESULTS / "generate-qwen-coder1.5b_0.5b.json")["methods"]
    row = built.page.table("Generation").row("Dustin-D (lookahead), k = 256")
    statistics, compared = methods["dustin-d, k=256"]["statistics"], methods["dustin-d, k=256"]["compare"]
    assert row[1] == f"{statistics['tau']:.2f}"
    assert row[4] == f"{compared['equal_rows']} of {compared['rows']}"


def test_drift_of_an_older_file_is_named_by_it(tmp_path: Path, undrawn: None) -> None:
    """Models, τ, tokens read and repetition were not in it."""
    data = read_json(DRIFT)
    data["inputs"] = {name: data["inputs"][name] for name in ("version", "context", "tokens")}
    for cell in data["summary"].values():
        for name in ("tau", "read", "repeated"):
            del cell[name]
    write_json(tmp_path / "older.json", data)
    page = Page(html(compose(gather([tmp_path / "older.json"]))))
    assert "as generation goes on: older.json, k = 256." in page.text
    assert page.table("Drift").rows[0] == ["method", "mean KL, nats", "first tokens", "last tokens", "same choice"]


def test_methods_side_by_side_are_the_files(tmp_path: Path, undrawn: None) -> None:
    """Every figure of some rows, each from its own file, with the losses that an interval is certain of."""
    names = ("fidelity", "needle", "recall", "longbench", "pg19", "drift")
    found = {name: read_json(QWEN / name / "results.json") for name in names}
    page = Page(html(compose(gather([QWEN / name / "results.json" for name in names]))))
    table = page.table("Methods side by side")
    header = table.rows[0]
    scored = {
        "needle": ("needle, facts found", "found"),
        "recall": ("recall, facts recalled", "recalled"),
        "longbench": ("multi_news, ROUGE-L", "score"),
    }
    lost = 0
    for method, k, label, nth in (
        ("dustin", 256, "Dustin (hybrid)", 1),
        ("dustin", 128, "Dustin (hybrid)", 2),
        ("streaming", 256, "StreamingLLM", 1),
        ("snapkv", 512, "SnapKV", 0),
    ):
        row = dict(zip(header, table.row(label, nth), strict=True))
        given, drift = found["fidelity"]["summary"][f"{method}-k{k}"], found["drift"]["summary"][f"{method}-k{k}"]
        beyond = f" +{given['read'] - k:.0f} over k" if given["read"] > k + 0.5 else ""
        assert row["tokens read"] == f"{given['read']:,.0f}{beyond}"
        assert [row["KL, nats"], row["KL, median"]] == [f"{given['kl']['mean']:.4f}", f"{given['kl_median']:.4f}"]
        assert [row["same choice"], row["ARR"]] == [f"{given[name]['mean']:.3f}" for name in ("agreement", "arr")]
        for task, (title, score) in scored.items():
            entry = total(found[task], method, k)
            loss = entry["minus_vanilla"][score]
            certain = loss["low"] > 0 or loss["high"] < 0
            lost += certain
            difference = minus(f" {loss['mean']:+.3f}") if certain else ""
            assert row[title] == f"{entry['scores'][score]['mean']:.3f}{difference}"
        assert [row["drift, KL"], row["τ"]] == [f"{drift['kl']['mean']:.4f}", f"{drift['tau']:.2f}"]
        assert row["drift, same choice"] == f"{drift['agreement']['mean']:.3f}"
        books = total(found["pg19"], method, k)
        assert row["pg19, perplexity"] == (f"{books['perplexity']:.2f}" if books else "")
        assert row["pg19, tokens/s"] == (f"{books['speed_by_document']['mean']:.1f}" if books else "")
    assert 0 < lost < 12  # some losses are certain and some are not, so both forms were compared
    full = dict(zip(header, table.row("vanilla"), strict=True))
    assert [full[name] for name in ("KL, nats", "same choice", "ARR")] == ["0", "1", "1"]
    for task, (title, score) in scored.items():
        assert full[title] == f"{total(found[task], 'vanilla', None)['scores'][score]['mean']:.3f}"


def total(results: dict[str, Any], method: str, budget: int | None) -> dict[str, Any]:
    """The entry of all items; empty where there is none."""
    entries = (entry for entry in results["entries"] if (entry["method"], entry["budget"]) == (method, budget))
    return next((entry for entry in entries if not entry["group"]), {})


def test_where_it_came_from_is_there(built: Built) -> None:
    for source in built.document["sources"]:
        assert f"{source['file']}:" in built.page.text
        assert source["sha256"][:12] in built.page.text
    assert "NVIDIA H200" in built.page.text
    assert "torch 2.11.0" in built.page.text
    bench = read_json(RESULTS / "bench-qwen7b-1xh200.json")
    assert bench["command"] in built.page.text


def test_the_page_loads_nothing_and_is_whole(built: Built) -> None:
    page = built.page
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "base", "form", "img"}
    assert not [name for _, found in page.tags for name in found if name.startswith("on")]
    for reference in page.attributes("href", "xlink:href", "src", "srcset", "action", "poster", "data"):
        assert reference.startswith(("#", "data:image/png;base64,")), reference[:80]
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", built.source)
    policy = next(found for tag, found in page.tags if found.get("http-equiv") == "Content-Security-Policy")
    assert (policy["content"] or "").startswith("default-src 'none'")
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    links = [reference[1:] for reference in page.attributes("href") if reference.startswith("#")]
    links += re.findall(r"url\(#([^)]+)\)", built.source)
    assert set(links) <= set(ids)
    assert len(built.source) < 1_000_000


def test_markdown_has_whole_tables(built: Built) -> None:
    lines = built.markdown.splitlines()
    tables = 0
    for number, line in enumerate(lines):
        if re.fullmatch(r"\|( -+:? \|)+", line):
            tables += 1
            columns = line.count("|")
            for row in lines[number - 1 :]:
                if not row.startswith("|"):
                    break
                assert len(re.findall(r"(?<!\\)\|", row)) == columns, row
    assert tables >= 7
    arr = read_json(RESULTS / "arr-smollm2.json")["policies"]["hybrid"]["arr"]
    assert f"| {arr['mean']:.3f} \\[{arr['low']:.3f}, {arr['high']:.3f}\\] |" in built.markdown
    assert f"]({built.folder.name}" not in built.markdown
    assert "](page.png)" in built.markdown
    assert len(built.markdown) < 65_536  # what a pull request's description may have


def test_the_same_files_give_the_same_bytes(built: Built, tmp_path: Path) -> None:
    files = [RESULTS / "arr-smollm2.json", RESULTS / "bench-qwen7b-1xh200.json"]
    pages = []
    for name in ("a", "b"):
        outcome = dustin_profile("report", *files, "-o", tmp_path / name, "--no-figures", "-q")
        assert outcome.code == 0, outcome.err
        assert not list((tmp_path / name).glob("*figures"))
        pages.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert pages[0] == pages[1]
    assert set(pages[0]) == {"report.html", "report.md", "report.png"}
