"""The engine: a queue of prompts through a fixed number of rows (continuous batching), with one method.

On a GPU a step is one graph replay and the host reads its tokens while the next one runs; a row that has ended is
stepped once more, which does it no harm. On a CPU a step is read at once.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dustin_runtime import acceptance
from dustin_runtime.audit import Audit, Audits
from dustin_runtime.diagnosis import where_it_breaks
from dustin_runtime.errors import NothingMeasuredError, UsageError
from dustin_runtime.graph import StepGraph, capturable
from dustin_runtime.models.shape import ModelShape, check_context
from dustin_runtime.parallel.watch import LONG
from dustin_runtime.policies.base import Prompted
from dustin_runtime.prompt_store import PromptStore, process
from dustin_runtime.state import State, StepResult
from dustin_runtime.statistics import Statistics
from dustin_runtime.step import Stepper

OnTokens = Callable[[int, list[int]], bool]
OnStep = Callable[[StepResult, Sequence[tuple[int, int] | None]], None]


@dataclass(frozen=True)
class Draw:
    """How one prompt's tokens are drawn: temperature 0 is greedy, top_p 1 is off."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass
class Generation:
    """One prompt and what became of it."""

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    finished: str | None = None
    """`stop` or `length` once it is."""
    steps: int = 0
    accepted: int = 0
    """Drafts accepted, summed over its steps; what a limit cut off the last step counts."""
    read: float = 0.0
    """Prefix tokens that a KV head read, summed over its steps."""


OnEnd = Callable[[int, Generation], None]


@dataclass(frozen=True)
class _Ticket:
    """A step on its way to the host: whose tokens lie in which row, where they arrive, and when."""

    occupants: list[int | None]
    packed: Tensor
    arrived: torch.cuda.Event | None
    result: StepResult
    audited: bool


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
        run = _Run(self, [Generation(prompt) for prompt in prompts], max_new_tokens, on_tokens, on_step, draws, on_end)
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
        run = _Run(self, [Generation(prompt) for prompt in prompts], 1 << 30, None, None, draws, None)
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


def check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, shapes: Iterable[ModelShape]) -> None:
    """Refuse prompts that cannot be continued; the shapes suffice, so this can come before weights are read.

    Raises:
        CapacityError: a prompt with its continuation exceeds a model's context.
        UsageError: a prompt is empty.
    """
    shapes = list(shapes)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"prompt {index}: is empty; give at least one token of text")
        for shape in shapes:
            check_context(shape, len(prompt) + max_new_tokens, f"prompt {index} with its output")


def capacity_beyond(new_tokens: int, depth: int) -> int:
    """Positions that a row needs behind its prompt.

    It may overshoot its last token by a step's drafts, and is stepped on until the host has seen its end.
    """
    return new_tokens + 3 * (depth + 1)


def to_host(packed: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Send a step's result to the host: where it will lie, and the event after which it does."""
    if not packed.is_cuda:
        return packed, None
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return host, arrived


@dataclass
class _Run:
    """One call of `Engine.generate`."""

    engine: Engine
    sequences: list[Generation]
    limit: int
    on_tokens: OnTokens | None
    on_step: OnStep | None
    draws: Sequence[Draw] | None
    on_end: OnEnd | None
    statistics: Statistics = field(default_factory=Statistics)
    occupants: list[int | None] = field(default_factory=list)
    """By row, the index of the sequence that is generated in it."""
    chance: random.Random = field(init=False)
    """Which launches are audited."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.engine.audits.seed if self.engine.audits else 0)

    @property
    def stepper(self) -> Stepper:
        return self.engine.stepper

    def check(self) -> None:
        """Refuse what cannot run."""
        models = (self.stepper.target, self.stepper.draft)
        check_prompts([s.prompt for s in self.sequences], self.limit, (model.shape for model in models if model))
        for draw in self.draws or ():
            if draw.temperature < 0 or not 0 < draw.top_p <= 1:
                raise UsageError(f"temperature {draw.temperature}, top-p {draw.top_p}: give 0 or more, and 0 to 1")
            if (draw.temperature and not self.stepper.sampled) or (draw.top_p < 1 and not self.stepper.nucleus):
                raise UsageError("a temperature or top-p is asked of a stepper that was built for greedy decoding")
        self.statistics.accepted_at = [0] * self.stepper.depth

    def serve(self, state: State) -> None:
        """Step until every sequence has ended."""
        self.occupants = [None] * state.rows
        waiting = deque(range(len(self.sequences)))
        late = 1 if self.engine.graph and not self.on_step else 0
        under_way: deque[_Ticket] = deque()
        while True:
            self._fill(state, waiting)
            if any(occupant is not None for occupant in self.occupants):
                under_way.append(self._launch(state))
            elif not under_way:
                return
            if len(under_way) > late or all(occupant is None for occupant in self.occupants):
                self._read(state, under_way.popleft())

    def _fill(self, state: State, waiting: deque[int]) -> None:
        """Prefill waiting prompts into free rows."""
        for row, occupant in enumerate(self.occupants):
            while occupant is None and waiting:
                if self.engine.graph:  # the step under way is not part of the prefill
                    with self.stepper.target.watched():
                        torch.cuda.current_stream(state.lengths.device).synchronize()
                began = time.perf_counter()
                index = waiting.popleft()
                self.occupants[row] = index
                with self.stepper.target.watched(LONG):
                    first = self.admit(state, row, index)
                self.statistics.prefill_seconds += time.perf_counter() - began
                self._emit(index, [first])
                occupant = self._release(state, row)

    def admit(self, state: State, row: int, index: int) -> int:
        """Prefill a prompt into a row; returns its first token."""
        stepper, prompt, policy = self.stepper, self.sequences[index].prompt, self.stepper.policy
        target, store, last = stepper.target, self.engine.prompts, policy.prompt_queries
        draw = self.draws[index] if self.draws else Draw()
        heads = stepper.history_heads
        row_cache = state.target_cache.row(row)
        if store:
            prompted, hidden = store.target(target, prompt, stepper.kv_dtype).copied(row_cache, last)
        else:
            observed = range(target.shape.layers) if last else heads.layers if heads else ()
            prompted, hidden = process(target, row_cache, prompt, layers=observed, last=last, mass=policy.prompt_mass)
        logits = target.logits(hidden)
        self._require_finite(logits, index, "target")
        drafted = self._admit_to_draft(state, row, index) if stepper.draft else None
        if state.memory:
            state.memory.admit(row, prompted, drafted)
        if state.draft_lists and drafted:
            state.draft_lists.take(row, drafted)
        state.sampling.write(row, draw.temperature, draw.top_p, draw.seed)
        first = self._first(state, row, logits[: stepper.shared_vocab], len(prompt))
        state.lengths[row] = len(prompt)
        state.recent[row, 0] = prompt[-1]
        state.recent[row, 1] = first
        if heads and state.history_query is not None:
            state.history_query[row] = heads.gather_last([prompted.queries])[0]
        state.active[row] = True
        if not self.engine.graph:  # the plain attention is shown no more of the cache than it needs
            state.extent = max(self._longest(), len(prompt))
        return first

    def _admit_to_draft(self, state: State, row: int, index: int) -> Prompted | None:
        """The same for the draft, on the rank that drafts the row: what fails there fails on all. None on others."""
        if (blocks := state.blocks) is None:
            return self._prefill_draft(state, row, index)
        with blocks.ranks.alike():
            place = blocks.place(row)
            return None if place is None else self._prefill_draft(state, place, index)

    def _prefill_draft(self, state: State, row: int, index: int) -> Prompted:
        """Prefill a prompt into a row of the draft's cache."""
        draft, prompt, last = self.stepper.draft, self.sequences[index].prompt, self.stepper.policy.prompt_queries
        assert draft is not None and state.draft_cache is not None
        kept, whole, store = state.draft_cache.row(row), state.draft_prefill, self.engine.prompts
        if store:
            prompted, hidden = store.draft(draft, prompt).copied(whole or kept, last)
        else:
            layers = range(draft.shape.layers) if last else ()
            prompted, hidden = process(draft, whole or kept, prompt, layers=layers, last=last)
        if whole:
            kept.take(whole, len(prompt))
        self._require_finite(hidden, index, "draft")
        return prompted

    def _first(self, state: State, row: int, logits: Tensor, position: int) -> int:
        if not self.stepper.sampled:
            return int(logits.argmax())
        sampling, at = state.sampling, slice(row, row + 1)
        wanted = acceptance.probabilities(
            logits.view(1, 1, -1), sampling.temperature[at], sampling.top_p[at], nucleus=self.stepper.nucleus
        )
        place = torch.full((1, 1), position, device=logits.device)
        u = acceptance.uniform(sampling.seed[at].unsqueeze(1), place, acceptance.FINAL)
        return int(acceptance.draw(wanted, u))

    def _launch(self, state: State) -> _Ticket:
        audits = self.engine.audits
        # Of every launch, audited or not, so that which ones are depends on the seed alone.
        audited = audits is not None and self.chance.random() < audits.share
        result, packed = self.engine.step(state, audited) if audited else self.engine.step(state)
        self.statistics.launches += 1
        return _Ticket(list(self.occupants), *to_host(packed), result, audited)

    def _read(self, state: State, ticket: _Ticket) -> None:
        """Take a step's tokens to the host and judge which rows end."""
        if ticket.arrived:
            with self.stepper.target.watched():
                ticket.arrived.synchronize()
        if self.on_step:
            whose = [None if index is None else (index, len(self.sequences[index].tokens)) for index in self.occupants]
            self.on_step(ticket.result, whose)
        for row, (index, values) in enumerate(zip(ticket.occupants, ticket.packed.tolist(), strict=True)):
            if index is None or self.occupants[row] != index:
                continue  # it had ended when this step began
            tokens, (count, read, finite, *rest) = values[: self.stepper.depth + 1], values[self.stepper.depth + 1 :]
            if not finite:
                self._not_finite(index)
            self.statistics.steps += 1
            self.statistics.read += read
            if ticket.audited:
                self.statistics.audits.append(Audit(index, rest.pop(), int(count)))
            if rest:
                self.statistics.full = (self.statistics.full or 0) + int(rest[0])
            sequence = self.sequences[index]
            sequence.steps += 1
            sequence.accepted += int(count) - 1
            sequence.read += read
            for position in range(int(count) - 1):
                self.statistics.accepted_at[position] += 1
            self.statistics.emitted += self._emit(index, [int(token) for token in tokens[: int(count)]])
            self._release(state, row)
        if not self.engine.graph:
            state.extent = self._longest()

    def _longest(self) -> int:
        """Tokens of the longest sequence under way that the target has processed."""
        present = (self.sequences[index] for index in self.occupants if index is not None)
        return max((len(sequence.prompt) + len(sequence.tokens) - 1 for sequence in present), default=1)

    def _emit(self, index: int, new: list[int]) -> int:
        """Append what a sequence may still take of `new`; return how many tokens that was."""
        sequence = self.sequences[index]
        new = new[: self.limit - len(sequence.tokens)]
        for place, token in enumerate(new):
            if token in self.engine.stop_ids:
                new, sequence.finished = new[: place + 1], "stop"
                break
        sequence.tokens.extend(new)
        if self.on_tokens and self.on_tokens(index, new):
            sequence.finished = "stop"
        if sequence.finished is None and len(sequence.tokens) >= self.limit:
            sequence.finished = "length"
        if sequence.finished and self.on_end:
            self.on_end(index, sequence)
        return len(new)

    def _release(self, state: State, row: int) -> int | None:
        """Free the row if its sequence has ended; returns who is in it."""
        index = self.occupants[row]
        if index is not None and self.sequences[index].finished:
            self.occupants[row] = index = None
            state.active[row] = False
            state.lengths[row] = 1  # an idle row reads next to nothing
        return index

    def _require_finite(self, values: Tensor, index: int, side: str) -> None:
        if not bool(values.isfinite().all()):
            model = self.stepper.target if side == "target" else self.stepper.draft
            assert model is not None
            raise NothingMeasuredError(
                f"prompt {index}: what the {side} makes of it is not finite, "
                f"{where_it_breaks(model, self.sequences[index].prompt)}; try --dtype float32, or download it again"
            )

    def _not_finite(self, index: int) -> None:
        sequence = self.sequences[index]
        text = [*sequence.prompt, *sequence.tokens]
        raise NothingMeasuredError(
            f"prompt {index}: logits are not finite after {len(sequence.tokens)} tokens, "
            f"{where_it_breaks(self.stepper.target, text)}; try --dtype float32"
        )
