"""A rank that waits for its GPU is ended when another is gone, or after its time; not by what looks alike."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from split_models import SHAPES

from dustin_runtime.models.weights import random_decoder
from dustin_runtime.parallel import watch
from dustin_runtime.parallel.collectives import Collectives, everywhere
from dustin_runtime.parallel.ranks import joined
from dustin_runtime.parallel.watch import Process, Watch


class Others:
    """Other ranks, which may end."""

    def __init__(self) -> None:
        self.gone = False
        self.asked = 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.gone


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    monkeypatch.setattr(Watch, "_look_on", lambda self: None)  # looks are taken by hand
    return Others()


def test_a_dead_rank_ends_a_wait_and_nothing_else_does(others: Others) -> None:
    watched = Watch(0, {3: others}, 60)
    assert watched.look() is None and others.asked == 0
    with watched.waiting():
        assert [watched.look() for _ in range(50)] == [None] * 50
        others.gone = True
        assert [watched.look(), watched.look()] == [None, "rank 3 has ended"]
    assert watched.look() is None  # who does not wait learns of it by the next collective
    for _ in range(3):  # or between two waits
        with watched.waiting():
            assert watched.look() is None
    with watched.waiting():
        assert [watched.look(), watched.look()] == [None, "rank 3 has ended"]


def test_a_wait_has_its_own_time(others: Others) -> None:
    watched = Watch(0, {1: others}, 3)
    for _ in range(5):
        with watched.waiting():
            assert [watched.look() for _ in range(3)] == [None] * 3
    with watched.waiting(10):
        assert [watched.look() for _ in range(5)] == [None] * 5
        with watched.waiting():
            assert [watched.look() for _ in range(4)] == [None] * 3 + ["no answer on the GPU for 3 s"]
        assert [watched.look() for _ in range(11)] == [None] * 10 + ["no answer on the GPU for 10 s"]


def test_a_process_is_told_from_its_successor() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        process = Process(child.pid, stat[19])
        assert not process.ended()
        assert Process(child.pid, "1").ended()
        child.kill()
        end = time.monotonic() + 10
        while not process.ended() and time.monotonic() < end:
            time.sleep(0.01)
        assert process.ended()  # although nobody has asked what became of it
    assert process.ended()
    assert not Process.here().ended()


def test_ranks_that_are_not_to_be_seen_are_given_up_by_time_alone(others: Others) -> None:
    watched = Watch.over(0, [Process.here(), Process(1 << 30, "1")], 2)
    with watched.waiting():
        assert [watched.look() for _ in range(3)] == [None, None, "no answer on the GPU for 2 s"]


def waits(seconds: float, limit: float) -> None:
    """On a rank: wait as for a GPU; the second one dies meanwhile, if the first is to wait longer than that."""
    with mock.patch.object(watch, "EVERY", 0.1), joined(20) as ranks:
        watched = Watch.over(ranks.rank, everywhere(Process.here()), limit)
        model = random_decoder(SHAPES["llama"], torch.float32, "cpu", 0, Collectives(ranks.rank, 2, watch=watched))
        with model.watched():
            if ranks.rank and seconds > 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(seconds)


@pytest.mark.parametrize(
    ("seconds", "limit", "reason"), [(60, 300, "rank 1 has ended"), (0.9, 0.4, "no answer on the GPU for 0 s")]
)
def test_a_wait_without_end_ends_the_process(
    seconds: float, limit: float, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = RankPool(2)
    try:
        pool.start(waits, seconds, limit)
        pool.processes[0].join(30)
        assert pool.processes[0].exitcode == 9
        text = f"error: another rank has ended or does not answer ({reason}); mend it and start all again\n"
        assert text in capfd.readouterr().err
    finally:
        pool.close()


def test_a_wait_that_ends_does_not(two_ranks: RankPool) -> None:
    assert two_ranks(waits, 0.5, 30) == [None, None]
    time.sleep(0.5)
    assert all(process.is_alive() for process in two_ranks.processes)
