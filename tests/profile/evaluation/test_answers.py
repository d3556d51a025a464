"""`results.md` of evaluations by answers: what its tables hold, and that the committed ones are of their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dustin_profile.evaluation import answers
from dustin_runtime.files import read_json

QWEN = Path(__file__).parents[3] / "results" / "eval-qwen-coder1.5b_0.5b"


def tables(text: str) -> list[list[list[str]]]:
    """Cells of every Markdown table, each of which must be whole."""
    found: list[list[list[str]]] = []
    previous = ""
    for line in text.splitlines():
        if line.startswith("|"):
            if not previous.startswith("|"):
                found.append([])
            found[-1].append([cell.strip() for cell in line[1:-1].split("|")])
        previous = line
    for rows in found:
        assert {len(row) for row in rows} == {len(rows[0])} and set(rows[1]) == {"---"}
    return [[rows[0], *rows[2:]] for rows in found]


def results(groups: list[dict[str, str]], **scores: list[float]) -> dict[str, Any]:
    """A score per method and group, and the first one for all items."""

    def estimate(mean: float, documents: int = 3) -> dict[str, Any]:
        return {"mean": mean, "low": mean - 0.25, "high": mean + 0.25, "method": "t", "documents": documents}

    return {
        "task": "needle",
        "pair": {"target": {"id": "big"}, "draft": {"id": "small"}},
        "inputs": {"batch": 2, "depth": 3, "dtype": "float32"},
        "entries": [
            {
                "method": method,
                "budget": None if method == "vanilla" else 64,
                "group": group,
                "items": 6 if not group else 2,
                "scores": {"found": estimate(value), "recall": estimate(0.125)},
                "minus_vanilla": None if method == "vanilla" else {"found": estimate(-0.5), "recall": estimate(0.125)},
                "same_text": None if method == "vanilla" else 1,
                "tau": None if method == "vanilla" else 2.5,
                "tokens_read": None if method == "vanilla" else 64.25,
                "tokens_per_s": 1234.5,
            }
            for method, values in scores.items()
            for group, value in zip([{}, *groups], values, strict=True)
        ],
        "provenance": {"device": "cpu", "versions": {"dustin": "0.1.0"}},
    }


HEADER = ["method", "k", "n", "found (95 %)", "minus vanilla (95 %)", "same text", "prefix tokens read", "τ"]


def test_few_groups_are_rows_of_one_table() -> None:
    groups = [{"length": "512", "depth": "1.0"}, {"length": "512", "depth": "0.0"}]
    text = answers.markdown(results(groups, vanilla=[0.75, 1.0, 0.5], dustin=[0.25, 0.5, 0.0]))
    ((header, *rows),) = tables(text)
    assert header == ["items", *HEADER]
    assert rows[:2] == [
        ["all", "vanilla", "", "6", "0.7500 [0.5000, 1.0000]", "", "", "", ""],
        ["", "dustin", "64", "6", "0.2500 [0.0000, 0.5000]", "-0.5000 [-0.7500, -0.2500]", "1", "64", "2.50"],
    ]
    assert [row[0] for row in rows[2:]] == ["512, 1.0", "", "512, 0.0", ""]
    assert [row[4][:6] for row in rows[2:]] == ["1.0000", "0.5000", "0.5000", "0.0000"]
    assert "6 items of 3 documents, 2 at a time, greedy; depth 3; cpu, float32." in text
    assert "1234" not in text and "tokens/s" not in text and "Averages" not in text


def test_one_group_stands_for_all_items() -> None:
    ((_, *rows),) = tables(answers.markdown(results([{"task": "qasper"}], vanilla=[0.75, 0.75])))
    assert [row[:2] for row in rows] == [["qasper", "vanilla"]]


def test_many_groups_are_columns_of_means() -> None:
    depths = [f"{number / 64}" for number in range(32)]
    groups = [{"length": "512", "depth": depth} for depth in depths]
    values = [number / 128 for number in range(33)]
    found = results(groups, vanilla=values, dustin=[1 - value for value in values])
    text = answers.markdown(found)
    whole, by_group = tables(text)
    assert whole[0] == HEADER and [row[:3] for row in whole[1:]] == [["vanilla", "", "6"], ["dustin", "64", "6"]]
    assert "## found by length and depth" in text
    assert by_group[0] == ["method", "k", *(f"512, {depth}" for depth in depths)]
    assert by_group[1] == ["vanilla", "", *(f"{value:.3f}" for value in values[1:])]
    assert by_group[2] == ["dustin", "64", *(f"{1 - value:.3f}" for value in values[1:])]
    # A group that a method has no item of is an empty cell, not a neighbour's.
    found["entries"].remove(next(e for e in found["entries"] if e["method"] == "dustin" and e["group"] == groups[0]))
    assert tables(answers.markdown(found))[1][2][:4] == ["dustin", "64", "", f"{1 - values[2]:.3f}"]


def test_averages_over_tasks_have_every_category() -> None:
    found = results([{"task": "qasper"}, {"task": "lcc"}], vanilla=[0.75, 0.5, 1.0], dustin=[0.5, 0.5, 0.5])
    average = {"tasks": 2, "plain": 0.75, "weighted": 0.625}
    found["averages"] = [
        {"method": "vanilla", "budget": None} | average | {"categories": {"code": 1.0, "single-doc QA": 0.5}},
        {"method": "dustin", "budget": 64} | average | {"categories": {"single-doc QA": 0.25}},
    ]
    averages = tables(answers.markdown(found))[1]
    assert averages == [
        ["method", "k", "tasks", "mean of tasks", "weighted by size", "code", "single-doc QA"],
        ["vanilla", "", "2", "0.7500", "0.6250", "1.0000", "0.5000"],
        ["dustin", "64", "2", "0.7500", "0.6250", "", "0.2500"],
    ]


@pytest.mark.parametrize("task", ["needle", "recall", "longbench"])
def test_committed_tables_are_of_their_results(task: str) -> None:
    found = read_json(QWEN / task / "results.json")
    text = (QWEN / task / "results.md").read_text(encoding="utf-8")
    assert text == answers.markdown(found)
    methods = {(entry["method"], entry["budget"]) for entry in found["entries"]}
    assert len(tables(text)[0]) == 1 + len(methods)
    assert ("## Averages over tasks" in text) == (task == "longbench")
