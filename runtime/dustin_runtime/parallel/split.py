"""The two ways to split a target over ranks, and what the rest of the runtime asks of either.

Tensor parallelism gives every rank a part of each layer (`shards`, `tensor`), a pipeline whole layers (`stages`,
`pipeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from dustin_runtime.config import LayerHeads
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.parallel.shards import Cut, Share
from dustin_runtime.parallel.stages import Stage

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dustin_runtime.models.decoder import Weights
    from dustin_runtime.parallel.collectives import Collectives


class Part(Protocol):
    """What one rank holds of a model, by shape alone."""

    @property
    def whole(self) -> ModelShape: ...

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def shape(self) -> ModelShape:
        """What a decoder, its cache and its scratch have here; `vocab` is that of the whole."""
        ...

    @property
    def layers(self) -> range:
        """The layers of which something is held."""
        ...

    @property
    def query_heads(self) -> range:
        """The query heads of each of them."""
        ...

    @property
    def kv_heads(self) -> range:
        """The KV heads of each of them."""
        ...

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding's tensor, padding included; 0 for none."""
        ...

    @property
    def vocab(self) -> range:
        """The ids of the head's rows."""
        ...

    @property
    def vocab_rows(self) -> int:
        """Rows of the head, padding included; 0 for none."""
        ...

    @property
    def tied_head(self) -> slice:
        """Where these rows lie in the embedding of a model that ties them."""
        ...

    @property
    def ends(self) -> bool:
        """Whether the final norm is here."""
        ...

    def first_layers(self, count: int) -> Part:
        """What it holds of the model cut after `count` layers."""
        ...

    def holds(self, name: str) -> bool:
        """Whether anything of a tensor is held here, by its Hugging Face name; what the model does not have is too."""
        ...

    def cut(self, name: str) -> Cut | None:
        """What of a tensor that is held here; None for all of it."""
        ...

    def index(self, name: str, size: Sequence[int]) -> tuple[slice, ...]:
        """The same as an index into the tensor as it is stored."""
        ...

    def held(self, chosen: Iterable[LayerHeads]) -> tuple[LayerHeads, ...]:
        """Of chosen query heads those that are computed here, layers and heads counted from the rank's first."""
        ...


class Split(Protocol):
    """What a decoder asks whose weights are on several ranks. All of them make the same calls in the same order."""

    partial_blocks: ClassVar[bool]
    """Whether a rank has only a part of what ends a block, which `end_block` completes."""
    in_graphs: ClassVar[bool]
    """Whether a CUDA graph may hold a step."""

    @property
    def share(self) -> Part: ...

    @property
    def ranks(self) -> Collectives: ...

    def first_layers(self, count: int) -> Split:
        """The same of the model cut after `count` layers."""
        ...

    def enter(self, ids: Tensor, embedding: Tensor) -> Tensor:
        """What the first layer here is given for new tokens [batch, tokens]: [batch, tokens, hidden]."""
        ...

    def leave(self, x: Tensor, last: Tensor | None, final: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
        """The final hidden states, the same bits on every rank.

        Args:
            x: what the last layer here adds to, and `last` what it adds; None if there is no layer here.
            final: the sum of both, normalised.
        """
        ...

    def block_room(self, size: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Where `end_block` has its argument best, to save a copy; None for anywhere."""
        ...

    def end_block(self, x: Tensor) -> Tensor:
        """What a block adds to the residual [batch, tokens, hidden], from this rank's part of it."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """What ranks have parts of, added up to the same bits everywhere."""
        ...

    def whole_logits(self, own: Tensor) -> Tensor:
        """Logits [..., vocab] from every rank's own [..., vocab_rows]."""
        ...

    def argmax_finite(self, own: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        """`ops.argmax_finite` of the same logits, below `vocab`; the same on every rank."""
        ...

    def outer(self, weights: Weights) -> tuple[Tensor, Tensor]:
        """Embedding and head [vocab, hidden] as a whole, from what every rank has of them."""
        ...


def part_of(whole: ModelShape, rank: int, world: int, pipeline: bool = False) -> Part:
    """What a rank holds.

    Raises:
        UsageError: the model cannot be shared by so many.
    """
    return Stage.of(whole, rank, world) if pipeline else Share.of(whole, rank, world)


def split_over(whole: ModelShape, ranks: Collectives, pipeline: bool = False) -> Split:
    """How a decoder is this rank's part of a model. Raises as `part_of`."""
    if pipeline:
        from dustin_runtime.parallel.pipeline import Pipeline

        return Pipeline(Stage.of(whole, ranks.rank, ranks.world), ranks)
    from dustin_runtime.parallel.tensor import TensorParallel

    return TensorParallel.of(whole, ranks)
