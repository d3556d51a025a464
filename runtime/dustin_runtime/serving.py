"""One call of the engine: prompts into rows, steps launched, tokens read, rows freed."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dustin_runtime import acceptance
from dustin_runtime.audit import Audit
from dustin_runtime.diagnosis import where_it_breaks
from dustin_runtime.errors import NothingMeasuredError, UsageError
from dustin_runtime.generation import Draw, Generation, OnEnd, OnStep, OnTokens, check_prompts
from dustin_runtime.parallel.watch import LONG
from dustin_runtime.policies.base import Prompted
from dustin_runtime.prompt_store import process
from dustin_runtime.state import State, StepResult
from dustin_runtime.statistics import Statistics
from dustin_runtime.step import Stepper

if TYPE_CHECKING:
    from dustin_runtime.engine import Engine


@dataclass(frozen=True)
class _Ticket:
    """A step on its way to the host: whose tokens lie in which row, where they arrive, and when."""

    occupants: list[int | None]
    packed: Tensor
    arrived: torch.cuda.Event | None
    result: StepResult
    audited: bool


@dataclass
class Run:
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
            state.memory.admit(row, replace(prompted, mark=prompted.mark ^ draw.seed), drafted)
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


def to_host(packed: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Send a step's result to the host: where it will lie, and the event after which it does."""
    if not packed.is_cuda:
        return packed, None
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return host, arrived
