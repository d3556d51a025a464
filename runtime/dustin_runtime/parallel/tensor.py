"""A decoder's part in a tensor-parallel group: its share of the weights, and what is summed or compared over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dustin_runtime.models import ops
from dustin_runtime.models.decoder import Weights
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.parallel.collectives import Collectives
from dustin_runtime.parallel.shards import Share
from dustin_runtime.parallel.sums import BlockSums


@dataclass(frozen=True)
class TensorParallel:
    """What a decoder asks that has a part of each layer (implements `split.Split`)."""

    share: Share
    ranks: Collectives
    blocks: BlockSums
    partial_blocks: ClassVar[bool] = True
    in_graphs: ClassVar[bool] = True

    @classmethod
    def of(cls, shape: ModelShape, ranks: Collectives) -> TensorParallel:
        """The part of a whole model that falls to this rank. Raises UsageError as `Share.of`."""
        return cls(Share.of(shape, ranks.rank, ranks.world), ranks, BlockSums(ranks))

    def first_layers(self, count: int) -> TensorParallel:
        """The same of the model cut after `count` layers."""
        return replace(self, share=self.share.first_layers(count))

    def enter(self, ids: Tensor, embedding: Tensor) -> Tensor:
        """The embedded tokens: the table is whole on every rank."""
        return ops.embed(ids, embedding)

    def leave(self, x: Tensor, last: Tensor | None, final: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
        """The final hidden states; blocks have been summed."""
        return final(x, last)

    def block_room(self, size: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Memory that others read, if a sum of that size goes that way. The next room is the same memory."""
        return self.blocks.room(size, dtype)

    def end_block(self, x: Tensor) -> Tensor:
        """What ends a block, added up the way that is fastest for its size."""
        return self.blocks(x)

    def sum(self, x: Tensor) -> Tensor:
        """Partial results of all ranks added up, the same bits everywhere."""
        return self.ranks.sum(x)

    def whole_logits(self, own: Tensor) -> Tensor:
        """Logits [..., vocab] from every rank's own [..., vocab_rows]."""
        parts = self.ranks.gather(own)
        return parts.movedim(0, -2).flatten(-2)[..., : self.share.whole.vocab].contiguous()

    def outer(self, weights: Weights) -> tuple[Tensor, Tensor]:
        """The embedding without padding, and the head from every rank's rows of it: [vocab, hidden]."""
        embedding = weights.embedding[: self.share.whole.vocab]
        if self.share.whole.tied:
            return embedding, embedding
        return embedding, self.ranks.gather(weights.head).flatten(0, 1)[: self.share.whole.vocab]

    def argmax_finite(self, own: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        """`ops.argmax_finite` of logits whose columns lie on several ranks.

        Args:
            own: [..., vocab_rows], contiguous.
            vocab: of the whole.

        Returns:
            ids [...] int64, of equals the smallest; finite [...] bool; the same on every rank.
        """
        begin = self.share.vocab.start
        columns = min(max(vocab - begin, 0), len(self.share.vocab))
        if columns:
            ids, finite = ops.argmax_finite(own, columns)
            best = own.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        else:  # padding alone, on the last ranks
            best = own.new_full(own.shape[:-1], -torch.inf)
            ids = torch.zeros_like(best, dtype=torch.int64)
            finite = torch.ones_like(best, dtype=torch.bool)
        # fp64 holds every id and every logit exactly.
        mine = torch.stack((best.double(), (ids + begin).double(), finite.double()), dim=-1)
        bests, found, sound = self.ranks.gather(mine).unbind(dim=-1)
        first = bests.argmax(dim=0, keepdim=True)  # of equals the lowest rank, which has the smaller ids
        return found.gather(0, first).squeeze(0).long(), sound.bool().all(dim=0)
