"""The processes of one run, as torchrun starts them: joining, and agreeing on what they are about to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from dustin_runtime.errors import (
    ConflictError,
    DustinError,
    InterruptedRunError,
    PeerError,
    UsageError,
)
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.parallel import environment
from dustin_runtime.parallel.collectives import Collectives, alike, everywhere, peers, shared
from dustin_runtime.parallel.split import part_of
from dustin_runtime.parallel.watch import Process, Watch

TIMEOUT = 60
"""Seconds that a rank waits for another within a step."""
LOADING_TIMEOUT = timedelta(minutes=30)
"""One rank's disk may be that much slower than another's, or what it was dealt (a prompt to draft, say) that much
longer."""
T = TypeVar("T")


@contextmanager
def joined(timeout: int = TIMEOUT) -> Iterator[Ranks]:
    """Join the other processes of the run, on the host; a run of one process joins nothing.

    Args:
        timeout: seconds that a rank waits for another.

    Raises:
        PeerError: not all of them came.
        UsageError: the environment that says who they are is incomplete.
    """
    world = environment.world_size()
    if world == 1:
        yield ALONE
        return
    rank, local = environment.rank(), environment.local_rank()
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        loading = dist.new_group(backend="gloo", timeout=LOADING_TIMEOUT)
    except (RuntimeError, ValueError) as error:  # of which the first covers torch's own classes
        reason = str(error).strip().split("\n")[0]
        raise PeerError(f"rank {rank}: not all of {world} ranks came within {timeout} s ({reason})") from None
    try:
        yield Ranks(rank, world, local, loading, timeout)
    except DustinError as error:
        if not error.quiet and rank:
            raise type(error)(f"rank {rank}: {error}") from error
        raise
    except KeyboardInterrupt:
        if not rank:
            raise
        interrupted = InterruptedRunError("interrupted")
        interrupted.quiet = True  # Ctrl-C comes to all of them
        raise interrupted from None
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run.

    Attributes:
        local: its number on its host, from 0.
        loading: the group, for waits as long as `LOADING_TIMEOUT`; None if this is the only process.
        timeout: seconds that it waits for another within a step.
        team: how many neighbours do a worker's part together, where work is dealt: those that a model is split over.
    """

    rank: int
    world: int
    local: int
    loading: dist.ProcessGroup | None = None
    timeout: int = TIMEOUT
    team: int = 1

    @property
    def alone(self) -> bool:
        return self.world == 1

    @property
    def workers(self) -> int:
        return self.world // self.team

    @property
    def worker(self) -> int:
        """Which of the workers this rank is, or belongs to."""
        return self.rank // self.team

    @property
    def keeps(self) -> bool:
        """Whether this rank is the one of its team that writes what all of it have found."""
        return self.rank % self.team == 0

    def in_teams(self, size: int) -> Ranks:
        """The same ranks, `size` neighbours a worker; they have to divide into such teams."""
        return replace(self, team=size)

    def device(self, asked: str) -> str:
        """The device of this rank, where `asked` is that of the command line.

        Raises:
            UsageError: one GPU is asked for, which they cannot share.
        """
        if self.alone or asked == "cpu":
            return asked
        if asked not in ("auto", "cuda"):
            raise UsageError(f"--device {asked}: each of {self.world} ranks needs its own; give cuda or cpu")
        import torch

        return f"cuda:{self.local}" if asked == "cuda" or torch.cuda.is_available() else "cpu"

    def share(self, whole: ModelShape, pipeline: bool = False) -> ModelShape:
        """What this rank has of a model. Raises UsageError as `part_of`."""
        return part_of(whole, self.rank, self.world, pipeline).shape

    def share_in_team(self, whole: ModelShape) -> ModelShape:
        """What it has of a model that is split over its team. Raises UsageError as `part_of`."""
        return part_of(whole, self.rank % self.team, self.team).shape if self.team > 1 else whole

    def collectives(self, device: str) -> Collectives | None:
        """How the ranks talk in a step: by NCCL on GPUs, by gloo elsewhere; None for one process."""
        if self.alone:
            return None
        if not device.startswith("cuda"):
            return Collectives(self.rank, self.world, None, self.loading)
        with peers():
            group = dist.new_group(backend="nccl")
        watch = Watch.over(self.rank, everywhere(Process.here()), self.timeout)
        return Collectives(self.rank, self.world, group, self.loading, watch)

    def team_collectives(self, device: str) -> Collectives | None:
        """How the ranks of a team talk in a step, apart from other teams; None where each rank is a worker.

        All ranks of the run have to ask at once.
        """
        if self.team == 1:
            return None
        backend = "nccl" if device.startswith("cuda") else "gloo"
        with peers():
            group, _ = dist.new_subgroups(self.team, timeout=timedelta(seconds=TIMEOUT), backend=backend)
            waiting, _ = dist.new_subgroups(self.team, timeout=LOADING_TIMEOUT, backend="gloo")
        watch = Watch.over(self.rank, everywhere(Process.here()), self.timeout) if backend == "nccl" else None
        return Collectives(self.rank % self.team, self.team, group, waiting, watch)

    @contextmanager
    def alike(self, loading: bool = False) -> Iterator[None]:
        """Do what each rank does for itself, and wait for the others. If it fails on one, it fails on all of them.

        Args:
            loading: wait for `LOADING_TIMEOUT`.

        Raises:
            DustinError: of the first rank that failed, which it names unless all failed alike. Only on rank 0 it has to
                be said (`DustinError.quiet`).
            PeerError: a rank has ended.
        """
        if self.alone:
            yield
            return
        with alike(self.rank, self.loading if loading else None):
            yield

    def once(self, work: Callable[[], T]) -> T:
        """Let rank 0 alone do something while the others wait, for `LOADING_TIMEOUT`.

        Returns:
            What it returned, pickled to the other ranks.

        Raises:
            DustinError: of rank 0, on all of them. Only there it has to be said.
            PeerError: a rank has ended.
        """
        if self.alone:
            return work()
        own: DustinError | None = None
        done: T | None = None
        if self.rank == 0:
            try:
                done = work()
            except Exception as error:
                own = shared(error)
        failure, result = everywhere((own and (type(own), str(own)), done), self.loading)[0]
        if failure:
            kind, text = failure
            common: DustinError = kind(text)
            common.quiet = self.rank > 0
            raise common from own
        return result  # type: ignore[no-any-return]

    def agree(self, facts: Mapping[str, object], loading: bool = False) -> None:
        """Refuse to go on if another rank was given something else.

        Args:
            facts: by the name that an error says, compared as text; None, or no entry, for what is not given.
            loading: wait for `LOADING_TIMEOUT`.

        Raises:
            ConflictError: on all ranks; names the first difference.
        """
        if self.alone:
            return
        told = {name: None if value is None else str(value) for name, value in facts.items()}
        first, *others = everywhere(told, self.loading if loading else None)
        for rank, theirs in enumerate(others, start=1):
            for name in first | theirs:
                ours, other = first.get(name), theirs.get(name)
                if ours != other:
                    error = ConflictError(
                        f"ranks differ in {name}: {_short(ours)} on rank 0, {_short(other)} on rank {rank}"
                    )
                    error.quiet = self.rank > 0
                    raise error


ALONE = Ranks(0, 1, 0)
"""A run of one process."""


def _short(value: str | None) -> str:
    text = "not given" if value is None else value
    return text if len(text) <= 60 else f"{text[:57]}..."
