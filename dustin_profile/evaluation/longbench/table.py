"""The table of tasks: what LongBench defines for each, read from `tasks.yaml`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dustin_runtime.errors import UsageError
from dustin_runtime.validation import read_yaml, suggest

MetricName = Literal["f1", "rouge_l", "classification", "count", "retrieval", "edit_similarity"]


class TaskEntry(BaseModel):
    """One task."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    category: str
    metric: MetricName
    samples: int = Field(ge=1, description="rows that the task has in LongBench: its weight in the weighted average")
    new_tokens: int = Field(ge=1)
    prompt: str = Field(description="with {context} and, in most, {input}")
    chat: bool = Field(default=True, description="whether it is put into a chat template where there is one")
    first_line: bool = Field(default=False, description="whether only the first line of a text is scored")
    stop: tuple[str, ...] = ()


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: dict[str, TaskEntry]


@cache
def load_table() -> dict[str, TaskEntry]:
    """All tasks in LongBench's order."""
    return read_yaml(Path(__file__).with_name("tasks.yaml"), _Table).tasks


def find_task(name: str, place: str) -> TaskEntry:
    """A task by its name.

    Args:
        place: where the name was found, for the error.

    Raises:
        UsageError: there is no such English task.
    """
    table = load_table()
    if name not in table:
        raise UsageError(
            f"{place} {name}: no English task of LongBench{suggest(name, table)} (known: {', '.join(table)})"
        )
    return table[name]
