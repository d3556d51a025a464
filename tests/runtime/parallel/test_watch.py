"""A rank that waits for its GPU is ended when another is gone, or after its time; not by what looks alike."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from split_models import SHAPES

from dustin_runtime import engine, serving
from dustin_runtime.engine import Engine
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.parallel import watch
from dustin_runtime.parallel.collectives import Collectives, everywhere
from dustin_runtime.parallel.ranks import joined
from dustin_runtime.parallel.watch import LONG, Process, Watch
from dustin_runtime.policies import make_policy
from dustin_runtime.step import Stepper


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


def on_gpus() -> tuple[bool, list[str | None]]:
    """On a rank whose GPUs talk by gloo: whether it is watched over, and what a look says once the other is gone."""
    with joined(20) as ranks:
        with mock.patch.object(dist, "new_group", return_value=None):
            talk = ranks.collectives("cuda:0")
        assert talk
        if not (watched := talk.watch):
            return False, []
        with (
            mock.patch.object(watch, "_state", return_value=("Z", "")),
            mock.patch.object(Watch, "_look_on", return_value=None),
            talk.watched(),
        ):
            return True, [watched.look(), watched.look()]


def test_ranks_on_gpus_watch_each_other(two_ranks: RankPool) -> None:
    assert two_ranks(on_gpus) == [(True, [None, f"rank {other} has ended"]) for other in (1, 0)]


class Recorder:
    """Waits that a model was told of, and an event of the device that asks for one."""

    def __init__(self) -> None:
        self.waits: list[float | None] = []
        self.inside = 0
        self.synchronized: list[int] = []

    @contextmanager
    def watched(self, seconds: float | None = None) -> Iterator[None]:
        self.waits.append(seconds)
        self.inside += 1
        yield
        self.inside -= 1

    def synchronize(self) -> None:
        self.synchronized.append(self.inside)


def test_the_engine_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    model = random_decoder(SHAPES["llama"], torch.float32, "cpu", 0)
    monkeypatch.setattr(model, "watched", recorder.watched)
    monkeypatch.setattr(serving, "to_host", lambda packed: (packed, recorder))
    stepper = Stepper(model, None, make_policy("vanilla", None), None, 0, model.shape.vocab)
    generations, _ = Engine(stepper, rows=1).generate([[1, 2, 3], [4]], 3)
    assert [len(one.tokens) for one in generations] == [3, 3]
    assert recorder.waits == [LONG, None, None] * 2  # a prefill, then steps
    assert recorder.synchronized == [1] * 4


def test_a_capture_is_a_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    model = random_decoder(SHAPES["llama"], torch.float32, "cpu", 0)
    monkeypatch.setattr(model, "watched", recorder.watched)
    monkeypatch.setattr(engine, "StepGraph", lambda *_: recorder.synchronize())
    stepper = Stepper(model, None, make_policy("vanilla", None), None, 0, model.shape.vocab)
    Engine(stepper, graph=True).prepare(1, 8)
    assert (recorder.waits, recorder.synchronized) == ([LONG], [1])
