"""The eager engine: prompts in, tokens out, with the figures that judge a method."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.tap import QueryTap
from dustin_runtime.errors import NothingMeasuredError, UsageError
from dustin_runtime.models.shape import check_context
from dustin_runtime.prefill import prefill
from dustin_runtime.step import State, Stepper, StepResult


@dataclass
class Generation:
    """One prompt and what became of it."""

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    finished: str | None = None
    """`stop` or `length` once it is."""


@dataclass
class Statistics:
    """Figures of one run; a step counts once per active row."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    emitted: int = 0
    """Tokens emitted by steps: the first token of a sequence comes from its prefill."""
    accepted_at: list[int] = field(default_factory=list)
    """How often the draft at position 1, 2, ... of its step was accepted."""
    read: float = 0.0
    """Prefix tokens that a KV head read, summed over steps."""

    @property
    def tau(self) -> float:
        """Tokens per step, the target's own included; what a limit cut off the last step counts."""
        return 1 + sum(self.accepted_at) / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.emitted / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Share of steps that accepted the draft at each position; a rejection ends a step's run."""
        return [count / self.steps for count in self.accepted_at] if self.steps else []

    @property
    def kept(self) -> float:
        """Mean prefix tokens that a KV head reads per step."""
        return self.read / self.steps if self.steps else 0.0

    def as_dict(self) -> dict[str, object]:
        """The figures for a report."""
        return {
            "tokens": self.emitted,
            "steps": self.steps,
            "tokens_per_s": self.tokens_per_second,
            "tau": self.tau,
            "acceptance_per_position": self.acceptance,
            "kept_tokens_per_step": self.kept,
            "prefill_s": self.prefill_seconds,
            "decode_s": self.decode_seconds,
        }


class Engine:
    """Runs a fixed batch of prompts to their ends with one method."""

    def __init__(self, stepper: Stepper, stop_ids: frozenset[int] = frozenset()) -> None:
        self.stepper = stepper
        self.stop_ids = stop_ids

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        on_tokens: Callable[[int, list[int]], bool] | None = None,
        on_step: Callable[[StepResult, list[int]], None] | None = None,
    ) -> tuple[list[Generation], Statistics]:
        """Continue every prompt greedily.

        Args:
            prompts: token ids, each at least one.
            on_tokens: called with (row, new tokens); returning True ends that row (a stop string was seen).
            on_step: called with every step's result and the rows' numbers of emitted tokens before it.

        Raises:
            CapacityError: a prompt with its continuation exceeds a model's context.
            NothingMeasuredError: a model computes what is not finite.
            UsageError: a prompt is empty.
        """
        sequences = [Generation(prompt) for prompt in prompts]
        self._check(sequences, max_new_tokens)
        statistics = Statistics(accepted_at=[0] * self.stepper.depth)
        began = time.perf_counter()
        state, first = self._start(sequences, max_new_tokens)
        for row, token in enumerate(first):
            self._emit(sequences, row, [token], max_new_tokens, on_tokens)
        statistics.prefill_seconds = time.perf_counter() - began

        began = time.perf_counter()
        while running := [row for row, sequence in enumerate(sequences) if sequence.finished is None]:
            state.active = torch.tensor([s.finished is None for s in sequences], device=state.lengths.device)
            result = self.stepper(state)
            if on_step:
                on_step(result, [len(sequence.tokens) for sequence in sequences])
            self._read(result, running, sequences, statistics, max_new_tokens, on_tokens)
            state.extent = int(state.lengths.max())
        statistics.decode_seconds = time.perf_counter() - began
        return sequences, statistics

    def _check(self, sequences: list[Generation], max_new_tokens: int) -> None:
        for index, sequence in enumerate(sequences):
            if not sequence.prompt:
                raise UsageError(f"prompt {index}: is empty; give at least one token of text")
            for model in (self.stepper.target, self.stepper.draft):
                if model is not None:
                    check_context(model.shape, len(sequence.prompt) + max_new_tokens, f"prompt {index} with its output")

    def _start(self, sequences: list[Generation], max_new_tokens: int) -> tuple[State, list[int]]:
        """Prefill every row; return the state and the first token of each."""
        stepper = self.stepper
        lengths = [len(sequence.prompt) for sequence in sequences]
        # A row may overshoot its last token by one step's drafts, and is stepped on (inactive) until all are done.
        capacity = max(lengths) + max_new_tokens + 2 * (stepper.depth + 1)
        target_cache = stepper.target.cache(len(sequences), capacity)
        draft_cache = stepper.draft.cache(len(sequences), capacity) if stepper.draft else None
        first: list[int] = []
        queries: list[Tensor] = []
        for row, sequence in enumerate(sequences):
            tap = QueryTap(dense_attention, stepper.history_heads())
            hidden = prefill(stepper.target, target_cache.row(row), sequence.prompt, attend=tap)
            _require_finite(hidden, row, "target")
            first.append(int(stepper.target.logits(hidden)[: stepper.shared_vocab].argmax()))
            queries.extend(query[0, -1] for query in tap.queries.values())
            if stepper.draft and draft_cache:
                _require_finite(prefill(stepper.draft, draft_cache.row(row), sequence.prompt), row, "draft")
        device = stepper.target.device
        return State(
            target_cache,
            draft_cache,
            lengths=torch.tensor(lengths, device=device),
            recent=torch.tensor(
                [[s.prompt[-1], token] for s, token in zip(sequences, first, strict=True)], device=device
            ),
            history_query=torch.stack(queries) if queries else None,
            active=torch.ones(len(sequences), dtype=torch.bool, device=device),
            extent=max(lengths),
        ), first

    def _read(
        self,
        result: StepResult,
        running: list[int],
        sequences: list[Generation],
        statistics: Statistics,
        max_new_tokens: int,
        on_tokens: Callable[[int, list[int]], bool] | None,
    ) -> None:
        """Take a step's tokens to the host and judge which rows end."""
        tokens, counts, read, finite = (x.tolist() for x in (result.tokens, result.count, result.read, result.finite))
        for row in running:
            if not finite[row]:
                raise NothingMeasuredError(
                    f"row {row}: logits are not finite after {len(sequences[row].tokens)} tokens; try --dtype float32"
                )
            statistics.steps += 1
            statistics.read += read[row]
            for position in range(counts[row] - 1):
                statistics.accepted_at[position] += 1
            statistics.emitted += self._emit(sequences, row, tokens[row][: counts[row]], max_new_tokens, on_tokens)

    def _emit(
        self,
        sequences: list[Generation],
        row: int,
        new: list[int],
        max_new_tokens: int,
        on_tokens: Callable[[int, list[int]], bool] | None,
    ) -> int:
        """Append what a row may still take of `new`; return how many tokens that was."""
        sequence = sequences[row]
        new = new[: max_new_tokens - len(sequence.tokens)]
        for index, token in enumerate(new):
            if token in self.stop_ids:
                new, sequence.finished = new[: index + 1], "stop"
                break
        sequence.tokens.extend(new)
        if on_tokens and on_tokens(row, new):
            sequence.finished = "stop"
        if sequence.finished is None and len(sequence.tokens) >= max_new_tokens:
            sequence.finished = "length"
        return len(new)


def _require_finite(hidden: Tensor, row: int, side: str) -> None:
    if not bool(hidden.isfinite().all()):
        raise NothingMeasuredError(
            f"row {row}: what the {side} makes of the prompt is not finite; try --dtype float32, or download it again"
        )
