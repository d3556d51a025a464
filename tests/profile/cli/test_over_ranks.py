"""`srh`, `trace` and `search` in two processes: one's files to the byte, and what ends both of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from commands import Outcome
from profiling_ranks import (
    CAPACITY,
    CONFLICT,
    DOCUMENTS,
    MISSING,
    NOTHING,
    OK,
    PEER,
    USAGE,
    command,
    content,
    full_disk,
    kill_at_second,
    not_finite,
    profile,
)
from rank_pool import RankPool
from tiny_pair import TinyPair

from dustin_profile.rundir import locked
from dustin_profile.srh import stage as srh_stage
from dustin_profile.traces.store import TraceStore
from dustin_runtime.errors import CapacityError, DustinError
from dustin_runtime.files import read_json
from dustin_runtime.parallel.ranks import ALONE, joined


@pytest.fixture(scope="module")
def alone(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of the same search."""
    run = tmp_path_factory.mktemp("alone") / "run"
    assert profile(command(tiny_pair, "search", run, *DOCUMENTS)).code == OK
    return run


@pytest.fixture
def mortal_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def test_two_processes_make_what_one_does_and_the_first_says_so(
    tiny_pair: TinyPair, alone: Path, two_ranks: RankPool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for name in ("srh", "trace", "search"):
        options = [] if name == "srh" else DOCUMENTS
        first, second = two_ranks(profile, command(tiny_pair, name, run, *options))
        assert first.code == OK, first.err
        assert first.out
        assert second == Outcome(OK, "", "")
    assert content(run) == content(alone)
    priced, silent = two_ranks(profile, command(tiny_pair, "search", run, "--dry-run"))
    assert (priced.code, silent) == (OK, Outcome(OK, "", ""))
    assert "trace" in priced.out


def test_more_ranks_than_fit_evenly_started_by_torchrun(tiny_pair: TinyPair, alone: Path, tmp_path: Path) -> None:
    """Six prompts over four."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    arguments = ["-m", "dustin_profile", *map(str, command(tiny_pair, "srh", tmp_path / "run"))]
    done = subprocess.run([*start, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == OK, done.stderr
    assert done.stdout.count("target: tiny-target, 6 of 6 needles accepted") == 1
    found, expected = content(tmp_path / "run"), content(alone)
    shared = {name for name in expected if name.startswith("srh/") and not name.endswith(".png")}
    assert {name: found[name] for name in shared} == {name: expected[name] for name in shared}


def test_two_processes_stop_at_the_same_prompts(tiny_pair: TinyPair, two_ranks: RankPool, tmp_path: Path) -> None:
    options = ["--needle-count", 4, "--stop-when-stable", "--stable-overlap", 0.01, "--least-prompts", 3]
    one = profile(command(tiny_pair, "srh", tmp_path / "one", *options))
    first, second = two_ranks(profile, command(tiny_pair, "srh", tmp_path / "two", *options))
    assert (one.code, first.code, second) == (OK, OK, Outcome(OK, "", ""))
    assert "target: 4 of 8 prompts used; overlap of halves " in first.err
    assert content(tmp_path / "two") == content(tmp_path / "one")


def test_two_processes_stop_at_the_same_documents(tiny_pair: TinyPair, two_ranks: RankPool, tmp_path: Path) -> None:
    """And two whose disk is full on the way are continued by one."""
    options = ["--documents", 14, "--stop-when-decided", "--decided-within", 0.9, "--least-documents", 7]
    one = profile(command(tiny_pair, "search", tmp_path / "one", *options))
    first, second = two_ranks(profile, command(tiny_pair, "search", tmp_path / "two", *options))
    assert (one.code, first.code, second) == (OK, OK, Outcome(OK, "", ""))
    assert "traces: 8 of 14 documents used; other layers or m could gain 0." in first.err
    results = read_json(tmp_path / "two" / "results.json")
    assert sum(map(len, results["documents"].values())) == results["stopping"]["used_documents"] == 8
    assert "Tracing stopped after 8 of 14." in (tmp_path / "two" / "results.md").read_text()
    assert content(tmp_path / "two") == content(tmp_path / "one")
    first, _ = two_ranks(profile, command(tiny_pair, "search", tmp_path / "cut", *options), full_disk)
    assert first.code == CAPACITY
    assert profile(command(tiny_pair, "search", tmp_path / "cut", *options)).code == OK
    assert content(tmp_path / "cut") == content(tmp_path / "one")
    # Without the option the rest follows.
    whole = profile(command(tiny_pair, "trace", tmp_path / "two", "--documents", 14, "--json"))
    assert json.loads(whole.out)["documents"] == 14 and "stopping" not in json.loads(whole.out)


def test_a_rank_that_is_killed_ends_the_other_and_any_number_goes_on(
    tiny_pair: TinyPair, alone: Path, two_ranks: RankPool, mortal_ranks: RankPool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = command(tiny_pair, "search", run, *DOCUMENTS)
    mortal_ranks.start(profile, arguments, kill_at_second)
    first = mortal_ranks.finish(0)
    assert first.code == PEER
    assert first.error.startswith("another rank has ended")
    stamps = {path.name: path.stat().st_mtime_ns for path in (run / "traces").glob("*.safetensors")}
    assert len(stamps) == 3  # two of the first round, and the one that rank 0 was at
    copied = tmp_path / "copied"
    shutil.copytree(run, copied)
    assert profile(command(tiny_pair, "search", copied, *DOCUMENTS)).code == OK
    assert [outcome.code for outcome in two_ranks(profile, arguments)] == [OK, OK]
    for ended in (copied, run):
        assert content(ended) == content(alone)
        assert {name: (ended / "traces" / name).stat().st_mtime_ns for name in stamps} == stamps


def no_memory() -> Any:
    return mock.patch.object(srh_stage, "_entry", mock.Mock(side_effect=MemoryError))


@pytest.mark.parametrize(
    ("spoil", "code", "message"),
    [
        (full_disk, CAPACITY, "traces/00001.safetensors: no space left to write it; free some and run"),
        (no_memory, CAPACITY, "out of memory: lower the context"),
        (not_finite, NOTHING, "attention is not finite; try --dtype float32"),
    ],
)
def test_what_goes_wrong_on_one_rank_ends_all_with_one_line_and_loses_nothing(
    spoil: Callable[[], Any],
    code: int,
    message: str,
    tiny_pair: TinyPair,
    alone: Path,
    two_ranks: RankPool,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    arguments = command(tiny_pair, "search", run, *DOCUMENTS)
    first, second = two_ranks(profile, arguments, spoil)
    assert first.code == code, first.err
    assert first.error.startswith("rank 1: ") and message in first.error
    assert second == Outcome(code, "", "")
    written = {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")}
    assert len(written) == (0 if spoil is no_memory else 1)
    assert [outcome.code for outcome in two_ranks(profile, arguments)] == [OK, OK]
    assert content(run) == content(alone)
    assert {path: path.stat().st_mtime_ns for path in written} == written


def run_as_told(arguments: list[list[Any]]) -> Outcome:
    return profile(arguments[int(os.environ["RANK"])])


def test_ranks_that_were_given_something_else_end_with_its_name(
    tiny_pair: TinyPair, two_ranks: RankPool, tmp_path: Path
) -> None:
    same = command(tiny_pair, "trace", tmp_path / "run")
    for options, name, code in (
        (["--needle-count", 2], "ranks differ in --needle-count: 3 on rank 0, 2 on rank 1", CONFLICT),
        (["--windows", 3], "ranks differ in --windows: 4 on rank 0, 3 on rank 1", CONFLICT),
        (["--windows", 0], "rank 1: --windows 0: must be at least 1", USAGE),
    ):
        first, second = two_ranks(run_as_told, [same, [*same, *options]])
        assert (first.code, first.error) == (code, name)
        assert second == Outcome(code, "", "")
    assert not (tmp_path / "run").exists()


def test_files_of_one_name_must_be_the_same(tiny_pair: TinyPair, two_ranks: RankPool, tmp_path: Path) -> None:
    """As on hosts with disks of their own: documents, then the run directory."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "text.txt").write_text(f"Some words of text {rank}. " * 400)
    arguments = command(tiny_pair, "trace", tmp_path / "run", "--data", "text.txt", "--documents", 1)
    first, second = two_ranks(profile, arguments, None, tmp_path)
    assert (first.code, second) == (CONFLICT, Outcome(CONFLICT, "", "")), first
    assert first.error.startswith("ranks differ in traces' data_sha256: ")
    first, second = two_ranks(profile, command(tiny_pair, "srh", "run"), None, tmp_path)
    assert first.error == "rank 1: --run-dir run: is another one here; give a folder that all ranks share"
    assert (first.code, second) == (MISSING, Outcome(MISSING, "", ""))


def test_a_run_directory_in_use_is_said_once(tiny_pair: TinyPair, two_ranks: RankPool, tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        first, second = two_ranks(profile, command(tiny_pair, "srh", tmp_path / "run"))
    assert first.error == f"--run-dir {tmp_path / 'run'}: another dustin-profile is working in it"
    assert (first.code, second) == (CONFLICT, Outcome(CONFLICT, "", ""))


@pytest.mark.parametrize("name", ["check", "eval", "pairs", "report"])
def test_commands_of_one_process_are_refused(name: str, two_ranks: RankPool) -> None:
    first, second = two_ranks(profile, [name, "x"])
    assert first.error == f"{name}: runs in one process; under torchrun run one of srh, trace, search"
    assert (first.code, second) == (USAGE, Outcome(USAGE, "", ""))


def test_one_gpu_cannot_be_shared(tiny_pair: TinyPair, two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks(profile, command(tiny_pair, "srh", tmp_path / "run", "--device", "cuda:0"))
    assert first.error == "--device cuda:0: each of 2 ranks needs its own; give cuda or cpu"
    assert (first.code, second) == (USAGE, Outcome(USAGE, "", ""))


def test_what_processes_said_of_documents_is_joined_even_if_joining_was_cut_short(tmp_path: Path) -> None:
    documents = [{"id": f"d{n}", "source": "d", "sha256": str(n)} for n in range(3)]
    entries = TraceStore.open(tmp_path, {}, documents).documents
    for index in (2, 1):
        TraceStore(tmp_path, [dict(entry) for entry in entries], shared=True).skip(index, f"short {index}")
    said = tmp_path / "00002.json"
    before = said.read_bytes()
    for _ in range(2):
        joined_now = TraceStore.open(tmp_path, {}, documents)
        assert joined_now.pending() == [0]
        assert [entry["skipped"] for entry in TraceStore.read(tmp_path).documents] == [None, "short 1", "short 2"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["inputs.json", "manifest.json"]
        said.write_bytes(before)  # killed before it was removed


def once(fails: bool) -> tuple[int | str, bool]:
    """On a rank: what rank 0 alone does."""

    def work() -> int:
        if fails:
            raise CapacityError("full")
        return os.getpid()

    with joined() as ranks:
        try:
            return ranks.once(work), False
        except DustinError as error:
            return str(error), error.quiet


def test_what_the_first_rank_does_alone_is_known_to_all(two_ranks: RankPool) -> None:
    assert two_ranks(once, False) == [(two_ranks.processes[0].pid, False)] * 2
    assert two_ranks(once, True) == [("full", False), ("full", True)]
    assert ALONE.once(os.getpid) == os.getpid()
