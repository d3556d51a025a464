"""Which way sums the blocks of a decoder over ranks: for every size of message that a run has, the fastest one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dustin_runtime.parallel.collectives import Collectives, everywhere
from dustin_runtime.parallel.reduce import ALIGNMENT, Sum
from dustin_runtime.prefill import chunk_for

if TYPE_CHECKING:
    from dustin_runtime.models.decoder import Decoder


@dataclass(frozen=True)
class SizeClass:
    """Messages of so many tokens, or fewer, down to the next smaller class.

    Attributes:
        tokens: of all rows.
        way: that serves them.
        us: by way, microseconds of one sum on the slowest rank, of what lies where the way has it best.
    """

    tokens: int
    bytes: int
    way: str
    us: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For a document."""
        return {"tokens": self.tokens, "bytes": self.bytes, "way": self.way, "us": self.us}

    def __str__(self) -> str:
        times = ", ".join(f"{name} {us:.1f} us" for name, us in self.us.items())
        return f"all-reduce of {self.tokens} tokens ({self.bytes / 2**20:.2f} MiB): {times}; {self.way} serves"


class BlockSums:
    """Sums of blocks, each by the way of its size; by NCCL, or gloo on a CPU, until `adopt` says otherwise.

    A decoder and those that are cut from it share one.
    """

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self._served: list[tuple[int, Sum]] = []
        self.classes: tuple[SizeClass, ...] = ()

    def adopt(self, classes: Sequence[SizeClass], ways: Iterable[Sum], hidden: int) -> None:
        """Serve messages up to the size of each class by its way.

        Args:
            ways: those that the classes name.
            hidden: elements of a token.
        """
        named = {way.name: way for way in ways}
        self.classes = tuple(sorted(classes, key=lambda one: one.tokens))
        self._served = [(one.tokens * hidden, named[one.way]) for one in self.classes]

    def __call__(self, x: Tensor) -> Tensor:
        """The sum over ranks, to the same bits on each of them: in place, but for a tensor that is not contiguous, or
        in a `room`.

        What decides on the way is the same on all ranks: sizes and places in a storage, never addresses.

        Raises:
            PeerError: another rank has ended, or does not answer.
        """
        size = x.element_size()
        aligned = x.is_contiguous() and x.storage_offset() * size % ALIGNMENT == 0
        way = self._way(x.numel(), size) if aligned else None
        return self._ranks.sum(x) if way is None else way(x)

    def room(self, size: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Where a tensor is summed without a copy; None for anywhere. It holds one tensor, up to its sum."""
        way = self._way(math.prod(size), dtype.itemsize)
        return None if way is None else way.room(size)

    def _way(self, elements: int, size: int) -> Sum | None:
        if elements * size % ALIGNMENT:
            return None
        return next((way for most, way in self._served if elements <= most), None)


def step_tokens(rows: int, depth: int, split_draft: bool) -> set[int]:
    """Tokens of the sums of a step.

    Args:
        depth: draft tokens per step; 0 for a method that does not draft.
        split_draft: whether the draft is split as the target is (`self:N`); its first pass takes two tokens.
    """
    return {rows * (depth + 1)} | ({2 * rows, rows} if split_draft and depth else set())


def prefill_tokens(model: Decoder, longest: int) -> set[int]:
    """Tokens of the sums of a prefill, by the longest prompt."""
    return {min(longest, chunk_for(model.device))}


def choose(
    ways: Sequence[Sum],
    tokens: Iterable[int],
    token_bytes: int,
    time_us: Callable[[Sum, int], float],
    group: dist.ProcessGroup | None = None,
) -> list[SizeClass]:
    """Time every way at every size; the fastest by the slowest rank's time serves, so all ranks choose alike.

    Args:
        tokens: the sizes; the same on all ranks, each of which has to call this.
        token_bytes: of one token.
        time_us: microseconds of a way at so many tokens, which all ranks measure at once.
        group: on the host.

    Raises:
        PeerError: another rank has ended, or does not answer.
    """
    found = []
    for count in sorted(set(tokens)):
        own = [time_us(way, count) for way in ways]
        slowest = [max(times) for times in zip(*everywhere(own, group), strict=True)]
        us = {way.name: time for way, time in zip(ways, slowest, strict=True)}
        found.append(SizeClass(count, count * token_bytes, min(us, key=us.__getitem__), us))
    return found
