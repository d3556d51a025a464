"""How ranks talk within a step: sums and gathers of device tensors, by torch.distributed.

Shapes are those of the arguments and nothing is read on the host, so that a CUDA graph can hold them with NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dustin_runtime.errors import DustinError, PeerError, understood
from dustin_runtime.parallel.watch import Watch, lost


@dataclass(frozen=True)
class Collectives:
    """The ranks of a group. Every rank has to call the same methods in the same order.

    Attributes:
        group: whose backend serves the tensors' device; None is the default group.
        waiting: a group on the host that may wait long, for `alike`; None is the default group.
        watch: what ends a wait for the GPU that a dead rank leaves without end; None where tensors are on the host.
    """

    rank: int
    world: int
    group: dist.ProcessGroup | None = None
    waiting: dist.ProcessGroup | None = None
    watch: Watch | None = None

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, to the same bits on each of them: in place, but for a tensor that is not contiguous.

        Raises:
            PeerError: another rank has ended, or does not answer.
        """
        x = x.contiguous()
        with peers():
            dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[world, *x.shape]: what each rank has. Raises as `sum`."""
        found = torch.empty((self.world, *x.shape), dtype=x.dtype, device=x.device)
        with peers():
            dist.all_gather(list(found.unbind()), x.contiguous(), group=self.group)
        return found

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """What a rank has, on all of them: in place, but for a tensor that is not contiguous. Raises as `sum`."""
        x = x.contiguous()
        with peers():
            dist.broadcast(x, group=self.group, group_src=source)
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Hand a tensor over to a rank, which has to `receive` it. Raises as `sum`."""
        with peers():
            dist.send(x.contiguous(), group=self.group, group_dst=to)

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fill a contiguous tensor with what a rank sends. Raises as `sum`."""
        with peers():
            dist.recv(x, group=self.group, group_src=source)
        return x

    def watched(self, seconds: float | None = None) -> AbstractContextManager[None]:
        """Wait within for the GPU, which waits for others: as `Watch.waiting`."""
        return self.watch.waiting(seconds) if self.watch else nullcontext()

    def alike(self) -> AbstractContextManager[None]:
        """Between steps, do what one rank does for all: as `Ranks.alike`."""
        return alike(self.rank, self.waiting)


@contextmanager
def alike(rank: int, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Do what this rank does for itself, and wait for the others on the host. What fails on one fails on all.

    A rank that others of its team wait for in a step may fail here: they learn why once they give up.

    Raises:
        DustinError: of the first rank that failed, which it names unless all failed alike. Only on rank 0 it has to be
            said (`DustinError.quiet`).
        PeerError: a rank has ended.
    """
    own: DustinError | None = None
    try:
        yield
    except Exception as error:
        own = error if isinstance(error, PeerError) else shared(error)
    try:
        found = everywhere(None if own is None else (type(own), str(own)), group)
    except PeerError:
        if own is None:
            raise
        raise own from None  # nobody else can say it
    failed = [(failing, outcome) for failing, outcome in enumerate(found) if outcome]
    if failed:
        causes = [(failing, outcome) for failing, outcome in failed if not issubclass(outcome[0], PeerError)]
        failing, (kind, text) = (causes or failed)[0]
        common = kind(text if len(set(found)) == 1 else f"rank {failing}: {text}")
        common.quiet = rank > 0
        raise common from own


def shared(error: Exception) -> DustinError:
    """An exception as what the other ranks are told; raises what is no concern of theirs, and bugs."""
    told = understood(error)
    if told is None or isinstance(told, PeerError):
        raise error
    return told


def everywhere(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What every rank has, in their order; through the host. Raises as `Collectives.sum`."""
    with peers():
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, value, group=group)
    return found


@contextmanager
def peers() -> Iterator[None]:
    """Turn what torch.distributed raises, once a rank is gone, into one line.

    With gloo the others learn of it here. On GPUs a step waits on the device: `watch` ends the process.
    """
    try:
        yield
    except RuntimeError as error:  # of which its own classes are
        reason = str(error).strip().split("\n")[0]
        raise PeerError(lost(reason)) from error
