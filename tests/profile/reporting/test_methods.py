"""All methods of a pair side by side: what stands in which row, and what is bold."""

from __future__ import annotations

from itertools import compress, takewhile
from pathlib import Path

import pytest
from html_page import Page, Table
from result_files import RESULTS, answers, composed, fidelity

from dustin_profile.reporting.markdown import markdown
from dustin_profile.reporting.page import html
from dustin_profile.reporting.report import Report
from dustin_profile.reporting.sections.methods_columns import Column
from dustin_runtime.files import read_json

pytestmark = pytest.mark.usefixtures("undrawn")

KL = {
    ("oracle", 128): [0.01, 0.01, 0.02, 0.02],
    ("dustin", 128): [0.10, 0.20, 0.30, 0.40],
    ("snapkv", 128): [0.11, 0.19, 0.31, 0.40],
    ("streaming", 128): [0.20, 0.30, 0.40, 0.50],  # 0.1 more on every text: told apart, though the intervals overlap
    ("dustin", 64): [0.20, 0.30, 0.40, 0.55],
    ("quest", 64): [0.30, 0.40, 0.50, 0.60],
}
FOUND = {
    ("vanilla", None): [1.0, 1.0, 0.5, 1.0],
    ("sd", None): [1.0, 1.0, 0.5, 1.0],
    ("dustin", 128): [1.0, 1.0, 0.5, 1.0],
    ("streaming", 128): [0.5, 0.4, 0.0, 0.6],
    ("h2o", 128): [1.0, 0.8, 0.5, 1.0],
    ("dustin", 32): [0.5, 0.5, 0.0, 0.5],
}


def table(report: Report, nth: int = 0) -> Table:
    return Page(html(report)).table("Methods side by side", nth)


def bold(report: Report) -> set[tuple[str, str, str]]:
    """Budget, method and column of what stands out in the Markdown."""
    lines = markdown(report, None).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| method |"))
    whole = takewhile(lambda line: line.startswith("|"), lines[start:])
    header, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in whole)
    found, group = set(), ""
    for name, *cells in rows:
        if name.startswith("*") and not name.startswith("**"):
            group = name.strip("*")
        stands_out = [cell.startswith("**") for cell in cells]
        found |= {(group, name.strip("*"), column) for column in compress(header[1:], stands_out)}
    return found


def test_one_kind_of_evidence_is_no_comparison(tmp_path: Path) -> None:
    report = composed(tmp_path, fidelity(KL))
    assert "methods" not in {section.key for section, _ in report.sections}
    assert "fidelity-kl" in report.drawn  # where it is measured, then
    assert "methods" not in {section.key for section in report.omitted}  # no command of its own would make it


def test_every_kind_is_a_column_and_what_was_not_measured_is_empty(tmp_path: Path) -> None:
    report = composed(tmp_path, fidelity(KL), answers("needle", "found", FOUND))
    found = table(report)
    columns = ["tokens read", "KL, nats", "same choice", "ARR", "needle, facts found", "τ"]
    assert found.rows[0] == ["method", *columns]
    groups = [row[0] for row in found.rows[1:] if row[0].startswith(("k =", "reads"))]
    assert groups == ["reads everything", "k = 128", "k = 64", "k = 32"]
    assert [row for row in found.rows if row[0] == "k = 64"] == [["k = 64", *columns]]  # the header, said again
    assert found.row("vanilla") == ["vanilla", "1,056", "0", "1", "1", "0.875", "1.00"]
    assert found.row("classic SD")[1:6] == ["1,056", "0", "1", "1", "0.875"]
    order = [row[0] for row in found.rows[4:]]
    best_first = ["k = 128", "oracle, one list (bound)", "Dustin (hybrid)", "SnapKV", "StreamingLLM", "H2O"]
    assert order == [*best_first, "k = 64", "Dustin (hybrid)", "Quest", "k = 32", "Dustin (hybrid)"]
    assert found.row("SnapKV") == ["SnapKV", "158 +30 over k", "0.2525", "0.875", "0.874", "", ""]
    assert found.row("Dustin (hybrid)")[-2:] == ["0.875", "2.50"]  # as vanilla: no difference is said
    assert found.row("StreamingLLM")[-2] == "0.375 −0.500"
    assert found.row("H2O")[1:] == ["128", "", "", "", "0.825", "2.50"]  # nor one that may be chance
    assert found.row("Quest")[1:] == ["64", "0.4500", "0.875", "0.775", "", ""]
    assert found.row("Dustin (hybrid)", 2)[1:5] == ["32", "", "", ""]


def test_bold_is_what_intervals_do_not_tell_from_the_best(tmp_path: Path) -> None:
    found = bold(composed(tmp_path, fidelity(KL), answers("needle", "found", FOUND)))
    of = {(group, column): {m for g, m, c in found if (g, c) == (group, column)} for group, _, column in found}
    # StreamingLLM's interval overlaps Dustin's; by document it is 0.1 worse. The oracle is a bound.
    assert of["k = 128", "KL, nats"] == {"Dustin (hybrid)", "SnapKV"}
    assert ("k = 64", "KL, nats") in of and of["k = 64", "KL, nats"] == {"Dustin (hybrid)"}
    assert of["k = 128", "needle, facts found"] == {"Dustin (hybrid)", "H2O"}
    assert ("k = 32", "needle, facts found") not in of  # alone, so best of nothing
    assert not [one for one in found if one[0] == "reads everything" or one[2] == "τ"]  # τ has no interval here


def test_without_intervals_nothing_is_bold(tmp_path: Path) -> None:
    kl = {method: values[:1] for method, values in KL.items()}
    found = {method: values[:1] for method, values in FOUND.items()}
    assert bold(composed(tmp_path / "one", fidelity(kl), answers("needle", "found", found))) == set()
    some = answers("needle", "found", FOUND)
    for entry in some["entries"]:
        if entry["method"] == "h2o":
            entry["minus_vanilla"]["found"] |= {"low": None, "high": None}
    assert {column for _, _, column in bold(composed(tmp_path / "some", fidelity(kl), some))} == set()


def test_each_pair_has_its_table_and_pictures(tmp_path: Path) -> None:
    documents = [fidelity(KL), answers("needle", "found", FOUND)]
    other = [fidelity({("h2o", 512): [0.5, 0.25]}, pair="other-"), answers("recall", "recalled", FOUND, pair="other-")]
    report = composed(tmp_path, *documents, *other)
    assert {"methods-kl-1", "methods-needle-1"} <= report.drawn.keys()  # one budget alone makes no line
    assert not {"methods-kl-2", "methods-recall-2", "fidelity-kl-1"} & report.drawn.keys()
    assert "needle, facts found" in table(report).rows[0] and "recall, facts recalled" in table(report, 1).rows[0]
    assert [row[0] for row in table(report, 1).rows].count("k = 512") == 1
    headings = [heading for heading in Page(html(report)).headings if heading.endswith("target with other-draft")]
    assert headings and "KL by tokens read is drawn beside all else" in Page(html(report)).text


def test_pictures_compare_at_what_is_read(tmp_path: Path) -> None:
    read = {("dustin", 128): 150.0, ("dustin", 32): 40.0}
    report = composed(tmp_path, fidelity(KL), answers("needle", "found", FOUND, read=read))
    drawn = {name: report.drawn[f"methods-{name}"].figure.draw.keywords for name in ("kl", "needle")}  # type: ignore[attr-defined]
    own = {name: next((x, y) for style, x, y in found["curves"] if style.own) for name, found in drawn.items()}
    assert own["kl"][0] == [64.0, 128.0] and drawn["kl"]["log_y"]
    assert own["needle"] == ([40.0, 150.0], [0.375, 0.875])
    names = [style.label for style, *_ in drawn["needle"]["curves"]]
    assert "vanilla" in names and "classic SD" not in names
    assert [figure.name for section, content in report.sections for figure in content.figures].count("methods-kl") == 1


def test_files_on_other_texts_are_named_and_not_mixed_in(tmp_path: Path) -> None:
    longer = answers("needle", "found", {("h2o", 128): [0.0, 0.0]})
    longer["inputs"]["items"] = {"seed": 1}
    twice = answers("needle", "found", {("h2o", 128): [0.25] * 4, ("h2o", 16): [0.25] * 4})
    report = composed(tmp_path, answers("needle", "found", FOUND), longer, twice, fidelity(KL))
    found = table(report)
    assert found.row("H2O")[-2] == "0.825" and found.row("H2O", 1)[-2] == "0.250"
    text = Page(html(report)).text
    assert "Left out, since on other texts or another device: 1.json." in text
    assert "the first is shown: also in 2.json." in text


def test_tasks_say_their_metric_or_their_number(tmp_path: Path) -> None:
    scores = {("vanilla", None): [0.2, 0.4, 0.2], ("dustin", 128): [0.2, 0.4, 0.2], ("h2o", 128): [0.2, 0.1, 0.2]}
    one = answers("longbench", "score", scores, groups=[{"task": "multi_news"}], tokens=512)
    assert "multi_news, ROUGE-L" in table(composed(tmp_path / "one", fidelity(KL), one)).rows[0]
    groups = [{"task": "qasper"}, {"task": "multi_news"}]
    # Three items are two of the one and one of the other: the average counts each task once, which no interval is of.
    two = composed(tmp_path / "two", fidelity(KL), answers("longbench", "score", scores, groups=groups))
    found = table(two)
    place = found.rows[0].index("longbench, average of 2 tasks")
    assert found.row("Dustin (hybrid)")[place] == "0.300"
    assert "Tasks of unequal size" in Page(html(two)).text
    assert not [one for one in bold(two) if one[2].startswith("longbench")]


def test_tau_is_of_the_longest_texts(tmp_path: Path) -> None:
    short, long = (answers(task, "found", FOUND, tokens=tokens) for task, tokens in (("needle", 16), ("recall", 40)))
    for entry in long["entries"]:
        entry["tau"] = 3.25
    report = composed(tmp_path, short, long)
    assert table(report).row("Dustin (hybrid)")[-1] == "3.25"
    assert "τ: of recall, texts of 40 tokens: the longest that were generated." in Page(html(report)).text
    # No KL: the first score orders.
    rows = [row[0] for row in table(report).rows]
    assert rows.index("H2O") < rows.index("StreamingLLM")


def test_books_and_drift_are_columns(tmp_path: Path) -> None:
    books = read_json(RESULTS / "eval-smollm2" / "pg19" / "results.json")
    models = {side: model for side, model in books["inputs"]["models"].items() if side != "rope"}
    interval = {"low": None, "high": None, "method": "none", "documents": 4}
    drift = {
        "kind": "dustin-drift",
        "inputs": {"version": 1, "context": 4096, "tokens": 256, "models": models},
        "summary": {
            f"{method}-k256": {
                "method": method,
                "budget": 256,
                "kl": interval | {"mean": kl},
                "agreement": interval | {"mean": agreement},
                "by_tokens": [{"tokens": 256, "kl": kl, "agreement": agreement}],
            }
            for method, kl, agreement in (("dustin", 0.019, 0.972), ("dustin-t", 0.09, 0.93))
        },
        "documents": [{"id": f"book-{number}", "prompt_tokens": 4096} for number in range(4)],
    }
    report = composed(tmp_path, books, drift)
    found = table(report)
    columns = ["pg19, perplexity", "pg19, tokens/s", "drift, KL", "drift, same choice", "τ"]
    assert found.rows[0] == ["method", "tokens read", *columns]
    assert found.row("Dustin (hybrid)")[2:] == ["29.58", "7.7", "0.0190", "0.972", "3.48"]
    assert found.row("Dustin-T (history)")[1:4] == ["", "", ""] and found.row("Dustin-T (history)")[-1] == ""
    assert "Drift: 4 texts of 256 generated tokens after prompts of 4,096." in Page(html(report)).text


def test_a_median_over_windows_is_shown_where_a_file_has_it(tmp_path: Path) -> None:
    data = fidelity(KL)
    for name, cell in data["summary"].items():
        if name != "full":
            cell["kl_median"] = 0.0625
    found = table(composed(tmp_path, data, answers("needle", "found", FOUND)))
    place = found.rows[0].index("KL, median")
    assert [found.row(name)[place] for name in ("vanilla", "SnapKV", "H2O")] == ["0", "0.0625", ""]


def test_the_short_version_has_the_columns_that_decide(tmp_path: Path) -> None:
    report = composed(tmp_path, fidelity(KL), answers("needle", "found", FOUND))
    lines = markdown(report, None).splitlines()
    assert "| method | tokens read | KL, nats | same choice | needle, facts found | τ |" in lines
    assert "| **Dustin (hybrid)** | 128 | **0.2500** | **0.875** | **0.875** | 2.50 |" in lines
    assert "| StreamingLLM | 128 | 0.3500 | **0.875** | 0.375 −0.500 | 2.50 |" in lines


def test_bold_ends_at_the_first_that_is_told_apart() -> None:
    """One far behind, whose interval is so wide that it holds anything, is no rival of the best."""
    alike = {"snapkv": True, "dustin": False, "h2o": True}
    cost = {("quest", 8): 0.1, ("snapkv", 8): 0.2, ("dustin", 8): 0.3, ("h2o", 8): 0.9}
    column = Column("KL", {}, cost, lambda method, best: alike[method[0]])
    assert column.marked(list(cost)) == {("quest", 8), ("snapkv", 8)}
