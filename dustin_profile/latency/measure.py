"""Timing whole steps by the runtime's own engine, on the pair's weights and caches of noise."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch

from dustin_profile.latency.model import Step
from dustin_runtime.bench.noise import fill
from dustin_runtime.bench.workload import spread_heads
from dustin_runtime.config import Selection
from dustin_runtime.engine import Engine
from dustin_runtime.generation import capacity_beyond
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.policies import make_policy
from dustin_runtime.serving import to_host
from dustin_runtime.step import Stepper

SINK, WINDOW = 4, 2
"""Protected tokens; how many hardly matters for time. Few, so that the smallest budgets leave something to choose."""
WARM_UP = 2
REPEATS = 7
LIMIT_S = 2.0
"""Seconds that the repeats of a step may take on a CPU; `LEAST_REPEATS` are timed in any case."""
LEAST_REPEATS = 5
GPU_STEPS, GPU_REPEATS = 8, 3
"""Steps that are timed at once on a GPU, whose host is ahead of it, and how often: its times vary little. On a CPU each
is timed alone."""
GPU_PREPARING_S = 1.8
"""What a step costs before it is timed, on an H200 with 16 rows of 4096 tokens and the shapes of a 7B pair: noise for
its caches, kernels compiled that have not been, a graph captured."""


def seconds_for(one: float, on_gpu: bool) -> float:
    """What it takes to time a step of `one` seconds; on a CPU the reference beside each repeat takes as long."""
    if on_gpu:
        return GPU_PREPARING_S + GPU_REPEATS * GPU_STEPS * one
    return WARM_UP * one + max(LEAST_REPEATS * 2 * one, min(REPEATS * 2 * one, LIMIT_S))


class Timed(NamedTuple):
    """Milliseconds of one step."""

    ms: float
    """Median. On a CPU of ratios to a reference, times the reference's own median: see `time_steps`."""
    least: float
    """By the clock, as `most`."""
    most: float
    repeats: int


def selection_for(step: Step, target: ModelShape, draft: ModelShape) -> Selection:
    """Heads spread over layers and KV heads, since no search has chosen any: scoring costs no less than theirs."""
    free = step.budget - SINK - WINDOW
    layers = sorted({draft.layers * part // (step.layers + 1) for part in range(1, step.layers + 1)})
    return Selection(
        budget=step.budget,
        sink=SINK,
        window=WINDOW,
        m=0 if not step.layers else free // 2 if step.history else free,
        history=spread_heads(target, target.layers // 2),
        lookahead=tuple(spread_heads(draft, layer) for layer in layers),
    )


def capacity_for(context: int, depth: int) -> int:
    """Positions of a row that is stepped from `context` on, every draft accepted; see `capacity_beyond`."""
    return context + capacity_beyond((GPU_STEPS + WARM_UP) * (depth + 1) + 1, depth)


@torch.inference_mode()
def time_steps(
    target: Decoder,
    draft: Decoder,
    shared_vocab: int,
    steps: Sequence[Step],
    batch: int,
    context: int,
    advance: Callable[[float], None],
) -> list[Timed]:
    """Time steps of `batch` rows of `context` tokens.

    A CPU is shared: each repeat there is timed next to one of the shortest step, so that what other programs take from
    both cancels.

    Args:
        advance: called with 1 after each step.

    Raises:
        CapacityError: memory does not suffice.
    """

    def running(step: Step) -> _Running:
        return _Running(target, draft, shared_vocab, step, batch, context)

    beside = None if target.device.type == "cuda" else running(min(steps))
    found: dict[int, tuple[list[float], list[float]]] = {}
    for place in random.Random(0).sample(range(len(steps)), len(steps)):
        found[place] = _repeats(running(steps[place]), beside)
        if target.device.type == "cuda":
            gc.collect()  # the graph's memory, before the next step reserves its own
            torch.cuda.empty_cache()
        advance(1)
    usual = median(time for _, times in found.values() for time in times) if beside else 1.0
    timed = []
    for place in range(len(steps)):
        own, times = found[place]
        ratio = median(mine / theirs for mine, theirs in zip(own, times, strict=True))
        timed.append(Timed(ratio * usual, min(own), max(own), len(own)))
    return timed


class _Running:
    """An engine that steps rows of `context` tokens."""

    def __init__(
        self, target: Decoder, draft: Decoder, shared_vocab: int, step: Step, batch: int, context: int
    ) -> None:
        selection = selection_for(step, target.shape, draft.shape)
        window = step.budget if step.windowed else None
        policy = make_policy("dustin", selection)
        stepper = Stepper(target, draft, policy, policy.selection, step.depth, shared_vocab, draft_budget=window)
        self.context = context
        self.engine = Engine(stepper)
        self.state = self.engine.prepare(batch, capacity_for(context, step.depth))
        self.on_gpu = self.state.lengths.is_cuda
        fill(stepper, self.state, context)
        if not self.on_gpu:
            self.state.extent = context  # it steps once from there
        for _ in range(WARM_UP):
            self.first = self.run(1)

    def run(self, count: int) -> float:
        """Milliseconds of a step, `count` of them behind each other."""
        self.state.lengths.fill_(self.context)
        self._wait()
        began = time.perf_counter()
        for _ in range(count):
            to_host(self.engine.step(self.state)[1])
        self._wait()
        return 1e3 * (time.perf_counter() - began) / count

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.state.lengths.device)


def _repeats(one: _Running, beside: _Running | None) -> tuple[list[float], list[float]]:
    """Milliseconds of each repeat, and those of the reference next to it: 1 where there is none."""
    steps = GPU_STEPS if one.on_gpu else 1
    cost = one.first * steps + (beside.first if beside else 0.0)
    repeats = GPU_REPEATS if one.on_gpu else max(LEAST_REPEATS, min(REPEATS, int(1e3 * LIMIT_S / cost)))
    own, times = [], []
    for _ in range(repeats):
        times.append(beside.run(1) if beside else 1.0)
        own.append(one.run(steps))
    return own, times
