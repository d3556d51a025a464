"""Ways to sum what ends a block of a decoder over ranks: by NCCL, or by kernels that read the other GPUs' memory.

The latter are torch's symmetric memory, without multicast. In one shot every rank reads the parts of all and adds them
from rank 0 on, so sums are the same bits on each; in two each rank does so for a share of the elements, and reads the
sums of the others. Either adds in the tensor's own type. A call begins and ends in a barrier of all ranks on the
device: one buffer serves calls that follow each other in a stream, and a CUDA graph can hold them.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dustin_runtime.errors import UsageError
from dustin_runtime.parallel.collectives import Collectives, everywhere

ALIGNMENT = 16
"""Bytes at a time that the kernels move."""
DTYPES = (torch.bfloat16, torch.float32)
"""What they add."""
TWO_SHOT_WORLDS = (2, 4, 8)
TRIED = 1 << 13
"""Elements of a sum that is tried: some blocks of a kernel."""
OPERATIONS = ("one_shot_all_reduce_out", "two_shot_all_reduce_out")


class Sum(Protocol):
    """One way."""

    name: ClassVar[str]

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of a contiguous tensor over ranks, the same bits on each; in place, unless it lies in a `room`.

        Raises:
            PeerError: another rank has ended, or does not answer.
        """
        ...

    def room(self, size: Sequence[int]) -> Tensor | None:
        """Where a tensor is summed without a copy, always the same memory; None for anywhere."""
        ...


class NcclSum:
    """`Collectives.sum` (implements `Sum`)."""

    name: ClassVar[str] = "nccl"

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.sum(x)

    def room(self, size: Sequence[int]) -> None:
        """Anywhere."""


class Buffer:
    """Memory that every rank of a group can read; made by `opened`.

    Attributes:
        flat: [elements], this rank's.
        group: its name.
    """

    def __init__(self, flat: Tensor, group: str) -> None:
        self.flat = flat
        self.group = group

    def room(self, size: Sequence[int]) -> Tensor:
        """Its first elements."""
        return self.flat[: math.prod(size)].view(size)

    def holding(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A tensor in the buffer, copied unless it lies there, and where its sum may lie: never there, where the next
        tensor will."""
        if x.data_ptr() == self.flat.data_ptr():
            return x, torch.empty_like(x)
        return self.room(x.shape).copy_(x), x


class OneShotSum:
    """Every rank reads all parts (implements `Sum`): best for small messages.

    torch has one operation for the copy and the sum, which is not used: its copy is not fenced from the barrier.
    """

    name: ClassVar[str] = "one-shot"

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def __call__(self, x: Tensor) -> Tensor:
        held, out = self._buffer.holding(x)
        torch.ops.symm_mem.one_shot_all_reduce_out(held, "sum", self._buffer.group, out)
        return out

    def room(self, size: Sequence[int]) -> Tensor:
        return self._buffer.room(size)


class TwoShotSum:
    """Every rank sums a share, then reads the others' (implements `Sum`): best for large messages."""

    name: ClassVar[str] = "two-shot"

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def __call__(self, x: Tensor) -> Tensor:
        held, out = self._buffer.holding(x)
        torch.ops.symm_mem.two_shot_all_reduce_out(held, "sum", self._buffer.group, out)
        return out

    def room(self, size: Sequence[int]) -> Tensor:
        return self._buffer.room(size)


WAYS = (NcclSum.name, OneShotSum.name, TwoShotSum.name)
AUTO = "auto"
DEFAULT = NcclSum.name
"""Until the others have been seen to work, and to be faster, on GPUs."""


def require_way(asked: str, world: int, device: str, pipeline: bool = False) -> None:
    """Refuse what `--all-reduce` cannot be, as far as one rank can tell.

    Raises:
        UsageError: it cannot be that.
    """
    if asked not in (AUTO, *WAYS):
        raise UsageError(f"--all-reduce {asked}: unknown; give {', '.join((AUTO, *WAYS))}")
    if asked == AUTO:
        return
    if world == 1:
        raise UsageError(f"--all-reduce {asked}: this is one process, which sums nothing over ranks; leave it out")
    if pipeline:
        raise UsageError(f"--all-reduce {asked}: a pipeline sums no blocks; leave it out")
    if not device.startswith("cuda"):
        raise UsageError(f"--all-reduce {asked}: needs GPUs, on CPUs gloo sums; leave it out")


def require_symmetric(asked: str, ranks: Collectives, device: torch.device, dtype: torch.dtype) -> None:
    """The same of what all ranks have to be asked for. Each of them has to call it.

    Raises:
        UsageError: on all ranks.
        PeerError: another rank has ended, or does not answer.
    """
    if asked in (OneShotSum.name, TwoShotSum.name) and (why := symmetric_fault(ranks, device, dtype, asked)):
        error = UsageError(f"--all-reduce {asked}: {why}; give auto or nccl")
        error.quiet = ranks.rank > 0
        raise error


def symmetric_fault(
    ranks: Collectives, device: torch.device, dtype: torch.dtype, way: str = OneShotSum.name
) -> str | None:
    """Why the ranks cannot read each other's memory; the same on all of them, each of which has to call this.

    Raises:
        PeerError: another rank has ended, or does not answer.
    """
    told = everywhere((host(), own_fault(device, dtype, ranks.world, way), device.index or 0), ranks.waiting)
    hosts, faults, devices = zip(*told, strict=True)
    if len(set(hosts)) > 1:
        return f"it reads other GPUs' memory, and the ranks are on {len(set(hosts))} hosts"
    if fault := next(filter(None, faults), None):
        return str(fault)
    if len(set(devices)) < len(devices):
        return "ranks share a GPU"
    unread = [other for other in devices if other != device.index and not _reads(device, other)]
    fault = f"GPU {device.index or 0} has no peer access to GPU {unread[0]}" if unread else None
    return next(filter(None, everywhere(fault, ranks.waiting)), None)


def own_fault(device: torch.device, dtype: torch.dtype, world: int, way: str) -> str | None:
    """The same, of what a rank knows by itself."""
    if device.type != "cuda":
        return "it needs GPUs"
    if torch.version.hip is not None:
        return "it was made for NVIDIA GPUs"
    if missing := missing_operation():
        return f"torch {torch.__version__} has no {missing}"
    if dtype not in DTYPES:
        return f"it adds {' or '.join(str(one).removeprefix('torch.') for one in DTYPES)}, the target is {dtype}"
    if way == TwoShotSum.name and world not in TWO_SHOT_WORLDS:
        return f"it serves 2, 4 or 8 ranks, not {world}"
    return None


def missing_operation() -> str | None:
    """What of torch's symmetric memory this version lacks."""
    try:
        symmetric_memory()
    except ImportError:
        return "torch.distributed._symmetric_memory"
    return next((name for name in OPERATIONS if not hasattr(torch.ops.symm_mem, name)), None)


def symmetric_memory() -> Any:
    """torch's module, which is private to it and costs a second to import."""
    import torch.distributed._symmetric_memory as module

    if not (hasattr(module, "empty") and hasattr(module, "rendezvous")):
        raise ImportError("another torch's")
    return module


def host() -> str:
    """What tells this machine, and its last start, from others."""
    booted = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {booted.read_text().strip() if booted.exists() else ''}"


def opened(ranks: Collectives, elements: int, dtype: torch.dtype, device: torch.device) -> tuple[Buffer | None, str]:
    """A buffer of so many elements, or why there is none; the same on all ranks, each of which has to call this.

    Raises:
        PeerError: another rank has ended, or does not answer.
    """
    module = symmetric_memory()
    group: dist.ProcessGroup | None = ranks.group
    assert group is not None
    flat: Tensor | None = None
    fault = None
    try:
        flat = module.empty(elements, dtype=dtype, device=device)
    except RuntimeError as error:
        fault = _first_line(error)
    if found := next(filter(None, everywhere(fault, ranks.waiting)), None):  # or the others would wait in `rendezvous`
        return None, f"no symmetric memory ({found})"
    assert flat is not None
    try:
        module.rendezvous(flat, group)
        flat.zero_()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        fault = _first_line(error)
    if found := next(filter(None, everywhere(fault, ranks.waiting)), None):
        return None, f"no symmetric memory ({found})"
    return Buffer(flat, group.group_name), ""


def adds(way: Sum, ranks: Collectives, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a way does add what ranks have, here; the same on all ranks, each of which has to call this.

    Raises:
        PeerError: another rank has ended, or does not answer.
    """
    x = torch.full((TRIED,), ranks.rank + 1.0, dtype=dtype, device=device)
    try:
        right = bool((way(x) == ranks.world * (ranks.world + 1) / 2).all())
    except RuntimeError:  # of torch's checks, on all ranks alike
        right = False
    return all(everywhere(right, ranks.waiting))


def symmetric_ways(buffer: Buffer, world: int) -> list[Sum]:
    """The ways that a buffer serves."""
    ways: list[Sum] = [OneShotSum(buffer)]
    if world in TWO_SHOT_WORLDS:
        ways.append(TwoShotSum(buffer))
    return ways


def _reads(device: torch.device, other: int) -> bool:
    return bool(torch.cuda.can_device_access_peer(device, other))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
