"""The key-value cache: static buffers, ragged lengths, rollback by length alone."""

from __future__ import annotations

import torch
from torch import Tensor

from dustin_runtime.errors import CapacityError
from dustin_runtime.models.shape import ModelShape


class KVCache:
    """Keys (after RoPE) and values of a batch of sequences.

    Attributes:
        keys, values: [layers, batch, capacity, kv_heads, head_size]. A position holds a token once the forward pass
            that processed it has written it; what lies at or beyond a row's length is dead and will be overwritten.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values

    @classmethod
    def allocate(
        cls, shape: ModelShape, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCache:
        """Reserve the buffers once.

        Raises:
            CapacityError: memory does not suffice.
        """
        # Zeros, since a masked weight of 0 times the NaN of unwritten memory would be NaN.
        # Head-major in memory, so that a KV head's keys are one contiguous matrix (twice as fast for CPU attention).
        size = (shape.layers, batch, shape.kv_heads, capacity, shape.head_size)
        try:
            keys, values = (torch.zeros(size, dtype=dtype, device=device).transpose(2, 3) for _ in range(2))
            return cls(keys, values)
        except RuntimeError as error:  # torch.OutOfMemoryError is one, the CPU allocator raises the plain class
            need = shape.kv_bytes(capacity, dtype.itemsize) * batch / 2**30
            raise CapacityError(f"no memory for a KV cache of {need:.1f} GiB: lower batch or context") from error

    @property
    def capacity(self) -> int:
        """Positions per sequence."""
        return self.keys.shape[2]

    def row(self, index: int) -> KVCache:
        """A view of one sequence, batch 1."""
        return KVCache(self.keys[:, index : index + 1], self.values[:, index : index + 1])
