"""Text as it is generated: whole characters only, and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

UNFINISHED = "�"
"""What a tokenizer decodes to while a character's bytes are incomplete."""


class TextStream:
    """Decodes the rows of a batch as their tokens arrive.

    Args:
        write: called with (row, new text).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        rows: int,
        stop: Sequence[str] = (),
        write: Callable[[int, str], None] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.write = write
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._sent = [0] * rows

    def feed(self, row: int, tokens: list[int]) -> bool:
        """Take new tokens of a row; returns True once one of the stop strings stands in its text."""
        self._tokens[row] += tokens
        if not (self.stop or self.write):
            return False  # decoding all of a row at every step is not free
        text = self.text(row)
        cut = self._cut(text)
        if self.write and not text.endswith(UNFINISHED):
            # Hold back what could be the beginning of a stop string.
            ready = text[:cut] if cut is not None else text[: len(text) - self._held_back(text)]
            if len(ready) > self._sent[row]:
                self.write(row, ready[self._sent[row] :])
                self._sent[row] = len(ready)
        return cut is not None

    def finish(self, row: int) -> str:
        """The row's final text, without what follows a stop string; writes what was held back."""
        text = self.text(row)
        cut = self._cut(text)
        text = text if cut is None else text[:cut]
        if self.write and len(text) > self._sent[row]:
            self.write(row, text[self._sent[row] :])
            self._sent[row] = len(text)
        return text

    def text(self, row: int) -> str:
        """Everything decoded so far."""
        return str(self.tokenizer.decode(self._tokens[row], skip_special_tokens=True))

    def _cut(self, text: str) -> int | None:
        places = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        return min(places) if places else None

    def _held_back(self, text: str) -> int:
        return max(
            (size for stop in self.stop for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0
        )
