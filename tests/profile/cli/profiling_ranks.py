"""`srh`, `trace` and `search` as ranks run them, what they leave, and what can go wrong on one of them."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from commands import SEARCH, SRH, TRACE, Outcome, dustin_profile
from ruamel.yaml import YAML
from tiny_pair import TinyPair

from dustin_profile import plots
from dustin_profile.traces.collect import Collector
from dustin_runtime.files import read_json, write_with

OK, USAGE, CONFLICT, CAPACITY, MISSING, NOTHING, PEER = 0, 2, 4, 5, 6, 8, 9
TIMES = {"seconds.json", "search/study.log"}
DOCUMENTS = ["--documents", "6"]


def save_plainly(figure: object, path: Path) -> None:
    write_with(path, lambda temporary: temporary.write_bytes(b"PNG"))


def profile(
    arguments: list[Any], spoil: Callable[[], Any] | None = None, folders: Path | None = None, spoiled: int = 1
) -> Outcome:
    """In this process or on a rank: `dustin-profile`, perhaps with something that goes wrong on one rank.

    Args:
        folders: holds a working directory per rank.
    """
    one = os.environ.get("RANK") == str(spoiled)
    before = Path.cwd()
    with mock.patch.object(plots, "save", save_plainly), (spoil if one and spoil else mock.MagicMock)():
        if folders:
            os.chdir(folders / os.environ["RANK"])
        try:
            return dustin_profile(*arguments)
        finally:
            os.chdir(before)


def command(pair: TinyPair, name: str, run: Path | str, *options: object) -> list[Any]:
    settings = {"srh": SRH, "trace": TRACE, "search": SEARCH}[name]
    return [name, *pair.options, "--run-dir", run, *settings, *options]


def content(run: Path) -> dict[str, Any]:
    """What a run directory holds, times aside."""
    found: dict[str, Any] = {}
    for path in run.rglob("*"):
        name = str(path.relative_to(run))
        if path.is_dir() or name in TIMES:
            continue
        if name in ("config.yaml", "results.json"):
            found[name] = YAML(typ="safe").load(path) if path.suffix == ".yaml" else read_json(path)
            del found[name]["provenance"]["stage_seconds"]
        else:
            found[name] = path.read_bytes()
    return found


def kill_at_second() -> Any:
    """The rank is gone in the middle of its second document."""
    windows, seen = Collector._windows, []

    def traced(self: Collector, *arguments: Any) -> Any:
        seen.append(arguments)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return windows(self, *arguments)

    return mock.patch.object(Collector, "_windows", traced)


def full_disk() -> Any:
    replace = Path.replace

    def full(path: Path, target: Path) -> Path:
        if str(target).endswith(".safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(path, target)

    return mock.patch.object(Path, "replace", full)


def not_finite() -> Any:
    windows = Collector._windows

    def broken(self: Collector, *arguments: Any) -> Any:
        self.target.weights.layers[1].down[0, 0] = float("nan")
        return windows(self, *arguments)

    return mock.patch.object(Collector, "_windows", broken)
