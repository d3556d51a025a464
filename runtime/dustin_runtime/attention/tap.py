"""Keeping the queries of chosen heads while a forward pass runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from dustin_runtime.models.decoder import Attention


class QueryTap:
    """An attention that also saves queries; implements `models.decoder.Attention`.

    Args:
        inner: the attention that computes the output.
        heads: which query heads to save, by layer: indices as a list or as a tensor on the queries' device (a list is
            copied there, which a CUDA graph cannot hold).

    Attributes:
        queries: by layer, [batch, tokens, heads, head_size] of the last forward pass, after RoPE.
    """

    def __init__(self, inner: Attention, heads: Mapping[int, Sequence[int] | Tensor]) -> None:
        self.inner = inner
        self.heads = heads
        self.queries: dict[int, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Tensor:
        if layer in self.heads:
            chosen = self.heads[layer]
            self.queries[layer] = q.index_select(2, chosen) if isinstance(chosen, Tensor) else q[:, :, list(chosen)]
        return self.inner(layer, q, k, v, start)
