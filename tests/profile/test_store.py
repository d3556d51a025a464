"""Traces on disk, the run directory around them, and files that are whole or absent."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dustin_profile.rundir import changed, first_difference, locked, open_stage
from dustin_profile.traces.store import TraceStore
from dustin_profile.traces.windows import Windows
from dustin_runtime.errors import CapacityError, ConflictError, MissingError, UsageError
from dustin_runtime.files import (
    atomic_path,
    clear_temporaries,
    read_json,
    require_writable,
    temporary_sibling,
    write_json,
    write_text,
)

INPUTS = {"context": 64, "heads": {"history": {"0": [1, 2]}}}
DOCUMENTS = [{"id": f"book#{n}", "source": "book", "sha256": str(n)} for n in range(3)]
FIELDS = ("prefix", "truth", "tail", "history", "lookahead")


def windows(seed: int, tokens: int = 20) -> Windows:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.rand(2, tokens, generator=generator)
    return Windows(
        f"book#{seed}",
        torch.tensor([tokens - 5, tokens]),
        truth,
        truth.sum(1),
        torch.rand(4, 2, tokens, generator=generator).half(),
        torch.rand(3, 2, tokens, generator=generator).half().transpose(0, 1).contiguous().transpose(0, 1),
    )


def filled(folder: Path, count: int = 3) -> TraceStore:
    store = TraceStore.open(folder, INPUTS, DOCUMENTS)
    for index in range(count):
        store.add(index, windows(index))
    return store


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def full_disk(*arguments: Any, **named: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_manifest_is_there_before_any_shard(tmp_path: Path) -> None:
    store = TraceStore.open(tmp_path, INPUTS, DOCUMENTS)
    assert names(tmp_path) == ["inputs.json", "manifest.json"]
    assert read_json(tmp_path / "inputs.json") == INPUTS
    listed = read_json(tmp_path / "manifest.json")["documents"]
    assert [entry["id"] for entry in listed] == ["book#0", "book#1", "book#2"]
    assert all(entry["file"] is None for entry in listed)
    assert store.pending() == [0, 1, 2]
    assert len(store) == 0


def test_what_is_stored_is_read_back(tmp_path: Path) -> None:
    store = filled(tmp_path)
    for opened in (store, TraceStore.open(tmp_path, INPUTS, DOCUMENTS)):
        assert opened.pending() == []
        assert len(opened) == 3
        for index in range(3):
            assert opened[index].document == f"book#{index}"
            for field in FIELDS:
                found, expected = getattr(opened[index], field), getattr(windows(index), field)
                assert found.dtype == expected.dtype and torch.equal(found, expected), field
    with pytest.raises(IndexError):
        store[3]


def test_documents_are_in_the_manifests_order_whatever_was_stored_first(tmp_path: Path) -> None:
    store = TraceStore.open(tmp_path, INPUTS, DOCUMENTS)
    for index in (2, 0):
        store.add(index, windows(index))
    assert [entry["id"] for entry in store.entries] == ["book#0", "book#2"]
    assert [store[index].document for index in range(2)] == ["book#0", "book#2"]
    assert store.pending() == [1]
    chosen = store.subset(["book#2", "book#1", "elsewhere"])
    assert [chosen[index].document for index in range(len(chosen))] == ["book#2"]
    assert [entry["windows"] for entry in chosen.entries] == [2]


def test_a_document_without_windows_is_remembered(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    store.skip(1, "too short")
    again = TraceStore.open(tmp_path, INPUTS, DOCUMENTS)
    assert again.pending() == [2]
    assert [entry["id"] for entry in again.entries] == ["book#0"]


def test_a_shard_that_is_cut_gone_or_unnamed_is_collected_again(tmp_path: Path) -> None:
    filled(tmp_path)
    cut = tmp_path / "00001.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    (tmp_path / "00002.safetensors").unlink()
    again = TraceStore.open(tmp_path, INPUTS, DOCUMENTS)
    assert again.pending() == [1, 2]
    assert [entry["id"] for entry in again.entries] == ["book#0"]
    again.add(1, windows(1))
    assert torch.equal(again[1].truth, windows(1).truth)

    # Killed between the shard and the manifest: the shard is there, nothing says so.
    manifest = read_json(tmp_path / "manifest.json")
    manifest["documents"][0]["file"] = None
    write_json(tmp_path / "manifest.json", manifest)
    assert 0 in TraceStore.open(tmp_path, INPUTS, DOCUMENTS).pending()


def test_a_damaged_shard_is_named_with_the_remedy(tmp_path: Path) -> None:
    store = filled(tmp_path)
    shard = tmp_path / "00001.safetensors"
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    again = TraceStore.open(tmp_path, INPUTS, DOCUMENTS)
    assert len(again) == 3  # its size is right; reading finds out
    for opened in (store, again):
        with pytest.raises(MissingError, match=r"00001\.safetensors: damaged .*delete it and run the same"):
            opened[1]
    shard.unlink()
    assert TraceStore.open(tmp_path, INPUTS, DOCUMENTS).pending() == [1]


@pytest.mark.parametrize("content", ["", "{", "[1, 2", "{}", '{"kind": "dustin-traces"}', "\udcff"])
def test_a_damaged_manifest_is_named(tmp_path: Path, content: str) -> None:
    filled(tmp_path)
    (tmp_path / "manifest.json").write_text(content, errors="surrogateescape")
    with pytest.raises(MissingError, match=r"manifest\.json: .*; delete the folder of traces and run the same"):
        TraceStore.read(tmp_path)
    with pytest.raises(MissingError, match=r"manifest\.json: .*; delete the folder of traces and run the same"):
        TraceStore.open(tmp_path, INPUTS, DOCUMENTS)


@pytest.mark.parametrize("when", ["shard", "manifest"])
def test_a_full_disk_leaves_what_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    store = filled(tmp_path, 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    method = "write_bytes" if when == "shard" else "write_text"

    def half(path: Path, content: Any, **named: Any) -> None:
        with path.open("wb") as handle:
            handle.write(b"half")
        full_disk()

    monkeypatch.setattr(Path, method, half)
    named = "00001.safetensors" if when == "shard" else "manifest.json"
    with pytest.raises(CapacityError, match=f"{named}: no space left to write it; free some and run the command again"):
        store.add(1, windows(1))
    monkeypatch.undo()
    now = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    now.pop("00001.safetensors", None)  # whole, if the manifest was the one that did not fit
    assert now == before
    again = TraceStore.open(tmp_path, INPUTS, DOCUMENTS)
    assert again.pending() == [1, 2]
    again.add(1, windows(1))
    assert torch.equal(again[1].lookahead, windows(1).lookahead)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        store = filled(tmp_path, 1)
        before = names(tmp_path)
        with pytest.raises(CapacityError, match=r"00001\.safetensors: no space left"):
            store.add(1, windows(1, tokens=4000))
        assert names(tmp_path) == before
        store.add(1, windows(1))
        assert torch.equal(store[1].truth, windows(1).truth)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_the_first_difference_is_a_leaf_with_both_values() -> None:
    before = {"a": 1, "b": {"c": [1, 2], "d": None}}
    assert first_difference(before, before) is None
    assert first_difference(before, before | {"a": 2}) == ("a", 1, 2)
    assert first_difference(before, {"a": 1, "b": {"c": [1, 3], "d": None}}) == ("b.c", [1, 2], [1, 3])
    assert first_difference(before, {"a": 1, "b": {"c": [1, 2]}, "e": 5}) == ("e", None, 5)
    assert first_difference(before, {"a": 1}) == ("b", before["b"], None)
    assert first_difference(1, 1.5, "tolerance") == ("tolerance", 1, 1.5)
    assert first_difference({"a": {}}, {"a": 3}) == ("a", {}, 3)


def test_what_is_missing_is_said_so() -> None:
    assert changed(("a.b", 1, 2), "made with") == "made with a.b = 1, now 2"
    assert changed(("rope", None, "x" * 99), "made with") == f"made without rope, now {'x' * 57}..."
    assert changed(("rope", 3, None), "measured with") == "measured with rope = 3, now without it"
    assert changed(("rope", None, 3), "of") == "without rope, now 3"


def test_other_inputs_are_refused_with_field_and_both_values(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    open_stage(folder, INPUTS, overwrite=False)
    (folder / "work").write_text("kept")
    open_stage(folder, dict(INPUTS), overwrite=True)  # the same inputs: nothing is discarded
    assert names(folder) == ["inputs.json", "work"]
    other = {"context": 64, "heads": {"history": {"0": [1, 3]}}}
    with pytest.raises(ConflictError) as caught:
        open_stage(folder, other, overwrite=False)
    what = f"{folder}: made with heads.history.0 = [1, 2], now [1, 3]: "
    assert str(caught.value) == what + "give another --run-dir, or --overwrite to discard it"
    assert names(folder) == ["inputs.json", "work"]
    open_stage(folder, other, overwrite=True)
    assert names(folder) == ["inputs.json"]
    assert read_json(folder / "inputs.json") == other
    assert names(tmp_path) == ["traces"]


def test_long_values_are_shortened_in_the_message(tmp_path: Path) -> None:
    open_stage(tmp_path / "s", {"depths": list(range(99))}, overwrite=False)
    with pytest.raises(ConflictError, match=r"depths = \[0, 1, .{40,60}\.\.\., now 3:"):
        open_stage(tmp_path / "s", {"depths": 3}, overwrite=False)


def test_discarding_that_is_cut_short_leaves_nothing_that_looks_done(tmp_path: Path) -> None:
    """Killed while old parts are deleted: the next run must not take the rest of them for its own."""
    folder = tmp_path / "traces"
    filled(folder)
    script = f"""
import os, pathlib, shutil
from dustin_profile import rundir
def killed(path):
    (pathlib.Path(path) / "inputs.json").unlink()  # any file may be the first to go
    os._exit(9)
shutil.rmtree = killed
rundir.open_stage(pathlib.Path({str(folder)!r}), {{"context": 128}}, overwrite=True)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 9
    assert TraceStore.open(folder, {"context": 128}, DOCUMENTS).pending() == [0, 1, 2]


def test_a_run_directory_has_one_owner(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with (
        locked(folder),
        pytest.raises(ConflictError, match=r"--run-dir .*run: another dustin-profile is working in it"),
    ):
        locked(folder).__enter__()
    with locked(folder):
        pass
    script = "import time; from pathlib import Path; from dustin_profile.rundir import locked\n"
    script += f"with locked(Path({str(folder)!r})): print('held', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout and other.stdout.readline() == "held\n"
        with pytest.raises(ConflictError):
            locked(folder).__enter__()
    finally:
        other.kill()
        other.wait()
    with locked(folder):  # a killed owner holds nothing
        pass


def test_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(MissingError, match=r"--run-dir .*: cannot be written"):
            locked(folder).__enter__()


def test_what_killed_processes_left_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    ours = [".manifest.json.4711.tmp", ".study.log.4711.tmp", ".study.log.4711.tmp.lock"]
    theirs = ["manifest.json", ".manifest.json.tmp", "manifest.json.4711.tmp", ".hidden", ".x.4711.tmpx", ".12.tmp"]
    for folder in (tmp_path, tmp_path / "traces", tmp_path / "srh" / "draft"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*ours, *theirs):
            (folder / name).write_text("x")
    (tmp_path / ".traces.4711.tmp" / "deep").mkdir(parents=True)
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / ".study.log.4711.tmp.lock").symlink_to(tmp_path / "search" / "nowhere")
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / ours[0]).write_text("not in a folder that runs write to")
    with locked(tmp_path):
        assert names(tmp_path / "traces") == names(tmp_path / "srh" / "draft") == sorted(theirs)
        assert names(tmp_path) == sorted([*theirs, ".lock", "traces", "srh", "search", "books"])
        assert names(tmp_path / "search") == []
        assert names(tmp_path / "books") == [ours[0]]
    clear_temporaries(tmp_path / "absent")


def write_half(path: Path, error: Exception) -> None:
    with atomic_path(path) as temporary:
        assert temporary == temporary_sibling(path)
        temporary.write_text("half")
        raise error


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match=r"--json .*pipe: is no regular file"):
        require_writable(pipe, "--json")
    with pytest.raises(MissingError, match="pipe: is no regular file"):
        write_text(pipe, "text")
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "value.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    with pytest.raises(RuntimeError):
        write_half(path, RuntimeError())
    assert read_json(path) == {"a": 1}
    assert names(path.parent) == ["value.json"]


@pytest.mark.parametrize(
    ("number", "expected", "message"),
    [
        (errno.ENOSPC, CapacityError, "no space left to write it; free some and run the command again"),
        (errno.EDQUOT, CapacityError, "no space left"),
        (errno.EFBIG, CapacityError, "no space left"),
        (errno.EACCES, MissingError, r"cannot be written \(Permission denied\)"),
        (errno.EROFS, MissingError, r"cannot be written \(Read-only file system\)"),
        (errno.EIO, MissingError, r"cannot be written \(Input/output error\)"),
    ],
)
def test_what_the_system_refuses_is_one_line(tmp_path: Path, number: int, expected: Any, message: str) -> None:
    path = tmp_path / "out.json"
    write_text(path, "old")
    with pytest.raises(expected, match=rf"out\.json: {message}"):
        write_half(path, OSError(number, os.strerror(number)))
    assert path.read_text() == "old"
    assert names(tmp_path) == ["out.json"]


def test_places_that_cannot_hold_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "x.json", tmp_path / "folder", tmp_path / ("n" * 300)):
        with pytest.raises(MissingError, match="cannot be written"):
            write_text(path, "x")
    assert names(tmp_path) == ["file", "folder"]


def test_json_is_readable_text_in_the_given_order(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"b": "é", "a": [1]})
    text = (tmp_path / "x.json").read_bytes()
    assert text.endswith(b"}\n")
    assert "é".encode() in text
    assert list(json.loads(text)) == ["b", "a"]


def test_discarding_a_stage_takes_the_emitted_config_along_and_refusing_does_not(tmp_path: Path) -> None:
    stage, config = tmp_path / "run" / "srh" / "target", tmp_path / "run" / "config.yaml"
    with locked(tmp_path / "run"):
        open_stage(stage, {"context": 1}, overwrite=False)
        config.write_text("emitted")
        open_stage(stage, {"context": 1}, overwrite=True)
        with pytest.raises(ConflictError, match="context"):
            open_stage(stage, {"context": 2}, overwrite=False)
        assert config.exists()
        open_stage(stage, {"context": 2}, overwrite=True)
        assert not config.exists()
