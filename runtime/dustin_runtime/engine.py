"""The engine: a queue of prompts through a fixed number of rows (continuous batching), with one method.

On a GPU a step is one graph replay and the host reads its tokens while the next one runs; a row that has ended is
stepped once more, which does it no harm. On a CPU a step is read at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from dustin_runtime.audit import Audits
from dustin_runtime.errors import UsageError
from dustin_runtime.generation import Draw, Generation, OnEnd, OnStep, OnTokens, capacity_beyond
from dustin_runtime.graph import StepGraph, capturable
from dustin_runtime.parallel.watch import LONG
from dustin_runtime.prompt_store import PromptStore
from dustin_runtime.serving import Run
from dustin_runtime.state import State, StepResult
from dustin_runtime.statistics import Statistics
from dustin_runtime.step import Stepper


class Engine:
    """Runs prompts to their ends with one method.

    Args:
        stop_ids: ids that end a sequence.
        rows: sequences that are stepped together; all prompts of a call if not given.
        graph: whether a step is one CUDA graph; by default wherever kernels serve the model.
        prompts: where prompts are processed, or were for another engine of the same models; None processes them here.
        audits: which steps are verified in full as well, and measured; None for none.
    """

    def __init__(
        self,
        stepper: Stepper,
        stop_ids: frozenset[int] = frozenset(),
        *,
        rows: int | None = None,
        graph: bool | None = None,
        prompts: PromptStore | None = None,
        audits: Audits | None = None,
    ) -> None:
        if audits and stepper.target.split:
            raise UsageError("audits verify in full in one process; this target is split over several")
        self.stepper = stepper
        self.audits = audits
        self.stop_ids = stop_ids
        self.rows = rows
        self.prompts = prompts
        self.graph = capturable(stepper.target, stepper.draft) if graph is None else graph
        self._state: State | None = None
        self._captured: StepGraph | None = None
        self._captured_audit: StepGraph | None = None

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        on_tokens: OnTokens | None = None,
        on_step: OnStep | None = None,
        draws: Sequence[Draw] | None = None,
        on_end: OnEnd | None = None,
    ) -> tuple[list[Generation], Statistics]:
        """Continue every prompt.

        Args:
            prompts: token ids, each at least one.
            on_tokens: called with (prompt's index, new tokens); returning True ends it (a stop string was seen).
            on_step: called with every step's result and, by row, whose it is: the prompt's index and how many of its
                tokens had been emitted before; None for an idle row. Each step is then read before the next begins.
            draws: how each prompt's tokens are drawn; greedily if not given.
            on_end: called with a prompt's index and what became of it once its last tokens have been handed to
                `on_tokens`.

        Returns:
            One generation per prompt. After an interruption (Ctrl-C) `finished` of some is None.

        Raises:
            CapacityError: a prompt with its continuation exceeds a model's context, or memory does not suffice.
            NothingMeasuredError: a model computes what is not finite; says for which prompt and in which layer.
            UsageError: a prompt is empty, or draws do not fit the stepper.
        """
        run = Run(self, [Generation(prompt) for prompt in prompts], max_new_tokens, on_tokens, on_step, draws, on_end)
        run.check()
        began = time.perf_counter()
        beyond = capacity_beyond(max_new_tokens, self.stepper.depth)
        state = self.prepare(len(prompts), max(map(len, prompts)) + beyond)
        run.statistics.setup_seconds = time.perf_counter() - began
        try:
            run.serve(state)
        except KeyboardInterrupt:
            run.statistics.interrupted = True
        spent = run.statistics.setup_seconds + run.statistics.prefill_seconds
        run.statistics.decode_seconds = time.perf_counter() - began - spent
        return run.sequences, run.statistics

    def prepare(self, prompts: int, capacity: int) -> State:
        """`reserve`, and capture the step, which over ranks takes all of them."""
        held = self.reserve(prompts, capacity)
        if self.graph and self._captured is None:
            with self.stepper.target.watched(LONG):
                self._captured = StepGraph(self.stepper, held)
                if self.audits:
                    self._captured_audit = StepGraph(self.stepper, held, audited=True)
        return held

    def reserve(self, prompts: int, capacity: int) -> State:
        """Reserve buffers of `capacity` positions a row; what is large enough already is kept.

        Raises:
            CapacityError: memory does not suffice.
        """
        rows = min(self.rows or prompts, prompts)
        held = self._state
        if held is None or held.rows != rows or held.target_cache.capacity < capacity:
            held = self._state = self._captured = self._captured_audit = None  # freed before its successor is reserved
            held = self._state = self.stepper.state(rows, capacity)
        held.lengths.fill_(1)  # whatever a run left that was broken off
        held.active.fill_(False)
        return held

    @torch.inference_mode()
    def fill(self, prompts: Sequence[Sequence[int]], capacity: int, draws: Sequence[Draw] | None = None) -> State:
        """Prefill one prompt into each row and leave the stepping to the caller, who measures it.

        Raises:
            NothingMeasuredError: a model computes what is not finite.
        """
        state = self.prepare(len(prompts), capacity)
        run = Run(self, [Generation(prompt) for prompt in prompts], 1 << 30, None, None, draws, None)
        run.occupants = list(range(len(prompts)))
        with self.stepper.target.watched(LONG):
            for row in range(len(prompts)):
                run.admit(state, row, row)
        state.extent = capacity - self.stepper.depth - 1
        return state

    def step(self, state: State, audited: bool = False) -> tuple[StepResult, Tensor]:
        """Launch a step; returns its result and `StepResult.packed` of it, both on the device."""
        captured = self._captured_audit if audited else self._captured
        result = captured() if captured else self.stepper(state, audited)
        return result, result.packed
