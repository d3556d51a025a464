"""Ending a process that waits for its GPU while the GPU waits for a rank that will not come.

A sum on the device spins until every rank has come. A rank that has died leaves the others spinning, inside a CUDA
graph unseen by NCCL's watchdog, and the host in a wait that nothing ends but the end of the process. A thread looks
once a second how that wait does; the waits themselves only say that they begin and end.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dustin_runtime.errors import PeerError

EVERY = 1.0
"""Seconds between two looks."""
LONG = 1800.0
"""Seconds for what is more than a step: a prefill, a capture, a measurement."""


@dataclass(frozen=True)
class Process:
    """A process of this host, told from a later one with its number by when it started."""

    pid: int
    started: str

    @classmethod
    def here(cls) -> Process:
        """This one."""
        return cls(os.getpid(), _state(os.getpid())[1])

    def ended(self) -> bool:
        """Whether it has; also of one that is not to be seen from here."""
        state, started = _state(self.pid)
        return state in ("", "Z", "X") or started != self.started


def _state(pid: int) -> tuple[str, str]:
    """Of /proc/PID/stat the state and the start; empty if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


@dataclass(frozen=True, eq=False)
class _Wait:
    seconds: float


class Watch:
    """The waits of one rank.

    Args:
        ended: by rank, whether it has ended; of those that can be told. Others are given up by time alone.
        seconds: that a step may take.
        give_up: what ends this process, with the text of the error; it is called by a thread.
    """

    def __init__(
        self,
        rank: int,
        ended: Mapping[int, Callable[[], bool]],
        seconds: float,
        give_up: Callable[[str], None] | None = None,
    ) -> None:
        self._rank = rank
        self._ended = ended
        self._seconds = seconds
        self._give_up = give_up or _exit
        self._wait: _Wait | None = None
        self._seen: _Wait | None = None
        self._looks = 0
        self._suspects: set[int] = set()
        self._thread: threading.Thread | None = None

    @classmethod
    def over(cls, rank: int, processes: Sequence[Process], seconds: float) -> Watch:
        """Of a run whose ranks are these processes. Those of other hosts are not to be seen, and not looked for."""
        others = {other: process for other, process in enumerate(processes) if other != rank}
        return cls(rank, {other: process.ended for other, process in others.items() if not process.ended()}, seconds)

    @contextmanager
    def waiting(self, seconds: float | None = None) -> Iterator[None]:
        """Wait within for the GPU, as long as a step may take or so many seconds; no longer, and for no dead rank."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_on, name="watch", daemon=True)
            self._thread.start()
        outer = self._wait
        self._wait = _Wait(self._seconds if seconds is None else seconds)
        try:
            yield
        finally:
            self._wait = outer

    def look(self) -> str | None:
        """Look once: why the wait under way is hopeless, or None.

        Looks are counted instead of time, which goes on while this process is stopped. A rank that has ended has to be
        found so twice in one wait: it may have told this one in between.
        """
        wait = self._wait
        if wait is not self._seen:
            self._seen, self._looks, self._suspects = wait, 0, set()
        if wait is None:
            return None
        self._looks += 1
        gone = {rank for rank, ended in self._ended.items() if ended()}
        if sure := gone & self._suspects:
            return f"rank {min(sure)} has ended"
        self._suspects = gone
        if self._looks * EVERY > wait.seconds:
            return f"no answer on the GPU for {wait.seconds:.0f} s"
        return None

    def _look_on(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(EVERY)
            if reason := self.look():
                self._give_up(f"rank {self._rank}: {lost(reason)}" if self._rank else lost(reason))
                return


def lost(reason: str) -> str:
    """What is said of a rank that does not come."""
    return f"another rank has ended or does not answer ({reason}); mend it and start all again"


def _exit(text: str) -> None:
    """End this process at once: what waits for the GPU cannot be interrupted."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        print(f"error: {text}", file=sys.stderr, flush=True)
    os._exit(PeerError.exit_code)
