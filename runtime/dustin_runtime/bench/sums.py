"""The ways to sum blocks over ranks, timed on the devices of a run before its first step, and the fastest taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from dustin_runtime.bench.timing import measure_ms
from dustin_runtime.bench.together import Together
from dustin_runtime.errors import UsageError
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.parallel.reduce import AUTO, TRIED, NcclSum, Sum, adds, opened, symmetric_fault, symmetric_ways
from dustin_runtime.parallel.sums import SizeClass, choose
from dustin_runtime.parallel.tensor import TensorParallel
from dustin_runtime.parallel.watch import LONG

CALLS = 32
"""Sums in one graph."""
REPEATS = 20
LIMIT_S = 0.2


def choose_sums(model: Decoder, asked: str, tokens: Iterable[int]) -> tuple[SizeClass, ...]:
    """Let a target that is split by heads sum its blocks as `--all-reduce` says, at these sizes; others as ever.

    Each rank has to call this, before a step is captured.

    Args:
        tokens: of the messages that the run has, the same on all ranks.

    Returns:
        What was measured; nothing on a CPU and in one process.

    Raises:
        CapacityError: memory does not suffice.
        PeerError: another rank has ended, or does not answer.
        UsageError: the way that is asked for is not available; on all ranks.
    """
    split = model.split
    if not isinstance(split, TensorParallel) or model.device.type != "cuda":
        return ()
    ranks, hidden, sizes = split.ranks, model.shape.hidden, sorted(set(tokens))
    with ranks.watched(LONG):
        ways: list[Sum] = [NcclSum(ranks)]
        fault = None
        if asked != NcclSum.name and not (fault := symmetric_fault(ranks, model.device, model.dtype)):
            buffer, fault = opened(ranks, max(max(sizes) * hidden, TRIED), model.dtype, model.device)
            tried = symmetric_ways(buffer, ranks.world) if buffer else []
            ways += [way for way in tried if adds(way, ranks, model.dtype, model.device)]
        if asked != AUTO:
            ways = [way for way in ways if way.name == asked]
            if not ways:
                fault = fault or "its sums are wrong on these GPUs"
                error = UsageError(f"--all-reduce {asked}: {fault}; give auto or nccl")
                error.quiet = ranks.rank > 0
                raise error
        classes = choose(ways, sizes, hidden * model.dtype.itemsize, _timer(model, hidden), ranks.waiting)
    split.blocks.adopt(classes, ways, hidden)
    return split.blocks.classes


def _timer(model: Decoder, hidden: int) -> Callable[[Sum, int], float]:
    together = Together.of(model)

    def time_us(way: Sum, tokens: int) -> float:
        x = way.room((tokens, hidden))
        if x is None:
            x = torch.empty(tokens, hidden, dtype=model.dtype, device=model.device)
        x.zero_()  # sums stay finite

        def work() -> None:
            for _ in range(CALLS):
                way(x)

        return 1e3 * measure_ms(work, model.device, REPEATS, units=CALLS, limit_s=LIMIT_S, together=together).ms

    return time_us
