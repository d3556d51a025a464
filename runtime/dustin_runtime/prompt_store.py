"""Prompts that models have processed: once per engine, or once for the engines of all methods."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.tap import MassTap, QueryTap
from dustin_runtime.cache import KVCache
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.policies.base import Prompted
from dustin_runtime.prefill import chunk_for, prefill


class Processed(NamedTuple):
    """A prompt in a cache, and what its last token left."""

    prompted: Prompted
    hidden: Tensor
    """[hidden] of the last token."""

    def copied(self, cache: KVCache, last: int) -> Processed:
        """The same in another one-row cache that keeps all, with the queries of `last` tokens, at least one."""
        held = self.prompted
        cache.take(held.cache, held.length)
        queries = {layer: q[:, -max(last, 1) :] for layer, q in held.queries.items()}
        return Processed(replace(held, cache=cache, queries=queries), self.hidden)


def mark_of(prompt: Sequence[int]) -> int:
    """`Prompted.mark` of a prompt that is continued with seed 0."""
    return zlib.crc32(array("q", prompt).tobytes())


def process(
    model: Decoder, cache: KVCache, prompt: Sequence[int], *, layers: Iterable[int], last: int = 0, mass: bool = False
) -> Processed:
    """Prefill a prompt into an empty one-row cache.

    Args:
        layers: whose queries are kept, those of the last token and of `last` tokens if that is more.
        last: as `Policy.prompt_queries`.
        mass: as `Policy.prompt_mass`.
    """
    summed = MassTap(dense_attention)
    tap = QueryTap(summed if mass else dense_attention, layers, last=max(last, 1))
    hidden = prefill(model, cache, prompt, attend=tap, chunk=chunk_for(model.device), tail=last)
    return Processed(Prompted(len(prompt), cache, tap.queries, summed.received, mark_of(prompt)), hidden)


class PromptStore:
    """Prompts for engines of one pair: the first engine that asks has them processed, the others get copies.

    Args:
        last: most queries of a prompt's end that any policy asks for. What a prompt's last chunk holds depends on it,
            so the same value should be given whatever methods are compared: roundings then stay the same.
        mass: whether a policy asks what the positions received.
    """

    def __init__(self, last: int, mass: bool = False) -> None:
        self._last = last
        self._mass = mass
        self._held: dict[tuple[str, torch.dtype | None, tuple[int, ...]], Processed] = {}

    def target(self, model: Decoder, prompt: Sequence[int], kv_dtype: torch.dtype | None = None) -> Processed:
        """A prompt as the target has processed it, in a cache of `kv_dtype` (`Stepper`).

        Raises:
            CapacityError: memory does not suffice.
        """
        return self._get("target", model, prompt, self._mass, kv_dtype)

    def draft(self, model: Decoder, prompt: Sequence[int]) -> Processed:
        """The same of the draft, without what the positions received."""
        return self._get("draft", model, prompt, False)

    def _get(
        self, side: str, model: Decoder, prompt: Sequence[int], mass: bool, kv_dtype: torch.dtype | None = None
    ) -> Processed:
        key = (side, kv_dtype, tuple(prompt))
        if key not in self._held:
            cache = model.cache(1, len(prompt), kv_dtype)
            layers = range(model.shape.layers)
            self._held[key] = process(model, cache, prompt, layers=layers, last=self._last, mass=mass)
        return self._held[key]

    def bytes_of(self, shapes: Iterable[ModelShape], tokens: int, element_bytes: int) -> int:
        """What a prompt of so many tokens takes: caches and queries of both models, and what positions received."""
        return sum(
            shape.kv_bytes(tokens, element_bytes)
            + shape.layers * self._last * shape.query_heads * shape.head_size * element_bytes
            + self._mass * shape.layers * shape.kv_heads * tokens * 4
            for shape in shapes
        )
