"""`dustin-profile eval needle` and `eval recall` on the tiny pair: cells of their tables, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Outcome, dustin_profile
from tiny_pair import TinyPair

from dustin_profile.evaluation import answers

FIGURES = (("tokens_read", 0), ("tau", 2), ("tokens_per_s", 1))
SMALL = {
    "needle": ("--length", 300, "--depth-at", 0, "--depth-at", 1, "--needle-count", 2),
    "recall": (
        *("--length", 400, "--samples", 2, "--facts", 3, "--asked", 2),
        *("--kind", "multi-key", "--kind", "multi-value"),
    ),
}


def evaluate(pair: TinyPair, task: str, config: Path, run: Path, *options: object) -> Outcome:
    return dustin_profile("eval", task, config, *pair.options, "--run-dir", run, "--quiet", *SMALL[task], *options)


@pytest.mark.parametrize(
    ("task", "groups"),
    [
        ("needle", [{"length": "300", "depth": "0.0"}, {"length": "300", "depth": "1.0"}]),
        ("recall", [{"kind": "multi-key", "length": "400"}, {"kind": "multi-value", "length": "400"}]),
    ],
)
def test_a_row_per_item_and_a_cell_per_group(
    task: str, groups: list[dict[str, str]], tiny_pair: TinyPair, config: Path, tmp_path: Path
) -> None:
    found = evaluate(tiny_pair, task, config, tmp_path, "--method", "vanilla", "--method", "snapkv-8", "--json")
    assert found.code == 0, found.err
    document = json.loads(found.out)
    named = [entry["group"] for entry in document["entries"] if entry["method"] == "vanilla"]
    assert all(group in named for group in groups)
    for name in ("vanilla", "snapkv-8-k64"):
        lines = (tmp_path / task / "rows" / f"{name}.jsonl").read_text().splitlines()
        assert len(lines) == 4
        assert {row["group"]["length"] for row in map(json.loads, lines)} == {groups[0]["length"]}
    text = (tmp_path / task / "results.md").read_text()
    assert text == answers.markdown(document)
    assert text.startswith(f"# {task}: {document['pair']['target']['id']} with {document['pair']['draft']['id']}\n")
    names = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if "| vanilla |" in line]
    parts = [group for group in named if group]
    assert names == ["all", *(", ".join(group.values()) for group in parts)]
    shown = evaluate(tiny_pair, task, config, tmp_path, "--method", "vanilla", "--method", "snapkv-8")
    assert [Path(path).name for path in shown.out.split()[-3:]] == ["results.json", "results.md", "rows.parquet"]
    assert all(Path(path).is_file() for path in shown.out.split()[-3:])
    rows = [line.split() for line in shown.out.splitlines() if "snapkv-8" in line]
    score = answers.score_of(document)
    assert len(rows) == 3
    for row, group in zip(rows, [*parts, {}], strict=True):  # all items last on the terminal
        (entry,) = (e for e in document["entries"] if (e["method"], e["group"]) == ("snapkv-8", group))
        assert row[:4] == ["snapkv-8", "64", str(entry["items"]), f"{entry['scores'][score]['mean']:.4f}"]
        assert row[-3:] == [f"{entry[name]:.{digits}f}" for name, digits in FIGURES]


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("needle", ["--depth-at", 1.5], "depth 1.5: must lie between 0 and 1"),
        ("recall", ["--kind", "single"], "kinds: single; choose from multi-key, multi-value"),
        ("recall", ["--asked", 4], ""),
        ("recall", ["--length", 60], ""),
    ],
)
def test_bad_options(
    task: str, options: list[object], message: str, tiny_pair: TinyPair, config: Path, tmp_path: Path
) -> None:
    refused = evaluate(tiny_pair, task, config, tmp_path, *options)
    assert (refused.code, refused.out) == (2, "")
    assert refused.error.startswith(message)
