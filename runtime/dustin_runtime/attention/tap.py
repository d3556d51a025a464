"""Keeping the queries of chosen layers while a forward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from dustin_runtime.attention.scoring import received_mass
from dustin_runtime.models.decoder import Attention
from dustin_runtime.scaled import Held


class QueryTap:
    """An attention that also saves queries; implements `models.decoder.Attention`.

    Args:
        inner: the attention that computes the output.
        layers: whose queries are kept. Choosing heads is left for later (`ScoredHeads.gather`): nothing is copied here.
        saved: called with a layer once its queries are kept.
        last: copy the queries of so many last tokens, rather than keep those of all.
        until: a layer that is asked for its queries alone: its attention is not computed, and what is returned in its
            place means nothing (`Decoder.forward` ends there).

    Attributes:
        queries: by layer, [batch, tokens, query_heads, head_size] of the last forward pass, after RoPE.
    """

    def __init__(
        self,
        inner: Attention,
        layers: Iterable[int],
        saved: Callable[[int], None] | None = None,
        last: int | None = None,
        until: int | None = None,
    ) -> None:
        self.inner = inner
        self.until = until
        self.saved = saved
        self.last = last
        self.layers = frozenset(layers)
        self.queries: dict[int, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Held, v: Held, start: Tensor) -> Tensor:
        if layer in self.layers:
            self.queries[layer] = q if self.last is None else q[:, -self.last :].clone()
            if self.saved:
                self.saved(layer)
        if layer == self.until:
            return q
        return self.inner(layer, q, k, v, start)


class MassTap:
    """An attention that also adds up what every position of a prompt receives, over the passes that process it.

    Attributes:
        received: by layer, [batch, kv_heads, keys] fp32: `scoring.received_mass`, summed over a KV head's query heads.
    """

    def __init__(self, inner: Attention) -> None:
        self.inner = inner
        self.received: dict[int, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Held, v: Held, start: Tensor) -> Tensor:
        mass = received_mass(q, k).sum(dim=2)
        if layer in self.received:
            before = self.received[layer]
            mass[..., : before.shape[2]] += before
        self.received[layer] = mass
        return self.inner(layer, q, k, v, start)
