"""One decoder for the Llama, Mistral, Qwen2 and Qwen3 families.

Attention is injected: the profiler passes one that also observes queries and keys, the runtime swaps dense for sparse.
So the scores measured offline are computed from the same tensors as those used online.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dustin_runtime.cache import Append, KVCache, Ring
from dustin_runtime.models import ops
from dustin_runtime.models.rope import Rope
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.scaled import Held

if TYPE_CHECKING:
    from dustin_runtime.parallel.split import Split


class Attention(Protocol):
    """What a decoder layer asks between its projections."""

    def __call__(self, layer: int, q: Tensor, k: Held, v: Held, start: Tensor, /) -> Tensor:
        """Attend.

        Args:
            layer: index of the decoder layer.
            q: [batch, tokens, query_heads, head_size] queries of the new tokens, after RoPE.
            k, v: [batch, extent, kv_heads, head_size] the cache of the layer, new tokens already written.
            start: [batch] int64, position of each row's first new token. Query t sees positions <= start + t.

        Returns:
            [batch, tokens, query_heads, head_size].
        """
        ...


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer; matrices are [out, in], projections that share an input are fused by rows."""

    attention_norm: Tensor
    qkv: Tensor  # [(query_heads + 2 kv_heads) * head_size, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_size], Qwen3
    k_norm: Tensor | None
    output: Tensor  # [hidden, query_heads * head_size]
    mlp_norm: Tensor
    gate_up: Tensor  # [2 * ffn, hidden]
    down: Tensor  # [hidden, ffn]


@dataclass(frozen=True)
class Weights:
    """All weights of a decoder. `head` is `embedding` itself when the model ties them.

    What a stage of a pipeline does not have is empty.
    """

    embedding: Tensor  # [vocab, hidden]; of a tied model that is split over ranks, rows of padding follow
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor  # [vocab, hidden]


class Decoder:
    """A decoder-only transformer over a caller-owned cache.

    Args:
        shape: of what is computed here.
        split: of which whole that is a part, and the ranks that have the others; None if this is all. They have to make
            the same calls, and final hidden states are the same bits on each of them. Layers are numbered from the
            first that is here.
    """

    def __init__(self, shape: ModelShape, weights: Weights, split: Split | None = None) -> None:
        self.shape = shape
        self.weights = weights
        self.split = split
        self.rope = Rope(shape, min(shape.context, 4096), self.device)

    @property
    def device(self) -> torch.device:
        return self.weights.norm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.norm.dtype

    @property
    def whole(self) -> ModelShape:
        """The shape of the whole model."""
        return self.shape if self.split is None else self.split.share.whole

    @property
    def query_heads(self) -> range:
        """Which of the whole's query heads are here, in each layer."""
        return range(self.shape.query_heads) if self.split is None else self.split.share.query_heads

    @property
    def layers(self) -> range:
        """Which of the whole's layers are here."""
        return range(self.shape.layers) if self.split is None else self.split.share.layers

    def first_layers(self, count: int) -> Decoder:
        """The model cut after `count` layers, with its own norm and head: a draft that costs no memory."""
        split = self.split and self.split.first_layers(count)
        shape = split.share.shape if split else self.shape.model_copy(update={"layers": count})
        layers = self.weights.layers[: shape.layers]
        weights = Weights(self.weights.embedding, layers, self.weights.norm, self.weights.head)
        return Decoder(shape, weights, split)

    def cache(self, batch: int, capacity: int, dtype: torch.dtype | None = None) -> KVCache:
        """A cache for this model, with RoPE tables that reach as far; by default in the model's dtype."""
        cache = KVCache.allocate(self.shape, batch, capacity, dtype or self.dtype, self.device)
        self._reach(capacity)
        return cache

    def windowed_cache(self, batch: int, capacity: int, ring: Ring, scored_layers: Sequence[int]) -> KVCache:
        """A cache of first and last tokens for this model, see `KVCache.windowed`."""
        cache = KVCache.windowed(self.shape, batch, capacity, ring, scored_layers, self.dtype, self.device)
        self._reach(capacity)
        return cache

    def _reach(self, capacity: int) -> None:
        if capacity > self.rope.cos.shape[0]:
            self.rope = Rope(self.shape, capacity, self.device)

    def forward(
        self,
        ids: Tensor,
        start: Tensor,
        cache: KVCache,
        attend: Attention,
        extent: int | None = None,
        first: bool = False,
        until: int | None = None,
    ) -> Tensor:
        """Process new tokens and write their keys and values to the cache.

        Args:
            ids: [batch, tokens] int64.
            start: [batch] int64, position of each row's first token; the cache holds the positions before it.
            extent: how much of the cache attention is shown, at least max(start) + tokens. The default reads `start`,
                which synchronises a GPU; a caller that knows the lengths gives it.
            first: whether these are the first tokens of their sequences: they set the scales of an 8-bit cache.
            until: the layer with whose queries the pass ends, for a caller that wants nothing else: later layers get no
                keys and values. Of a model that is not split.

        Returns:
            [batch, tokens, hidden] final hidden states, normalised; with `until`, what enters the layer.
        """
        assert until is None or self.split is None
        shape = self.shape
        batch, tokens = ids.shape
        if extent is None:
            extent = int(start.max()) + tokens
        eps, rope = shape.norm_eps, self.rope
        table, split = self.weights.embedding, self.split
        x = ops.embed(ids, table) if split is None else split.enter(ids, table)
        layers, last = self.weights.layers, None
        normed: ops.Normed = ops.add_rms_norm(x, None, layers[0].attention_norm, eps)[1] if layers else x
        for index, layer in enumerate(layers):
            keys, values, more = cache.keys[index], cache.values[index], cache.scored_keys(index)
            to = Append(rope.cos, rope.sin, start, keys, values, cache.ring, more, *cache.scales(index), first)
            q = ops.project_append(
                normed, layer.qkv, layer.qkv_bias, layer.q_norm, layer.k_norm, eps, shape.query_heads, to
            )
            attended = attend(index, q, *cache.layer(index, extent), start).reshape(batch, tokens, -1)
            if index == until:
                return x
            x, normed = self._end_block(x, attended, layer.output, layer.mlp_norm)
            inner = ops.gated_linear(normed, layer.gate_up)
            if index + 1 < len(layers):
                x, normed = self._end_block(x, inner, layer.down, layers[index + 1].attention_norm)
            else:
                last = self._product(inner, layer.down)
        return self._final(x, last) if split is None else split.leave(x, last, self._final)

    def _end_block(self, residual: Tensor, x: Tensor, weight: Tensor, gain: Tensor) -> tuple[Tensor, ops.Normed]:
        eps = self.shape.norm_eps
        if self.split is None or not self.split.partial_blocks:
            return ops.add_linear_norm(residual, x, weight, gain, eps)
        return ops.add_rms_norm(residual, self._product(x, weight), gain, eps)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """What a block adds to the residual."""
        room = self.block_room((*x.shape[:-1], len(weight)))
        return self.whole_block(ops.linear_into(room, x, weight))

    def block_room(self, size: Sequence[int]) -> Tensor | None:
        """Where `whole_block` has its argument of a size best; None for anywhere."""
        return None if self.split is None else self.split.block_room(size, self.dtype)

    def whole_block(self, own: Tensor) -> Tensor:
        """What the ranks' parts of a block's end [batch, tokens, hidden] are together."""
        return own if self.split is None else self.split.end_block(own)

    def _final(self, x: Tensor, last: Tensor | None) -> Tensor:
        return ops.add_rms_norm(x, last, self.weights.norm, self.shape.norm_eps)[1]

    def summed(self, partial: Tensor) -> Tensor:
        """What the ranks' parts of a result are together."""
        return partial if self.split is None else self.split.sum(partial)

    def watched(self, seconds: float | None = None) -> AbstractContextManager[None]:
        """Wait within for the device, as long as a step may take or so many seconds: it may wait for a dead rank's."""
        return nullcontext() if self.split is None else self.split.ranks.watched(seconds)

    def logits(self, hidden: Tensor) -> Tensor:
        """Project hidden states [..., hidden] to [..., vocab] (rows beyond the tokenizer's ids are padding)."""
        return self.whole_logits(self.own_logits(hidden))

    def own_logits(self, hidden: Tensor) -> Tensor:
        """The same of the vocabulary that is held here: all, or [..., vocab_rows] of a rank's share, which may be 0."""
        if not len(self.weights.head):
            return hidden.new_empty(*hidden.shape[:-1], 0)
        # A slice of a longer block would become one product per sequence, each reading the whole head.
        return ops.linear(hidden.contiguous(), self.weights.head)

    def whole_logits(self, own: Tensor) -> Tensor:
        """All logits [..., vocab], from what `own_logits` returned."""
        return own if self.split is None else self.split.whole_logits(own)

    def argmax_finite(self, own: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        """`ops.argmax_finite` over all logits, from what `own_logits` returned; no rank has to gather them."""
        return ops.argmax_finite(own, vocab) if self.split is None else self.split.argmax_finite(own, vocab)
