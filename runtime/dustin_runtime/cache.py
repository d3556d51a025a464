"""The key-value cache: static buffers, ragged lengths, rollback by length alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dustin_runtime.errors import CapacityError
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.scaled import E4M3, Held, Scaled, bits, shown


class Ring(NamedTuple):
    """Where positions lie: the first `sink` in their own slots, the others take turns in the `size` slots behind."""

    sink: int
    size: int

    def slots(self, positions: Tensor) -> Tensor:
        """Slots of int64 positions; -1 stays -1."""
        return torch.where(positions < self.sink, positions, self.sink + (positions - self.sink) % self.size)


WHOLE = Ring(0, 1 << 30)
"""Every position has a slot of its own."""


def window_ring(budget: int, depth: int, sink: int) -> Ring:
    """The ring of a draft that reads `budget` tokens of its cache, `sink` of them the first.

    Drafts that a step rejects must not have overwritten what the next one reads: its window reaches back `budget -
    sink` tokens from the last processed one, and `depth` drafts were written beyond, or one more for a last look.
    """
    sink = min(sink, budget - 1)
    return Ring(sink, budget - sink + depth + 2)


class Append(NamedTuple):
    """How a layer's new tokens are rotated (RoPE, arXiv 2104.09864), and where their keys and values go.

    Attributes:
        cos, sin: [positions, head_size / 2] fp32.
        start: [batch] int64, position of each row's first new token.
        keys, values: [batch, slots, kv_heads, head_size] of the layer, where `ring` says.
        more_keys: [batch, capacity, kv_heads, head_size], the keys once more, at their positions; or None.
        key_scale, value_scale: [batch, kv_heads] fp32 that 8-bit keys and values are divided by; None for others.
        first: whether the tokens are the first of their sequences, which set the scales.
    """

    cos: Tensor
    sin: Tensor
    start: Tensor
    keys: Tensor
    values: Tensor
    ring: Ring = WHOLE
    more_keys: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    first: bool = False


class KVCache:
    """Keys (after RoPE) and values of a batch of sequences.

    Attributes:
        keys, values: [layers, batch, slots, kv_heads, head_size]. A slot holds a token once the forward pass that
            processed it has written it; what lies at or beyond a row's length is dead and will be overwritten.
        ring: which slot a position has.
        capacity: positions per sequence.
        scored: [scored layers, batch, capacity, kv_heads, head_size] all keys of the layers in `scored_layers`, in
            their order, for a cache that does not keep them otherwise; None for one that does.
        key_scales, value_scales: [layers, batch, kv_heads] fp32, by which 8-bit keys and values are multiplied (see
            `scaled`); None for others.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        ring: Ring = WHOLE,
        capacity: int | None = None,
        scored: Tensor | None = None,
        scored_layers: Sequence[int] = (),
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> None:
        self.keys = keys
        self.values = values
        self.ring = ring
        self.capacity = keys.shape[2] if capacity is None else capacity
        self.scored = scored
        self.scored_layers = tuple(scored_layers)
        self.key_scales = key_scales
        self.value_scales = value_scales

    @classmethod
    def allocate(
        cls, shape: ModelShape, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCache:
        """Reserve the buffers once.

        Args:
            dtype: of keys and values; float8_e4m3fn comes with scales.

        Raises:
            CapacityError: memory does not suffice.
        """
        try:
            keys, values = (_slots(shape, shape.layers, batch, capacity, dtype, device) for _ in range(2))
            if dtype != E4M3:
                return cls(keys, values)
            scales = torch.ones(2, shape.layers, batch, shape.kv_heads, dtype=torch.float32, device=device)
            return cls(keys, values, key_scales=scales[0], value_scales=scales[1])
        except RuntimeError as error:  # torch.OutOfMemoryError is one, the CPU allocator raises the plain class
            need = shape.kv_bytes(capacity, dtype.itemsize) * batch / 2**30
            raise CapacityError(f"no memory for a KV cache of {need:.1f} GiB: lower batch or context") from error

    @classmethod
    def windowed(
        cls,
        shape: ModelShape,
        batch: int,
        capacity: int,
        ring: Ring,
        scored_layers: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KVCache:
        """Reserve a cache of the first and the last tokens, and of all keys of the layers that are scored.

        Raises:
            CapacityError: memory does not suffice.
        """
        slots = ring.sink + ring.size
        try:
            keys, values = (_slots(shape, shape.layers, batch, slots, dtype, device) for _ in range(2))
            scored = _slots(shape, len(scored_layers), batch, capacity, dtype, device) if scored_layers else None
            return cls(keys, values, ring, capacity, scored, scored_layers)
        except RuntimeError as error:
            raise CapacityError("no memory for the draft's KV cache: lower batch or context") from error

    @property
    def all_keys(self) -> Held:
        """[layers, batch, slots, kv_heads, head_size]."""
        return self.keys if self.key_scales is None else Scaled(self.keys, self.key_scales)

    @property
    def all_values(self) -> Held:
        """The same of values."""
        return self.values if self.value_scales is None else Scaled(self.values, self.value_scales)

    def layer(self, index: int, extent: int) -> tuple[Held, Held]:
        """Keys and values of a layer, the first `extent` slots: [batch, extent, kv_heads, head_size]."""
        keys, values = self.keys[index], self.values[index]
        if self.key_scales is None or self.value_scales is None:
            return shown(keys, extent), shown(values, extent)
        held = Scaled(keys, self.key_scales[index]), Scaled(values, self.value_scales[index])
        return shown(held[0], extent), shown(held[1], extent)

    def scales(self, index: int) -> tuple[Tensor | None, Tensor | None]:
        """[batch, kv_heads] of a layer's keys and values; None for a cache that has none."""
        if self.key_scales is None or self.value_scales is None:
            return None, None
        return self.key_scales[index], self.value_scales[index]

    def scored_keys(self, layer: int) -> Tensor | None:
        """[batch, capacity, kv_heads, head_size]: where else new keys of this layer are kept."""
        if self.scored is None or layer not in self.scored_layers:
            return None
        return self.scored[self.scored_layers.index(layer)]

    def row(self, index: int) -> KVCache:
        """A view of one sequence, batch 1."""
        one = slice(index, index + 1)
        scored = None if self.scored is None else self.scored[:, one]
        scales = (None if one_side is None else one_side[:, one] for one_side in (self.key_scales, self.value_scales))
        keys, values = self.keys[:, one], self.values[:, one]
        return KVCache(keys, values, self.ring, self.capacity, scored, self.scored_layers, *scales)

    def take(self, whole: KVCache, length: int) -> None:
        """Copy what this one-row cache keeps of the first `length` positions of a one-row cache that keeps all.

        Both are of one dtype.
        """
        first = torch.arange(min(self.ring.sink, length), device=self.keys.device)
        last = torch.arange(max(length - self.ring.size, len(first)), length, device=self.keys.device)
        positions = torch.cat((first, last))
        slots = self.ring.slots(positions)
        for ours, theirs in ((self.keys, whole.keys), (self.values, whole.values)):
            bits(ours).index_copy_(2, slots, bits(theirs).index_select(2, positions))
        for mine, other in ((self.key_scales, whole.key_scales), (self.value_scales, whole.value_scales)):
            if mine is not None and other is not None:
                mine.copy_(other)
        for index, layer in enumerate(self.scored_layers):
            assert self.scored is not None
            self.scored[index, :, :length] = whole.keys[layer, :, :length]


def _slots(
    shape: ModelShape, layers: int, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    # Zeros, since a masked weight of 0 times the NaN of unwritten memory would be NaN.
    # Head-major in memory, so that a KV head's keys are one contiguous matrix (twice as fast for CPU attention).
    size = (layers, batch, shape.kv_heads, slots, shape.head_size)
    return torch.zeros(size, dtype=dtype, device=device).transpose(2, 3)
