"""Keeping the queries of chosen heads while a forward pass runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from dustin_runtime.models.decoder import Attention


class QueryTap:
    """An attention that also saves queries; implements `models.decoder.Attention`.

    Args:
        inner: the attention that computes the output.
        heads: which query heads to save, by layer.

    Attributes:
        queries: by layer, [batch, tokens, heads, head_size] of the last forward pass, after RoPE.
    """

    def __init__(self, inner: Attention, heads: Mapping[int, Sequence[int]]) -> None:
        self.inner = inner
        self.heads = {layer: list(chosen) for layer, chosen in heads.items()}
        self.queries: dict[int, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Tensor:
        if layer in self.heads:
            self.queries[layer] = q[:, :, self.heads[layer]]
        return self.inner(layer, q, k, v, start)
