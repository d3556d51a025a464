"""A decoder's part in a pipeline: its stage, what it is handed by the stage before, and what the last makes known.

Plain on purpose: one batch goes through the stages in turn, and all wait for its end. It serves targets whose heads do
not divide by the number of ranks, and links that are too slow for two sums a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dustin_runtime.models import ops
from dustin_runtime.models.decoder import Weights
from dustin_runtime.parallel.collectives import Collectives
from dustin_runtime.parallel.stages import Stage


@dataclass(frozen=True)
class Pipeline:
    """What a decoder asks that has a block of the layers (implements `split.Split`)."""

    share: Stage
    ranks: Collectives
    partial_blocks: ClassVar[bool] = False
    in_graphs: ClassVar[bool] = False

    def first_layers(self, count: int) -> Pipeline:
        """The same of the model cut after `count` layers; a stage without any of them hands on what it is given."""
        return replace(self, share=self.share.first_layers(count))

    def enter(self, ids: Tensor, embedding: Tensor) -> Tensor:
        """The embedded tokens, or what the stage before hands over."""
        if self.share.begins:
            return ops.embed(ids, embedding)
        return self.ranks.receive(embedding.new_empty(*ids.shape, self.share.whole.hidden), self.ranks.rank - 1)

    def leave(self, x: Tensor, last: Tensor | None, final: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
        """Hand over to the next stage, and wait for what the last one makes of it."""
        if self.share.ends:
            return self._of_last(final(x, last))
        self.ranks.send(x if last is None else x + last, self.ranks.rank + 1)
        return self._of_last(torch.empty_like(x))

    def block_room(self, size: Sequence[int], dtype: torch.dtype) -> None:
        """Anywhere."""

    def end_block(self, x: Tensor) -> Tensor:
        """A stage's blocks are whole."""
        return x

    def sum(self, x: Tensor) -> Tensor:
        """Scores of all heads: of a layer's one stage has them, others have zeros."""
        return self.ranks.sum(x)

    def whole_logits(self, own: Tensor) -> Tensor:
        """Logits [..., vocab] of the last stage; `own` has no columns on others."""
        return self._of_last(own if self.share.ends else own.new_empty(*own.shape[:-1], self.share.whole.vocab))

    def argmax_finite(self, own: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        """`ops.argmax_finite` of the last stage, on every rank."""
        found = torch.empty(2, *own.shape[:-1], dtype=torch.int64, device=own.device)
        if self.share.ends:
            found = torch.stack([column.long() for column in ops.argmax_finite(own, vocab)])
        ids, finite = self._of_last(found)
        return ids, finite.bool()

    def outer(self, weights: Weights) -> tuple[Tensor, Tensor]:
        """The first stage's embedding and the last one's head, on every rank."""
        size = (self.share.whole.vocab, self.share.whole.hidden)
        held = weights.embedding if len(weights.embedding) else weights.embedding.new_empty(size)
        embedding = self.ranks.broadcast(held, 0)
        if self.share.whole.tied:
            return embedding, embedding
        return embedding, self._of_last(weights.head if self.share.ends else weights.head.new_empty(size))

    def _of_last(self, x: Tensor) -> Tensor:
        return self.ranks.broadcast(x, self.ranks.world - 1)
