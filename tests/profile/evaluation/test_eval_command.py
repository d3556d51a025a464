"""`dustin-profile eval longbench` on the tiny pair: results, resumption, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas
import pytest
from commands import Outcome, dustin_profile
from tiny_pair import TinyPair

from dustin_profile.evaluation import answers, shared_prompts
from dustin_profile.evaluation.rows import RowFile
from dustin_profile.evaluation.runner import Cell, chunks, end_of
from dustin_profile.evaluation.tasks import Item
from dustin_profile.texts import topics
from dustin_runtime import prompt_store, serving
from dustin_runtime.config import LayerHeads, Selection, changed
from dustin_runtime.files import read_json
from dustin_runtime.prompt_store import Processed, process

USAGE, CONFLICT, CAPACITY, MISSING, INTERRUPTED = 2, 4, 5, 6, 130
LAYER_1 = LayerHeads(layer=1, heads=(1, 2))
METHODS = ("vanilla", "sd", "magicdec", "dustin", "dustin-t", "dustin-d", "streaming")


def entry(number: int, **changes: Any) -> dict[str, Any]:
    text = topics()[2000 * number : 2000 * number + 1500]
    return {
        "input": f"What is {number}?",
        "context": text,
        "answers": [text[:40]],
        "dataset": "hotpotqa",
        "all_classes": None,
    } | changes


def write(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rows of one task on two contexts, and one of another."""
    rows = [entry(1), entry(2), entry(1, input="And why?"), entry(3, dataset="passage_count", answers=["7"])]
    return write(tmp_path_factory.mktemp("data") / "rows.jsonl", *rows)


def evaluate(pair: TinyPair, config: Path, data: Path, run: Path, *options: object) -> Outcome:
    return dustin_profile(
        *("eval", "longbench", config, *pair.options, "--data", data, "--run-dir", run, "--quiet"),
        *("--max-length", 256, *options),
    )


def methods(*names: str) -> list[str]:
    return [option for name in names for option in ("--method", name)]


def rows_of(run: Path, cell: str) -> list[dict[str, Any]]:
    """All but the speed, which no two runs share."""
    lines = (run / "longbench" / "rows" / f"{cell}.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_s"} for line in lines]


def test_a_prompt_is_processed_once_for_all_methods(
    tiny_pair: TinyPair, config: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fits in memory, be it alone or with the others; and results are the same."""
    passes = []

    def count(*arguments: Any, **options: Any) -> Processed:
        passes.append(arguments)
        return process(*arguments, **options)

    for module in (serving, prompt_store):
        monkeypatch.setattr(module, "process", count)
    alone = tmp_path / "alone"
    for method in ("sd", "dustin", "h2o"):
        assert evaluate(tiny_pair, config, data, alone, *methods(method)).code == 0
    for room, times in ((1 << 30, 1), (1 << 20, 1), (1 << 10, 3)):
        passes.clear()
        monkeypatch.setattr(shared_prompts, "CPU_BYTES", room)
        run = tmp_path / str(room)
        assert evaluate(tiny_pair, config, data, run, *methods("sd", "dustin", "h2o")).code == 0
        assert len(passes) == 4 * 2 * times, room
        for cell in ("sd", "dustin-k64", "h2o-k64"):
            assert rows_of(alone, cell) == rows_of(run, cell), room


def test_every_method_is_scored_on_the_same_items(
    tiny_pair: TinyPair, config: Path, data: Path, tmp_path: Path
) -> None:
    options = [*methods(*METHODS), "--budget", 32, "--budget", 64]
    outcome = evaluate(tiny_pair, config, data, tmp_path, *options, "--json")
    assert outcome.code == 0, outcome.err
    results = json.loads(outcome.out)
    assert results == read_json(tmp_path / "longbench" / "results.json")
    entries = {(e["method"], e["budget"], e["group"].get("task")): e for e in results["entries"]}
    assert len(entries) == len(results["entries"]) == 3 * (3 + 4 * 2)
    full = entries["vanilla", None, None]
    assert full["items"] == 4
    assert full["minus_vanilla"] is None
    assert full["tau"] == 1
    assert full["scores"]["score"]["documents"] == 3
    read = {name: entries[name, 32, None]["tokens_read"] for name in ("dustin", "dustin-t", "streaming")}
    assert all(20 < value <= 32 for value in read.values()), read
    assert entries["sd", None, None]["tokens_read"] > 200
    same = entries["sd", None, None]  # lossless: the same texts, so no difference on any item
    assert same["same_text"] == 4
    assert same["minus_vanilla"]["score"] == {"mean": 0, "low": 0, "high": 0, "method": "t", "documents": 3}
    part = entries["dustin", 64, "hotpotqa"]
    assert (part["items"], part["scores"]["score"]["documents"]) == (3, 2)
    difference = part["scores"]["score"]["mean"] - entries["vanilla", None, "hotpotqa"]["scores"]["score"]["mean"]
    assert part["minus_vanilla"]["score"]["mean"] == pytest.approx(difference)
    assert [(e["method"], e["budget"], e["tasks"]) for e in results["averages"]][:2] == [
        ("vanilla", None, 2),
        ("sd", None, 2),
    ]
    assert results["inputs"]["selection"]["m"] == 20
    text = (tmp_path / "longbench" / "results.md").read_text()
    assert text == answers.markdown(results) and "## Averages over tasks" in text
    frame = pandas.read_parquet(tmp_path / "longbench" / "rows.parquet")
    assert len(frame) == 4 * (3 + 4 * 2)
    assert {"method", "budget", "id", "task", "category", "text", "score_score", "tau", "prompt_tokens"} <= set(frame)
    assert frame.groupby("method").budget.nunique().to_dict() == {
        name: 0 if name in METHODS[:3] else 2 for name in METHODS
    }
    for name in (tiny_pair.target.parent, data.parent):
        assert str(name) not in json.dumps(results)


def test_rows_do_not_depend_on_the_batch(tiny_pair: TinyPair, config: Path, data: Path, tmp_path: Path) -> None:
    for batch in (1, 3):
        outcome = evaluate(tiny_pair, config, data, tmp_path / str(batch), *methods("dustin"), "--batch", batch)
        assert outcome.code == 0, outcome.err
    alone, together = (
        sorted(rows_of(tmp_path / name, "dustin-k64"), key=lambda row: str(row["id"])) for name in ("1", "3")
    )
    for one, other in zip(alone, together, strict=True):
        assert one | {"tokens_read": 0} == other | {"tokens_read": 0}
        assert one["tokens_read"] == pytest.approx(other["tokens_read"])


KILLED = """
import os, signal, sys
from dustin_profile.cli.app import main
from dustin_profile.evaluation import shared_prompts
from dustin_profile.evaluation.rows import RowFile

append, after = RowFile.append, int(sys.argv.pop(1))

def kill(file, row):
    append(file, row)
    if len(file.rows) == after and file.path.stem == "dustin-k64":
        os.kill(os.getpid(), signal.SIGKILL)

RowFile.append = kill
main()
"""


def test_a_killed_run_goes_on_with_what_it_has(tiny_pair: TinyPair, config: Path, data: Path, tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert evaluate(tiny_pair, config, data, undisturbed).code == 0
    command = ["eval", "longbench", config, *tiny_pair.options, "--data", data, "--run-dir", killed]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, "2", *map(str, command), "--max-length", "256", "--quiet"],
        capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    half = killed / "longbench" / "rows" / "dustin-k64.jsonl"
    assert len(rows_of(killed, "dustin-k64")) == 2
    assert not (killed / "longbench" / "results.json").exists()
    before = half.read_bytes()
    half.write_bytes(before + before[: len(before) // 3].rstrip(b"\n"))  # and a third row half written
    assert evaluate(tiny_pair, config, data, killed).code == 0
    assert half.read_bytes().startswith(before)
    for cell in ("vanilla", "dustin-k64"):
        assert rows_of(killed, cell) == rows_of(undisturbed, cell)


def test_an_interrupted_run_says_what_is_kept(
    tiny_pair: TinyPair, config: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = RowFile.append

    def interrupt(file: RowFile, row: dict[str, Any]) -> None:
        append(file, row)
        if len(file.rows) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(RowFile, "append", interrupt)
    outcome = evaluate(tiny_pair, config, data, tmp_path, *methods("sd"))
    assert outcome.code == INTERRUPTED
    assert outcome.error.startswith("interrupted; 3 of 4 items of sd were done and are kept: run the same command")
    monkeypatch.undo()
    assert evaluate(tiny_pair, config, data, tmp_path, *methods("sd")).code == 0
    assert [row["id"] for row in rows_of(tmp_path, "sd")][:2] == ["hotpotqa#0001", "hotpotqa#0002"]


def test_items_methods_and_budgets_may_come_in_later(
    tiny_pair: TinyPair, config: Path, data: Path, tmp_path: Path
) -> None:
    assert evaluate(tiny_pair, config, data, tmp_path, *methods("vanilla"), "--limit", 1).code == 0
    assert evaluate(tiny_pair, config, data, tmp_path, *methods("vanilla")).code == 0
    first = rows_of(tmp_path, "vanilla")
    assert [row["id"] for row in first] == ["hotpotqa#0001", "passage_count#0004", "hotpotqa#0002", "hotpotqa#0003"]
    outcome = evaluate(tiny_pair, config, data, tmp_path, *methods("streaming"), "--budget", 32)
    assert outcome.code == 0
    assert rows_of(tmp_path, "vanilla") == first
    lines = outcome.out.splitlines()
    assert any("vanilla" in line for line in lines)  # what was measured before is in the table
    results = read_json(tmp_path / "longbench" / "results.json")
    assert {entry["method"] for entry in results["entries"]} == {"vanilla", "streaming"}
    assert results["entries"][-1]["minus_vanilla"] is not None
    partly = evaluate(tiny_pair, config, data, tmp_path / "partly", *methods("vanilla"), "--limit", 1)
    assert partly.code == 0
    assert evaluate(tiny_pair, config, data, tmp_path / "partly", *methods("sd")).code == 0
    results = read_json(tmp_path / "partly" / "longbench" / "results.json")
    assert {entry["method"] for entry in results["entries"]} == {"sd"}


def test_results_of_different_runs_are_not_mixed(tiny_pair: TinyPair, config: Path, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert evaluate(tiny_pair, config, data, run, *methods("vanilla")).code == 0
    folder = run / "longbench"
    for options, field in (
        (["--max-length", 128], "items.max_length = 256, now 128"),
        (["--batch", 2], "batch = 1, now 2"),
        (["--dtype", "float64"], "dtype = float32, now float64"),
    ):
        outcome = evaluate(tiny_pair, config, data, run, *methods("vanilla"), *options)
        assert outcome.code == CONFLICT
        assert outcome.error.startswith(f"{folder}: holds results of {field}; they would be mixed"), outcome.error
    other = write(tmp_path / "rows.jsonl", entry(1), entry(2), entry(1, input="And how?"))
    outcome = evaluate(tiny_pair, config, other, run, *methods("vanilla"))
    assert outcome.code == CONFLICT
    assert "vanilla.jsonl: item hotpotqa#0003 was another one" in outcome.error
    (folder / "rows" / "vanilla.jsonl").write_text('{"id": 3}\n')
    outcome = evaluate(tiny_pair, config, data, run, *methods("vanilla"))
    assert (outcome.code, "vanilla.jsonl:1: is not a result" in outcome.error) == (MISSING, True)


def test_what_cannot_run_is_refused_before_any_work(
    tiny_pair: TinyPair, config: Path, data: Path, tmp_path: Path
) -> None:
    for options, code, message in (
        (["--method", "dustn"], USAGE, "--method dustn: unknown (known: vanilla"),
        (["--budget", 8], USAGE, "--budget: budget: 8 leaves no token to choose"),
        (["--task", "hotpot"], USAGE, "--task hotpot: no English task of LongBench; did you mean 'hotpotqa'?"),
        (["--task", "lcc"], MISSING, f"--data {data}: has no row of lcc"),
        (["--template", "chat"], USAGE, "--template chat: the tokenizer has no chat template"),
        (["--max-length", 3], USAGE, "--max-length 3: must be at least 16"),
    ):
        outcome = evaluate(tiny_pair, config, data, tmp_path / "run", *options)
        assert (outcome.code, outcome.out) == (code, ""), outcome.err
        assert outcome.error.startswith(message)
    assert not list(tmp_path.rglob("*.jsonl"))
    long = write(tmp_path / "long.jsonl", entry(1, context=topics()[:60_000]))
    outcome = evaluate(tiny_pair, config, long, tmp_path / "run", "--max-length", 5000)
    assert outcome.code == CAPACITY
    assert outcome.error.startswith("item hotpotqa#0001 with its output: ")
    assert "exceed the model's context of 4096" in outcome.error


def test_m_is_cut_to_what_a_small_budget_leaves() -> None:
    chosen = Selection(
        budget=128, sink=4, window=16, m=99, history=LayerHeads(layer=2, heads=(0,)), lookahead=(LAYER_1,)
    )
    assert [changed(chosen, k, None).m for k in (256, 128, 64, 21)] == [198, 99, 44, 1]  # 64: 49 and 20 exceed it
    assert changed(chosen, None, None) == chosen


def test_a_text_ends_at_the_first_stop_string_behind_leading_line_breaks() -> None:
    assert end_of("\n\nAnn met Bob\nDialogue", ("\n",)) == 13
    assert end_of("Ann", ("\n",)) is None
    assert end_of("one. two; three", (";", ".")) == 3
    assert end_of("", ()) is None


def test_cells_have_names_that_are_read_back() -> None:
    for cell in (Cell("vanilla", None), Cell("dustin-t", 512)):
        assert Cell.of(cell.name) == cell
    for name in ("vanilla-k3", "dustin", "other-k4", "dustin-kx", ""):
        assert Cell.of(name) is None


def test_items_are_joined_while_they_may_be_equally_long(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Item(str(n), "", [0] * 10, new, (), {}, None) for n, new in enumerate((5, 5, 5, 7))]
    assert [len(chunk) for chunk in chunks(items)] == [3, 1]
    monkeypatch.setattr("dustin_profile.evaluation.runner.CHUNK_TOKENS", 25)
    assert [len(chunk) for chunk in chunks(items)] == [2, 1, 1]
    assert list(chunks([])) == []
