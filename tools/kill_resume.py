"""Kill a search with SIGKILL at random moments of every stage, resume it, and compare with an undisturbed run.

python tools/kill_resume.py                          two tiny random models, 20 kills
python tools/kill_resume.py --pair smollm2 -- --offline --context 1024
                                                     another pair; what follows `--` is added to the search

Every process is a fork of this one, so that libraries are imported once; it is killed like any other.
Exit code 0: every stage was hit and the results are the same.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML

from dustin_runtime.files import read_json

SETTINGS = [
    *("--mode", "forced", "--length", "256", "--length", "320", "--needle-count", "2"),
    *("--depth-at", "0", "--depth-at", "0.2", "--depth-at", "0.4", "--depth-at", "0.6", "--depth-at", "0.8"),
    *("--context", "256", "--documents", "12", "--continuation", "24", "--windows", "4"),
    *("--budget", "64", "--draft-layers", "2"),
]
STAGES = {
    "srh target": ("loading target", ("srh/target/*-*.json",)),
    "srh draft": ("target: ", ("srh/draft/*-*.json",)),
    "traces": ("draft: ", ("traces/*.safetensors",)),
    "search": ("draft: ", ("search/study.log", "results.json", "results.md", "arr.png", "config.yaml")),
}
"""What is said on stderr before a stage works, and the files that it adds one by one."""
TIMES = {"seconds.json", "search/study.log"}
"""Files that are about times; two more are compared without theirs."""


class Search:
    """One process of the search."""

    def __init__(self, run: Path, options: list[str]) -> None:
        self.run = run
        self.before = files(run)
        self.lines: list[str] = []
        read, write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.dup2(write, sys.stderr.fileno())
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            os._exit(command(["search", "--run-dir", str(run), *options]))
        os.close(write)
        self.reader = threading.Thread(target=self._read, args=(read,))
        self.reader.start()

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as stream:
            for line in stream:
                self.lines.append(line)

    def wait(self) -> int:
        """Its exit code; negative for a signal."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.reader.join()
        return code

    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def written(self, stage: str) -> int:
        """How many files of a stage it has written; -1 if it has not come to it."""
        said, patterns = STAGES[stage]
        if stage_of(self.run) != stage or not any(line.startswith(said) for line in self.lines):
            return -1
        now = files(self.run)
        return sum(
            self.before.get(name) != stamp and any(Path(name).match(pattern) for pattern in patterns)
            for name, stamp in now.items()
        )


def command(arguments: list[str]) -> int:
    """Run `dustin-profile` in this process; its exit code."""
    from dustin_profile.cli.app import main

    sys.argv = ["dustin-profile", *arguments]
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.stderr.flush()
    return 0


def files(run: Path) -> dict[str, int]:
    """Whole files of a run with the time at which each was put in its place."""
    found = {}
    for path in run.rglob("*"):
        try:
            if path.is_file() and not path.name.startswith("."):
                found[str(path.relative_to(run))] = path.stat().st_mtime_ns
        except FileNotFoundError:
            continue
    return found


def temporaries(run: Path) -> list[str]:
    """Files that are being written, or were when their process was killed."""
    return [path.name for path in run.rglob(".*.tmp*")]


def stage_of(run: Path) -> str:
    """The stage that a run is in, by what exists."""
    for side in ("target", "draft"):
        if not (run / "srh" / f"heads-{side}.json").exists():
            return f"srh {side}"
    manifest = run / "traces" / "manifest.json"
    if not manifest.exists():
        return "traces"
    decided = (run / "traces" / "stopping.json").exists()
    if not decided and any(entry["file"] is None for entry in read_json(manifest)["documents"]):
        return "traces"
    return "search"


def pause(run: Path, stage: str) -> float:
    """Typical seconds between two files of a stage."""
    stamps = sorted(stamp for name, stamp in files(run).items() if any(Path(name).match(p) for p in STAGES[stage][1]))
    return statistics.median(after - before for before, after in pairwise(stamps)) / 1e9


def kill(run: Path, options: list[str], stage: str, pauses: dict[str, float], draw: random.Random) -> Search | None:
    """Start a search and kill it in `stage`: at any moment, or while it writes a file. None if it ended first."""
    search = Search(run, options)
    units = draw.randrange(4 if stage == "search" else 2)
    writing = draw.random() < 0.5
    while not search.ended() and search.written(stage) < units:
        time.sleep(0.001)
    if writing:
        while not (search.ended() or temporaries(run)):
            pass
    else:
        time.sleep(draw.uniform(0, pauses[stage]))
    if search.ended():
        if code := search.wait():
            raise SystemExit(f"the search failed with exit code {code}:\n{''.join(search.lines)}")
        return None
    os.kill(search.pid, signal.SIGKILL)
    search.wait()
    return search


def differences(one: Path, other: Path) -> dict[str, bool]:
    """Every file of either run, and whether both have the same in it, times aside."""
    names = sorted(files(one).keys() | files(other).keys())
    return {name: same(one / name, other / name, name) for name in names}


def same(one: Path, other: Path, name: str) -> bool:
    if not (one.exists() and other.exists()):
        return False
    if name in ("config.yaml", "results.json"):
        return bool(timeless(one) == timeless(other))
    return name in TIMES or one.read_bytes() == other.read_bytes()


def timeless(path: Path) -> Any:
    data = YAML(typ="safe").load(path) if path.suffix == ".yaml" else read_json(path)
    del data["provenance"]["stage_seconds"]
    return data


def tiny_pair(folder: Path) -> list[str]:
    """Write two random models, in a process of its own; the options that name them."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from tiny_pair import TinyPair, train_tokenizer, write_pair

    if not (pid := os.fork()):  # threads of tokenizers and torch would not survive the forks to come
        write_pair(folder, train_tokenizer())
        os._exit(0)
    os.waitpid(pid, 0)
    return TinyPair(folder / "tiny-target", folder / "tiny-draft").options


def imported() -> None:
    """Import what a search needs, once for all processes."""
    for name in ("dustin_profile.pipeline", "dustin_profile.search.stage", "optuna.samplers", "matplotlib.figure"):
        import_module(name)
    import_module("transformers").PreTrainedTokenizerFast  # noqa: B018 - imported when first asked for


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair")
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="an empty folder to keep the runs in; default: a temporary one")
    parser.add_argument("options", nargs="*", help="more options of dustin-profile search, after --")
    arguments = parser.parse_args()
    os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    imported()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        named = [(f"--{name}", getattr(arguments, name)) for name in ("pair", "target", "draft")]
        models = [part for flag, value in named if value for part in (flag, value)] or tiny_pair(work)
        options = [*models, *SETTINGS, *arguments.options]
        return test(work, options, arguments.kills, random.Random(arguments.seed))


def test(work: Path, options: list[str], kills: int, draw: random.Random) -> int:
    """Run, kill, resume, compare, print; the exit code."""
    console = Console(width=120)
    whole, cut = work / "undisturbed", work / "killed"
    if code := (undisturbed := Search(whole, options)).wait():
        print("".join(undisturbed.lines), file=sys.stderr)
        return code
    pauses = {stage: pause(whole, stage) for stage in STAGES}
    table = Table("kill", "aimed at", "hit", "files of that stage", "of the run", "half-written", box=None)
    hit = set()
    for number in range(kills):
        aim = list(STAGES)[number * len(STAGES) // kills]
        killed = kill(cut, options, aim, pauses, draw)
        if killed is None:
            table.add_row(str(number + 1), aim, "too late: it had ended")
            continue
        stage = stage_of(cut)
        hit.add(stage)
        count = str(max(killed.written(stage), 0))
        table.add_row(str(number + 1), aim, stage, count, str(len(files(cut))), ", ".join(temporaries(cut)) or "-")
    console.print(table)
    if code := (last := Search(cut, options)).wait():
        print("".join(last.lines), file=sys.stderr)
        return code
    found = differences(whole, cut)
    left = temporaries(cut)
    verdict = Table("file", "undisturbed against killed and resumed", box=None)
    for name, equal in found.items():
        verdict.add_row(name, "DIFFERENT" if not equal else "not compared: times" if name in TIMES else "equal")
    console.print(verdict)
    missed = set(STAGES) - hit if kills >= len(STAGES) else set()
    for problem in (*(f"{stage}: never hit" for stage in missed), *(f"{name}: left behind" for name in left)):
        print(problem)
    return int(not all(found.values()) or bool(missed) or bool(left))


if __name__ == "__main__":
    sys.exit(main())
