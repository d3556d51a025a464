"""Which prompts are held in memory together, so that each is processed once for all methods and budgets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from dustin_runtime.policies import POLICIES
from dustin_runtime.prompt_store import PromptStore

if TYPE_CHECKING:
    from dustin_runtime.loading import Pair

T = TypeVar("T")

PROMPT_QUERIES = max(policy.prompt_queries for policy in POLICIES.values())
"""Whatever is compared: see `PromptStore`."""
CPU_BYTES = 2**30
"""Nothing says how much of a CPU's memory a process may have."""


def groups(
    items: Sequence[T],
    tokens: Iterable[int],
    pair: Pair,
    methods: Iterable[str],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    batch: int,
) -> Iterator[tuple[list[T], PromptStore | None]]:
    """Items to be done by all methods before the next ones, and a store for their prompts.

    As many as fit in memory; all of them and no store, so that each method processes its own prompts, where what a
    batch needs does not fit twice.

    Args:
        tokens: of every item's prompt.
        batch: items that are generated at once.
    """
    shapes = [pair.target_shape, pair.draft_shape]
    mass = any(POLICIES[method].prompt_mass for method in methods)
    store = PromptStore(PROMPT_QUERIES, mass)
    sizes = [store.bytes_of(shapes, count, dtype.itemsize) for count in tokens]
    needed = batch * max(sizes)
    room = _room(torch.device(device), needed)
    if needed > room:
        yield list(items), None
        return
    group: list[T] = []
    taken = 0
    for item, size in zip(items, sizes, strict=True):
        if taken + size > room:
            yield group, store
            group, taken, store = [], 0, PromptStore(PROMPT_QUERIES, mass)
        group.append(item)
        taken += size
    yield group, store


def _room(device: torch.device, needed: int) -> int:
    """Bytes for prompts: half of what the engine's batch leaves of a GPU, counted twice since policies keep things."""
    if device.type != "cuda":
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free + unused - 2 * needed) // 2
