"""What a rank of a pipeline holds, by shape alone: whole layers, one block of them behind the other.

The first stage has the embedding too, the last the final norm and the head; a tied head is on both. Of layers that do
not divide evenly the first stages have one more each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dustin_runtime.config import LayerHeads
from dustin_runtime.errors import UsageError
from dustin_runtime.models.shape import ModelShape


@dataclass(frozen=True)
class Stage:
    """One stage of a model (implements `split.Part`); made by `of`, which refuses what cannot be shared.

    Attributes:
        whole: the model's shape.
        rank: in [0, world), the stage's number.
        layers: may be none of a model that was cut after its first layers.
    """

    whole: ModelShape
    rank: int
    world: int
    layers: range

    @classmethod
    def of(cls, whole: ModelShape, rank: int, world: int) -> Stage:
        """The stage of a rank.

        Raises:
            UsageError: there are more stages than layers.
        """
        if world > whole.layers:
            raise UsageError(
                f"{world} stages of a pipeline need a layer each, the target has {whole.layers}; "
                "start no more processes than that"
            )
        each, more = divmod(whole.layers, world)
        begin = rank * each + min(rank, more)
        return cls(whole, rank, world, range(begin, begin + each + (rank < more)))

    def first_layers(self, count: int) -> Stage:
        """What it holds of the model cut after `count` layers."""
        kept = range(min(self.layers.start, count), min(self.layers.stop, count))
        return replace(self, whole=self.whole.model_copy(update={"layers": count}), layers=kept)

    @property
    def begins(self) -> bool:
        return self.rank == 0

    @property
    def ends(self) -> bool:
        return self.rank == self.world - 1

    @property
    def shape(self) -> ModelShape:
        return self.whole.model_copy(update={"layers": len(self.layers)})

    @property
    def query_heads(self) -> range:
        return range(self.whole.query_heads)

    @property
    def kv_heads(self) -> range:
        return range(self.whole.kv_heads)

    @property
    def embedding_rows(self) -> int:
        return self.whole.vocab if self.begins or (self.ends and self.whole.tied) else 0

    @property
    def vocab(self) -> range:
        return range(self.whole.vocab if self.ends else 0)

    @property
    def vocab_rows(self) -> int:
        return len(self.vocab)

    @property
    def tied_head(self) -> slice:
        return slice(0, self.vocab_rows)

    def holds(self, name: str) -> bool:
        """As `split.Part.holds`."""
        if found := re.match(r"model\.layers\.(\d+)\.", name):
            layer = int(found[1])
            return layer in self.layers or layer >= self.whole.layers
        outer = {
            "model.embed_tokens.weight": self.embedding_rows > 0,
            "model.norm.weight": self.ends,
            "lm_head.weight": self.ends,
        }
        return outer.get(name, True)

    def cut(self, name: str) -> None:
        """Nothing is cut."""

    def index(self, name: str, size: Sequence[int]) -> tuple[slice, ...]:
        """All of a tensor."""
        return tuple(slice(0, entries) for entries in size)

    def held(self, chosen: Iterable[LayerHeads]) -> tuple[LayerHeads, ...]:
        """Of chosen query heads those of the layers here, which are counted from the stage's first."""
        begin = self.layers.start
        return tuple(
            LayerHeads(layer=entry.layer - begin, heads=entry.heads) for entry in chosen if entry.layer in self.layers
        )
