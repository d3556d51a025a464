"""LongBench as a task: prompts as its own script makes them, scores as its own evaluation gives them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dustin_profile.choices import Template
from dustin_profile.encoder import PlainEncoder
from dustin_profile.evaluation.longbench.data import Row
from dustin_profile.evaluation.longbench.metrics import METRICS, require_installed
from dustin_profile.evaluation.longbench.table import TaskEntry, load_table
from dustin_profile.evaluation.tasks import Item
from dustin_runtime.errors import UsageError
from dustin_runtime.files import digest_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VERSION = 1
"""Raised when the same rows would become other prompts or scores."""
SEAM = 8
"""Tokens set aside because the two halves of a prompt that was cut may tokenise into a few more than they had."""
LEAST = 16
"""Fewest tokens that a prompt may be cut to."""


class References(NamedTuple):
    """What a sample is scored against."""

    task: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]


class LongBench:
    """Its rows as items.

    A prompt that is too long loses its middle, in tokens, before it is put into the chat template, as in LongBench's
    own script. A text gets the best of its scores against all references.

    Args:
        rows: by task, in the order in which they are to be run.
        context: tokens that the models can hold, the generated ones included.
        max_length: the most tokens of a prompt before the chat template; by default what fits into `context`.
        template: `auto` uses the tokenizer's chat template where it has one and the task is meant for one.

    Raises:
        MissingError: the package of a metric is not installed.
        UsageError: `max_length` is too small, the context leaves no room, or there is no chat template for `chat`.
    """

    name = "longbench"

    def __init__(
        self,
        rows: Mapping[str, Sequence[Row]],
        tokenizer: PreTrainedTokenizerFast,
        *,
        context: int,
        max_length: int | None = None,
        template: Template = "auto",
    ) -> None:
        if template == "chat" and not tokenizer.chat_template:
            raise UsageError("--template chat: the tokenizer has no chat template; use raw")
        if max_length is not None and max_length < LEAST:
            raise UsageError(f"--max-length {max_length}: must be at least {LEAST}")
        table = load_table()
        for task in rows:
            require_installed(table[task].metric, task)
        self.rows = rows
        self.chat = tokenizer if tokenizer.chat_template and template != "raw" else None
        self.encoder = PlainEncoder(tokenizer)
        self.max_length = max_length
        self.context = context
        self._limits = {task: self._limit(task, table[task]) for task in rows}

    @property
    def inputs(self) -> dict[str, Any]:
        """Which rows there are is not among them: every item's hash is kept with its result."""
        return {"version": VERSION, "context": self.context, "max_length": self.max_length, "chat": bool(self.chat)}

    def items(self) -> Iterator[Item]:
        """Task by task."""
        table = load_table()
        for task, rows in self.rows.items():
            entry = table[task]
            for row in rows:
                yield Item(
                    id=f"{task}#{row.number:04d}",
                    document=digest_text(row.context)[:16],  # several questions may be asked of one context
                    prompt=array("i", self._prompt(entry, row, self._limits[task])),
                    new_tokens=entry.new_tokens,
                    stop=entry.stop,
                    group={"category": entry.category, "task": task},
                    answers=References(task, row.answers, row.classes),
                )

    def score(self, item: Item, text: str) -> dict[str, float]:
        """The task's own metric under the one name `score`, so that tasks can be averaged."""
        references: References = item.answers
        entry = load_table()[references.task]
        if entry.first_line:
            text = text.lstrip("\n").split("\n")[0]
        metric = METRICS[entry.metric]
        return {"score": max(metric(text, answer, references.classes) for answer in references.answers)}

    def _limit(self, task: str, entry: TaskEntry) -> int:
        """The most tokens of a task's prompts before the template."""
        if self.max_length is not None:
            return self.max_length
        around = len(self._in_template("")) if self.chat and entry.chat else 0
        room = self.context - entry.new_tokens - around - SEAM
        if room < LEAST:
            raise UsageError(f"task {task}: the models' context of {self.context} tokens leaves no room for a prompt")
        return room

    def _prompt(self, entry: TaskEntry, row: Row, limit: int) -> list[int]:
        text = without_middle(entry.prompt.format(context=row.context, input=row.input), self.encoder, limit)
        if self.chat and entry.chat:
            return self._in_template(text)
        return [*self.encoder.bos, *self.encoder(text)]

    def _in_template(self, text: str) -> list[int]:
        assert self.chat
        messages = [{"role": "user", "content": text}]
        rendered = self.chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.chat.backend_tokenizer.encode(rendered, add_special_tokens=False).ids)


def without_middle(text: str, encoder: PlainEncoder, limit: int) -> str:
    """A text of more than `limit` tokens without its middle: its first and last `limit // 2` tokens, joined.

    The tokenizer's own first token counts, as in LongBench. A character that is cut through is kept whole.
    """
    offsets = encoder.encode(text).offsets
    if len(encoder.bos) + len(offsets) <= limit:
        return text
    half = limit // 2
    return text[: offsets[half - len(encoder.bos) - 1][1]] + text[offsets[-half][0] :]
