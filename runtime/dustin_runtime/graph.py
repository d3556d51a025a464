"""A step captured in one CUDA graph: the host launches it once and waits for nothing."""

from __future__ import annotations

import torch

from dustin_runtime.kernels import usable
from dustin_runtime.step import State, Stepper, StepResult

WARM_UPS = 2
"""Eager runs before the capture: kernels are compiled and scratch memory grows to its size."""


class StepGraph:
    """One method on one state, which keeps its buffers.

    Args:
        state: no row of it may be active, for the warm-up steps them all.

    Attributes:
        result: what the last replay did, in tensors that the next one overwrites.
    """

    def __init__(self, stepper: Stepper, state: State) -> None:
        # Where some kernels score beside the drafting, those of the drafting go first.
        stream = torch.cuda.Stream(stepper.target.device, priority=-1 if stepper.beside else 0)
        stream.wait_stream(torch.cuda.current_stream(stepper.target.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                stepper(state)
        torch.cuda.current_stream(stepper.target.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # The graph knows addresses alone: what it reads has to outlive it.
        self._read = (stepper, state, stepper.target.rope, stepper.draft.rope if stepper.draft else None)
        with torch.cuda.graph(self._graph, stream=stream):
            self.result: StepResult = stepper(state)

    def __call__(self) -> StepResult:
        """Advance the state by one step."""
        self._graph.replay()
        return self.result


def capturable(stepper: Stepper) -> bool:
    """Whether kernels serve the stepper's models: a graph then has all of a step. A pipeline's steps are eager."""
    models = [model for model in (stepper.target, stepper.draft) if model]
    return all(
        usable(model.weights.norm, heads_of=model.shape.head_size) and (model.split is None or model.split.in_graphs)
        for model in models
    )
