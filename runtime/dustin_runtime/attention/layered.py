"""Attention that differs from layer to layer."""

from __future__ import annotations

import torch
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.sparse import SparseAttention
from dustin_runtime.scaled import Held


class DenseFirst:
    """Full attention in the first layers, lists in the others; implements `policies.Verification`.

    Args:
        layers: how many are dense.
        kept: [other layers, batch, kv_heads or 1, k], see `SparseAttention`.
    """

    def __init__(self, layers: int, kept: Tensor) -> None:
        self.layers = layers
        self.sparse = [SparseAttention(one.unsqueeze(0)) for one in kept]

    def __call__(self, layer: int, q: Tensor, k: Held, v: Held, start: Tensor) -> Tensor:
        if layer < self.layers:
            return dense_attention(layer, q, k, v, start)
        return self.sparse[layer - self.layers](0, q, k, v, start)

    def tokens_read(self, lengths: Tensor) -> Tensor:
        """[batch] fp32, mean over layers and KV heads."""
        read = [lengths.float()] * self.layers + [attend.tokens_read(lengths) for attend in self.sparse]
        return torch.stack(read).mean(dim=0)

    def kept(self, layer: int) -> Tensor | None:
        """[batch, kv_heads or 1, k]; None for the dense ones."""
        return None if layer < self.layers else self.sparse[layer - self.layers].kept(0)
