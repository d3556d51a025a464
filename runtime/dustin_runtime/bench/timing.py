"""How long device work takes: replays of a CUDA graph between events, or the wall clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dustin_runtime.bench.together import ALONE, Together

LEAST_REPEATS = 3
GRAPH = "CUDA graph replays, timed by events"
CLOCK = "CPU wall clock"


class Timing(NamedTuple):
    """Milliseconds of one unit of work over several repeats."""

    ms: float
    """Median."""
    least_ms: float
    most_ms: float
    repeats: int

    def as_dict(self) -> dict[str, Any]:
        """For a document."""
        return {"ms": self.ms, "min_ms": self.least_ms, "max_ms": self.most_ms, "repeats": self.repeats}


def how(device: torch.device) -> str:
    """How `measure_ms` times on this device; belongs beside every figure."""
    return GRAPH if device.type == "cuda" else CLOCK


def measure_ms(
    work: Callable[[], object],
    device: torch.device,
    repeats: int,
    *,
    units: int = 1,
    limit_s: float = 2.0,
    together: Together = ALONE,
) -> Timing:
    """Time `work`, which does `units` equal units, with what the device has: see `graph_ms` and `clock_ms`.

    Args:
        together: the ranks that time it at once: it may talk to them, all repeat it as often, and each figure is that
            of the rank where it is largest.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            return graph_ms(work, repeats, units=units, limit_s=limit_s, together=together)
    return clock_ms(work, repeats, units=units, limit_s=limit_s, together=together)


def graph_ms(
    work: Callable[[], object],
    repeats: int,
    *,
    units: int = 1,
    limit_s: float = 2.0,
    together: Together = ALONE,
) -> Timing:
    """Capture `work` in a CUDA graph and time its replays, so that launching costs the host nothing.

    Args:
        work: kernels on the current device, without a host synchronisation and with static shapes; it runs twice
            before it is captured, which compiles kernels and grows workspaces.
        repeats: replays to time; fewer, but at least `LEAST_REPEATS`, where they would exceed `limit_s` seconds.
        units: how many equal units `work` does. Times are those of one: a launch of a few microseconds is timed well
            only in numbers.
        together: as of `measure_ms`.
    """
    side = torch.cuda.Stream()  # what is to be captured must not have run on the default stream alone
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()  # the first replay uploads the graph
    first = _replay_ms(graph)
    count = _affordable(together.slowest(first)[0], repeats, limit_s)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    together.begin()
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in events]
    graph.reset()
    return _timing(times, units, together)


def clock_ms(
    work: Callable[[], object],
    repeats: int,
    *,
    units: int = 1,
    limit_s: float = 2.0,
    together: Together = ALONE,
) -> Timing:
    """Time work that runs on this thread by the wall clock, after one run that warms up."""

    def once() -> float:
        began = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - began)

    count = _affordable(together.slowest(once())[0], repeats, limit_s)
    together.begin()
    return _timing([once() for _ in range(count)], units, together)


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def _affordable(first_ms: float, repeats: int, limit_s: float) -> int:
    within = int(1e3 * limit_s / max(first_ms, 1e-6))
    return max(LEAST_REPEATS, min(repeats, within))


def _timing(times: list[float], units: int, together: Together) -> Timing:
    ms, least, most = together.slowest(statistics.median(times), min(times), max(times))
    return Timing(ms / units, least / units, most / units, len(times))
