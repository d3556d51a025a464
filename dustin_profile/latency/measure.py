"""Timing whole steps by the runtime's own engine, on the pair's weights and caches of noise."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dustin_profile.latency.model import Step
from dustin_runtime.bench.noise import fill
from dustin_runtime.bench.workload import spread_heads
from dustin_runtime.config import Selection
from dustin_runtime.engine import Engine, capacity_beyond, to_host
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.policies import make_policy
from dustin_runtime.step import State, Stepper

SINK, WINDOW = 4, 2
"""Protected tokens; how many hardly matters for time. Few, so that the smallest budgets leave something to choose."""
WARM_UP = 2
REPEATS = 7
LIMIT_S = 1.0
"""Seconds that the repeats of a step may take; three are timed in any case."""
CPU_ROUNDS = 2
"""On a CPU all steps are timed again in another order, so that a while in which it is busy does not decide."""
GPU_STEPS = 16
"""Steps that are timed at once on a GPU, whose host is ahead of it; on a CPU each is timed alone."""


class Timed(NamedTuple):
    """Milliseconds of one step."""

    median: float
    """Of the better round; what is fitted. The least may be of a while in which no other program ran."""
    least: float
    most: float
    repeats: int

    def beside(self, other: Timed) -> Timed:
        """Of two rounds."""
        repeats = self.repeats + other.repeats
        return Timed(min(self.median, other.median), min(self.least, other.least), max(self.most, other.most), repeats)


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

    Args:
        advance: called as the work goes on, with shares that add up to the number of steps.

    Raises:
        CapacityError: memory does not suffice.
    """
    found: dict[int, Timed] = {}
    rounds = 1 if target.device.type == "cuda" else CPU_ROUNDS
    for turn in range(rounds):
        for place in random.Random(turn).sample(range(len(steps)), len(steps)):
            timed = time_step(target, draft, shared_vocab, steps[place], batch, context)
            found[place] = found[place].beside(timed) if place in found else timed
            advance(1 / rounds)
    return [found[place] for place in range(len(steps))]


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
def time_step(target: Decoder, draft: Decoder, shared_vocab: int, step: Step, batch: int, context: int) -> Timed:
    """Time a step of `batch` rows of `context` tokens.

    Raises:
        CapacityError: memory does not suffice.
    """
    selection = selection_for(step, target.shape, draft.shape)
    window = step.budget if step.windowed else None
    policy = make_policy("dustin", selection)
    stepper = Stepper(target, draft, policy, policy.selection, step.depth, shared_vocab, draft_budget=window)
    engine = Engine(stepper)
    state = engine.prepare(batch, capacity_for(context, step.depth))
    fill(stepper, state, context)
    if not state.lengths.is_cuda:
        state.extent = context  # it steps once from there
    try:
        return _timed(engine, state, context)
    finally:
        del engine, state, stepper
        if target.device.type == "cuda":
            gc.collect()  # the graph's memory, before the next step reserves its own
            torch.cuda.empty_cache()


def _timed(engine: Engine, state: State, context: int) -> Timed:
    steps = GPU_STEPS if state.lengths.is_cuda else 1

    def run(count: int) -> float:
        state.lengths.fill_(context)
        _wait(state)
        began = time.perf_counter()
        for _ in range(count):
            to_host(engine.step(state)[1])
        _wait(state)
        return 1e3 * (time.perf_counter() - began) / count

    for _ in range(WARM_UP):
        first = run(1)
    repeats = max(3, min(REPEATS, int(1e3 * LIMIT_S / (first * steps))))
    found = sorted(run(steps) for _ in range(repeats))
    return Timed(found[len(found) // 2], found[0], found[-1], repeats)


def _wait(state: State) -> None:
    if state.lengths.is_cuda:
        torch.cuda.synchronize(state.lengths.device)
