"""Selections, splits and guards of study files: pooled by document, by hand and of the committed files."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any, cast

import pytest
from commands import dustin_profile
from html_page import Page
from result_files import RESULTS, composed

from dustin_profile.reporting.page import html
from dustin_profile.reporting.report import compose
from dustin_profile.reporting.sources import gather
from dustin_profile.reporting.studies import settings
from dustin_runtime.files import read_json, write_json

pytestmark = pytest.mark.usefixtures("undrawn")

KINDS = ("books", "code", "documentation", "retrieval", "summaries")
REST = 'dustin-rest rest {"queries": 8, "period": 112} k58'


def texts(**changed: Any) -> dict[str, Any]:
    models = {side: {"id": side, "revision": None, "sha256": side * 8} for side in ("target", "draft")}
    selection = read_json(RESULTS / "arr-smollm2.json")["selection"]
    return {"version": 1, "models": models, "tokens": 16, "context": 512, "depth": 4, "selection": selection} | changed


def study(kind: str, inputs: dict[str, Any], documents: dict[str, dict[str, Any]], **fields: Any) -> dict[str, Any]:
    listed = [{"id": f"{of}.jsonl#1", "source": f"{of}.jsonl", "cells": one} | fields for of, one in documents.items()]
    return {"kind": f"dustin-study-{kind}", "inputs": inputs, "versions": {}, "documents": listed}


def cell(kl: float, read: float) -> dict[str, float]:
    return {"kl": kl, "agreement": 0.5, "read": read}


def test_documents_of_all_files_are_compared_as_one_study(tmp_path: Path) -> None:
    """Means over documents and not over files; what reads 64 is compared with Dustin at 64, and only where both are."""
    first = {
        "books": {"dustin k64": cell(0.4, 64), "dustin k58": cell(0.5, 58), REST: cell(0.1, 64)},
        "code": {"dustin k64": cell(0.2, 64), REST: cell(0.2, 64)},
    }
    again = {
        "books": {"dustin k64": cell(9.0, 64), "snapkv k64": cell(0.8, 90)},  # older, of the same data: counts once
        "news": {"dustin k64": cell(0.6, 64)},
        "mail": {REST: cell(9.0, 64)},
    }
    report = composed(tmp_path, study("lists", texts(data_sha256="a"), first), study("lists", texts(), again))
    page = Page(html(report))
    found = page.table("Selections compared, k = 64")
    assert found.rows[0][3:8] == ["over Dustin's", "books", "code", "news", "same choice"]
    rows = {row[0]: [*row[1:3], row[3].split()[0], *row[4:]] for row in found.rows[1:]}
    assert rows == {
        "Dustin, with the rest dustin-rest, queries 8, period 112": [
            *("64", "0.1500", "0.50", "0.25", "1.00", "", "0.500", "2"),
        ],
        "Dustin (hybrid)": ["64", "0.4000", "1", "1.00", "1.00", "1.00", "0.500", "3"],
        "SnapKV": ["90 +26 over k", "0.8000", "2.00", "2.00", "", "", "0.500", "1"],
    }
    assert "3 documents (1 books, 1 code and 1 news), context 512" in page.text
    assert not [table for table in page.tables if table.caption == "Selections compared, k = 58"]  # of Dustin alone


def test_splits_and_guards_by_hand(tmp_path: Path) -> None:
    kl = {  # base, two fixed m, and a rule that saves half of what the best fixed m of each document saves
        "books": {"dustin k64": 0.4, "dustin m 0/8 k64": 0.2, "dustin m 8/8 k64": 0.6, "dustin-merged k64": 0.3},
        "code": {"dustin k64": 0.2, "dustin m 0/8 k64": 0.8, "dustin m 8/8 k64": 0.3, "dustin-merged k64": 0.2},
    }
    cells = {kind: {name: cell(value, 64) for name, value in found.items()} for kind, found in kl.items()}
    steps = {"read": 64.0, "agreement": 0.5, "tokens": [0.1, 0.3], "kl": [0.2], "full": [0, 0]}
    guarded = {"read": 80.0, "agreement": 0.75, "tokens": [0.0, 0.2, 0.1], "kl": [0.1], "full": [1, 0]}
    guards = {kind: {"dustin k64": steps, "dustin k64 guard 0.05": guarded} for kind in ("books", "code")}
    page = Page(
        html(
            composed(
                tmp_path,
                study("splits", {"texts": [texts()]}, cells, data=0),
                study("guard", texts(method="dustin", budget=64), guards),
            )
        )
    )
    table = page.table("Splits compared, k = 64")
    shares = {row[0]: (row[1], row[3]) for row in table.rows[1:] if len(row) > 1}
    assert shares["Dustin (hybrid)"] == ("0.3000", "0.00")
    assert shares["Dustin, merged ranking"] == ("0.2500", "+0.50")
    assert shares["Dustin (hybrid) dustin, m 0/8"] == ("0.5000", "−2.00")
    assert shares["best m of each document"] == shares["best m of each kind"] == ("0.2000", "+1.00")
    row = page.table("Guards compared").row("k = 64, guard for 5\N{NO-BREAK SPACE}% of steps")
    assert row[1:4] == ["50\N{NO-BREAK SPACE}%", "80", "0.1000"]
    assert row[4].split()[0] == "0.50"
    assert row[5:] == ["0.100", "0.200", "0.750"]


def test_places_and_tells_by_hand(tmp_path: Path) -> None:
    other = {"snapkv k64": cell(0.2, 64)}
    placed = {
        "books": {"dustin k64": cell(0.4, 64) | {"places": [0.1, 0.2]}} | other,
        "code": {"dustin k64": cell(0.2, 64)} | other,
        "news": {"dustin k64": cell(0.2, 64) | {"places": [0.3, 0.6]}} | other,
    }
    others = {"unread": 0.0, "served": 0.0, "apart": 0.0}
    # The draft's entropy is the KL but for a scale, the estimate says nothing, and a sign that is 0 is left out.
    steps = [
        {"kl": 0.1 * 2**n, "drafted": 2.0**n, "estimate": 0.5 + n % 3 / 10, "rest": 0.0} | others for n in range(10)
    ]
    tells = {kind: {"dustin k64": {"steps": steps}} for kind in ("books", "code")}
    page = Page(html(composed(tmp_path, study("lists", texts(), placed), study("tells", texts(), tells))))
    assert page.table("KL by place, k = 64").rows[1][1:] == ["0.2000", "0.4000", "2"]
    table = next(
        one for one in page.tables if one.caption.startswith("What tells a step's KL, Dustin (hybrid) at k = 64")
    )
    assert [row[0] for row in table.rows[1:]] == ["estimate", "drafted", "estimate, drafted", "the KL itself"]
    left = f"{(20 - 2 * 512 / 1023 * 10) / 20:.2f}"  # two of 20 steps, the largest of each document
    assert table.row("drafted")[1:] == table.row("the KL itself")[1:] == ["1.00", left, "0.50"]
    assert float(table.row("estimate")[2]) > float(left)


def test_committed_studies_are_shown(tmp_path: Path) -> None:
    folders = [RESULTS / "study-rest", RESULTS / "study-lists", RESULTS / "study-look"]
    report = compose(gather([RESULTS / "arr-qwen-coder1.5b_0.5b.json", *folders]))
    page = Page(html(report))
    first = next(figure for name, figure in report.drawn.items() if name.startswith("studies-kl"))  # of the Qwen pair
    draw = cast(Any, first.figure.draw).keywords
    read = {style.label: x for style, x, _ in draw["curves"]}
    assert read.pop("Dustin (hybrid)") == [122, 128, 250, 256, 506, 512]
    names = ("SpecAttn, all heads", "Dustin, last look", "Dustin, with the rest", "Dustin, last look and rest")
    assert read == {name: [128, 256, 512] for name in names}
    assert draw["log_y"]
    assert "Lists: Qwen2.5-Coder-1.5B-Instruct.Q4_K_M with Qwen2.5-Coder-0.5B-Instruct.Q4_K_M" in page.headings
    assert '"layer"' not in page.text
    held: dict[str, dict[str, float]] = {}
    for path in [path for folder in folders for path in sorted(folder.glob("*s-*.json"))]:
        data = read_json(path)
        if data["kind"] == "dustin-study-lists":
            for one in data["documents"]:
                kept = held.setdefault(one["id"], {})
                for name, found in one["cells"].items():
                    kept.setdefault(name, found["kl"])  # of a cell that was measured twice the first counts
    header = page.table("Selections compared, k = 256").rows[0]
    assert tuple(header[4:9]) == KINDS
    for budget in (128, 256, 512):
        table, base = page.table(f"Selections compared, k = {budget}"), f"dustin k{budget}"
        names = {name for cells in held.values() for name in cells if name.endswith(f"}} k{budget - 6}")}
        assert names
        for name in names:
            both = [(cells[name], cells[base]) for cells in held.values() if name in cells and base in cells]
            own, theirs = (mean(values) for values in zip(*both, strict=True))
            row = table.row(f"Dustin, with the rest dustin-rest, {settings(name)}")
            assert row[1:3] == [str(budget), f"{own:.4f}"]
            assert row[3].split()[0] == f"{own / theirs:.2f}"
            assert row[-1] == str(len(both)) and len(both) in (16, 20)
    assert (
        page.table("Selections compared, k = 512")
        .rows[2][0]
        .startswith("Dustin, last look and rest dustin-rest-look, all draft heads")
    )
    assert len([row for row in page.table("Splits compared, k = 256").rows if len(row) > 1]) == 1 + 16 + 2
    assert len(page.table("Guards compared").rows) == 1 + 13


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"data": 1}, "documents.0.data: 1, and the length of inputs.texts is 1"),
        ({"cells": {"dustin": cell(0.1, 64)}}, "documents.0.cells.dustin.[key]: String should match pattern"),
        ({"cells": {"dustin k64": {"kl": 0.1, "read": 64}}}, "documents.0.cells.dustin k64.agreement: is missing"),
    ],
)
def test_damaged_files_are_refused_by_field(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    document = {"data": 0} | changed
    path = tmp_path / "splits.json"
    write_json(path, study("splits", {"texts": [texts()]}, {"books": {"dustin k64": cell(0.1, 64)}}, **document))
    outcome = dustin_profile("report", path, "-o", tmp_path / "page.html", "-q")
    assert outcome.code == 6
    assert f"{path}: not a whole dustin-study-splits file ({words}" in outcome.error
    assert "python tools/study_splits.py" in outcome.error


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], "documents.0.cells.dustin k64.steps: List should have at least 1 item"),
        ([{"estimate": 0.5}], "documents.0.cells.dustin k64.steps.0.kl: is missing"),
    ],
)
def test_tells_without_steps_or_kl_are_refused(steps: list[dict[str, float]], words: str, tmp_path: Path) -> None:
    path = tmp_path / "tells.json"
    write_json(path, study("tells", texts(), {"books": {"dustin k64": {"steps": steps}}}))
    outcome = dustin_profile("report", path, "-o", tmp_path / "page.html", "-q")
    assert outcome.code == 6
    assert words in outcome.error


def test_a_document_of_two_files_tells_once_and_nothing_is_left_of_nothing(tmp_path: Path) -> None:
    names = ("kl", "estimate", "rest", "unread", "drafted", "served", "apart")
    tells = {"books": {"dustin k64": {"steps": [dict.fromkeys(names, 0.0)] * 3}}}
    page = Page(html(composed(tmp_path, study("tells", texts(), tells), study("tells", texts(), tells))))
    (table,) = (one for one in page.tables if one.caption.startswith("What tells"))
    assert table.rows[1:] == [["the KL itself", "", "0.00", "0.00"]]
    assert "3 steps of 1 document" in page.text
