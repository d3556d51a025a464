"""What is asked of the engine for each prompt, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dustin_runtime.errors import UsageError
from dustin_runtime.models.shape import ModelShape, check_context
from dustin_runtime.state import StepResult

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
