"""Processes that stand for the ranks of a run. They outlive a run, so that torch is imported once by each."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as processes

Job = Callable[..., Any]


class RankPool:
    """`world` processes with the environment that torchrun gives; a call runs one function in all of them."""

    def __init__(self, world: int) -> None:
        context = processes.get_context("spawn")
        self._pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def start(self, job: Job, *arguments: Any) -> None:
        """Begin `job(*arguments)` in every process; `finish` returns what becomes of it."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for pipe in self._pipes:
            pipe.send((port, job, arguments))

    def finish(self, rank: int, seconds: float = 60) -> Any:
        """What the job returned on a rank, or the exception that it raised."""
        assert self._pipes[rank].poll(seconds), f"rank {rank} hangs"
        return self._pipes[rank].recv()

    def __call__(self, job: Job, *arguments: Any) -> list[Any]:
        """What `job(*arguments)` returns on each rank; raises what it raised on the first that did."""
        self.start(job, *arguments)
        found = [self.finish(rank) for rank in range(len(self._pipes))]
        for outcome in found:
            if isinstance(outcome, BaseException):
                raise outcome
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(pipe: Any, rank: int, world: int) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while True:
        port, job, arguments = pipe.recv()
        os.environ["MASTER_PORT"] = str(port)
        try:
            pipe.send(job(*arguments))
        except BaseException as error:
            pipe.send(error)
