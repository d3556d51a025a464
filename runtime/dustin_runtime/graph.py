"""Work captured in a CUDA graph: the host launches it once and waits for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from dustin_runtime.kernels import usable
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.state import State, StepResult
from dustin_runtime.step import Stepper

WARM_UPS = 2
"""Eager runs before the capture: kernels are compiled and scratch memory grows to its size."""
T = TypeVar("T")


class Graph(Generic[T]):
    """Kernels on buffers that keep their place, captured once.

    Args:
        work: what is captured, run `WARM_UPS` times before: what it does to buffers is done so often.
        reads: whatever else the work reads. The graph knows addresses alone, so all that has to outlive it.
        priority: of the stream, as torch counts it.

    Attributes:
        result: what `work` returned, which the next replay overwrites.
    """

    def __init__(self, work: Callable[[], T], device: torch.device, *, reads: object = None, priority: int = 0) -> None:
        stream = torch.cuda.Stream(device, priority=priority)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        self._read = (work, reads)
        with torch.cuda.graph(self._graph, stream=stream):
            self.result: T = work()

    def __call__(self) -> T:
        """Do it once more."""
        self._graph.replay()
        return self.result


class StepGraph(Graph[StepResult]):
    """One method on one state, which keeps its buffers.

    Args:
        state: no row of it may be active, for the warm-up steps them all.
        audited: see `Stepper`.
    """

    def __init__(self, stepper: Stepper, state: State, audited: bool = False) -> None:
        reads = (state, stepper.target.rope, stepper.draft.rope if stepper.draft else None)
        # Where some kernels score beside the drafting, those of the drafting go first.
        priority = -1 if stepper.beside else 0
        super().__init__(lambda: stepper(state, audited), stepper.target.device, reads=reads, priority=priority)


def capturable(*models: Decoder | None) -> bool:
    """Whether kernels serve the models: a graph then has all that they do. A pipeline's passes are eager."""
    return all(
        usable(model.weights.norm, heads_of=model.shape.head_size) and (model.split is None or model.split.in_graphs)
        for model in models
        if model
    )
