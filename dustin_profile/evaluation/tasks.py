"""What every evaluation by generation has in common: items to continue, and a score of what came out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Item(NamedTuple):
    """One prompt to continue.

    Attributes:
        id: unique in its task, and the same in every run: what was done is found by it after an interruption.
        document: the unit of intervals; items of one document resemble each other.
        prompt: token ids; an `array` holds thousands of long prompts in a tenth of a list's memory.
        new_tokens: the most tokens to generate.
        stop: strings that end the text (they are not part of it); line breaks that the text begins with end nothing.
        group: cells of a table that it belongs to, such as {"task": "qasper"} or {"length": "4096", "depth": "0.5"}.
        answers: references that the task scores against, as JSON values: they are part of an item's hash.
    """

    id: str
    document: str
    prompt: Sequence[int]
    new_tokens: int
    stop: tuple[str, ...]
    group: Mapping[str, str]
    answers: Any


class Task(Protocol):
    """Where items come from and how a text is judged."""

    @property
    def name(self) -> str:
        """For results, such as `longbench`."""
        ...

    @property
    def inputs(self) -> dict[str, Any]:
        """All that decides the items, as JSON: a run that is continued must have the same."""
        ...

    def items(self) -> Iterable[Item]:
        """In a fixed order, the same in every run."""
        ...

    def score(self, item: Item, text: str) -> dict[str, float]:
        """Figures in [0, 1] by name; the first is the one that tables show."""
        ...
