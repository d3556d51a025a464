"""What a method of verification is: whether it drafts, and which prefix tokens the target reads.

Most choose lists before the target runs (`Policy.select`). A method that chooses in each layer, from that layer's own
queries, gives an attention of its own (`Policy.verification`). What it has to remember from the prompt, or from step to
step, is its `Memory`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from dustin_runtime.attention.dense import FullAttention
from dustin_runtime.attention.scoring import MASS_QUERIES, rows_bytes
from dustin_runtime.attention.sparse import SparseAttention
from dustin_runtime.cache import KVCache
from dustin_runtime.config import LayerHeads, Selection
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.parallel.split import Part
from dustin_runtime.scaled import Held, plain


class Verification(Protocol):
    """What the target attends with, and what that read (extends `models.decoder.Attention`)."""

    def __call__(self, layer: int, q: Tensor, k: Held, v: Held, start: Tensor, /) -> Tensor: ...

    def tokens_read(self, lengths: Tensor) -> Tensor:
        """[batch] fp32, once all layers have run: prefix tokens that each KV head read, mean over layers and heads."""
        ...

    def kept(self, layer: int) -> Tensor | None:
        """[batch, heads, k] int64 prefix positions that the layer read, -1 padded; None for all.

        heads: 1 if all read the same, or the layer's KV heads, or its query heads.
        """
        ...


@dataclass(frozen=True)
class Prompted:
    """A prompt as one model has processed it.

    Attributes:
        length: tokens of the prompt.
        cache: the model's, of one row, with the prompt in it.
        queries: by layer, [1, tokens, query_heads, head_size]: of the prompt's last `Policy.prompt_queries` tokens.
        received: by layer of the target, [1, kv_heads, length] fp32, if `Policy.prompt_mass`: the attention that all
            queries of the prompt pay to each position, summed over the query heads of a KV head.
        mark: a number of its tokens, and of the seed it is continued with, by which work that comes in turns is begun
            at different steps in different rows.
    """

    length: int
    cache: KVCache
    queries: Mapping[int, Tensor] = field(default_factory=dict)
    received: Mapping[int, Tensor] = field(default_factory=dict)
    mark: int = 0

    def keys(self, layer: int) -> Tensor:
        """[1, length, kv_heads, head_size] keys of a layer, after RoPE; of an 8-bit cache a copy, once a prompt."""
        held, _ = self.cache.layer(layer, self.length)
        return plain(held, self.queries[layer].dtype if layer in self.queries else torch.float32)


class Memory(Protocol):
    """What a policy keeps between steps, in buffers that keep their place: a CUDA graph holds their addresses."""

    def admit(self, row: int, target: Prompted, draft: Prompted | None) -> None:
        """Begin a sequence in a row of the batch.

        Every rank of a split target does, with the prompt as its own heads and layers have it: what is decided has to
        be summed over them first (`Decoder.summed`).

        Args:
            draft: None for a method that does not draft, and on ranks that do not draft the row.
        """
        ...


class DraftLists(Protocol):
    """What the draft reads, in buffers that keep their place, as `Memory`'s."""

    def take(self, row: int, prompted: Prompted) -> None:
        """Begin a sequence in a row of the batch."""
        ...

    def lists(self, lengths: Tensor) -> Tensor:
        """[draft layers, rows, kv_heads, k] int64 ascending prefix positions, -1 padded, for prefixes of `lengths`."""
        ...


class Signals(Protocol):
    """Scores of one step, computed when asked for: a policy pays only for what it uses."""

    @property
    def lengths(self) -> Tensor:
        """[batch] int64 prefix length of every sequence."""
        ...

    @property
    def memory(self) -> Memory | None:
        """What `Policy.memory` made."""
        ...

    def prefix_keys(self) -> Held:
        """[layers, batch, positions, kv_heads, head_size] of the target; beyond a row's length, anything."""
        ...

    def prefix_values(self) -> Held:
        """The same of values."""
        ...

    def history(self) -> Tensor:
        """[batch, positions] fp32 attention of the target's heads at the last processed token."""
        ...

    def lookahead(self) -> Tensor:
        """[batch, positions] fp32 attention of the draft's heads, summed over the passes of `Policy.passes`."""
        ...

    def lookahead_rows(self) -> Iterable[Tensor]:
        """By draft layer, [batch, query_heads, passes, positions] fp32 attention of every pass."""
        ...


@dataclass(frozen=True)
class Policy(ABC):
    """A method; `selection` is the emitted configuration's, or None for methods that read everything."""

    selection: Selection | None
    name: ClassVar[str]
    drafts: ClassVar[bool] = True
    needs_selection: ClassVar[bool] = False
    partial_draft: ClassVar[bool] = False
    """Whether the draft reads only a part of its cache, whatever a configuration says: the first and last tokens, or
    `draft_lists`."""
    chooses_by_layer: ClassVar[bool] = False
    """Whether it chooses while the target runs: `verification` is its own, and `select` is not called."""
    lookahead_by_layer: ClassVar[bool] = False
    """Whether it asks for `Signals.lookahead_rows`, and not for `Signals.lookahead`."""
    last_look: ClassVar[bool] = False
    """Whether lookahead is asked at the last drafted token too, which the draft then processes for that alone."""
    over_ranks: ClassVar[bool] = False
    """Whether the target may be split over ranks: what is chosen must not depend on the heads, layers and drafted rows
    that a rank has, but on `history` and `lookahead` of `Signals` alone, or on what was summed over ranks, and be one
    list for all of them. What a head reads besides may be its own."""
    works_beside: ClassVar[bool] = False
    """Whether `begin` has anything to do."""
    prompt_queries: ClassVar[int] = 0
    """Queries of a prompt's end, of all layers, that `Memory.admit` is given."""
    prompt_mass: ClassVar[bool] = False
    """Whether `Memory.admit` is given what each position of a prompt received: as much work as its attention is."""

    @classmethod
    def lacking(cls, selection: Selection) -> str | None:
        """Name of a field that the method needs and this selection leaves empty; None if it can serve."""
        return None

    def lookahead_heads(self, draft: ModelShape) -> tuple[LayerHeads, ...]:
        """Heads of the draft whose attention is the lookahead score."""
        assert self.selection is not None
        return self.selection.lookahead

    def passes(self, depth: int) -> int:
        """Passes of the draft in a step of `depth` drafts whose queries are lookahead's."""
        return depth + 1 if self.last_look and self.uses_lookahead else depth

    def scored(self, draft: ModelShape) -> Selection | None:
        """The selection with the heads that are scored, for plans of memory."""
        if self.selection is None:
            return None
        return self.selection.model_copy(update={"lookahead": self.lookahead_heads(draft)})

    def memory(self, target: Decoder, depth: int, rows: int, capacity: int) -> Memory | None:
        """Buffers for `rows` sequences of up to `capacity` positions and `depth` drafts a step; None for none.

        Args:
            target: what is computed here of it, where it is split over ranks.
        """
        return None

    def memory_bytes(
        self, target: Part, draft: ModelShape | None, depth: int, rows: int, capacity: int, element_bytes: int
    ) -> int:
        """Bytes of `memory`, and of what filling it and choosing by it takes beside the scores; for plans of memory.

        Args:
            target: what one rank holds of it, or all.
        """
        queries = MASS_QUERIES if self.prompt_mass else min(self.prompt_queries, MASS_QUERIES)
        return rows_bytes(target.shape, queries, capacity) if queries else 0

    def draft_keeps(self, budget: int | None) -> int | None:
        """First and last tokens that the draft's cache keeps if it reads `budget`; None for all."""
        return budget

    def draft_lists(
        self, draft: ModelShape, rows: int, capacity: int, budget: int, device: torch.device
    ) -> DraftLists | None:
        """What the draft reads of a cache that keeps all; None if not lists."""
        return None

    def begin(self, signals: Signals, share: float | None) -> None:  # noqa: B027
        """Do what needs none of this step's drafts, nor scores; on a GPU beside the drafting.

        Args:
            share: of the GPU's processors that are used, roughly; None for all.
        """

    def verification(self, signals: Signals) -> Verification:
        """What the target attends with in this step."""
        kept = self.select(signals)
        return FullAttention() if kept is None else SparseAttention(kept)

    @abstractmethod
    def select(self, signals: Signals) -> Tensor | None:
        """Choose what verification reads.

        Returns:
            [layers or 1, batch, kv_heads or 1, k] int64 ascending prefix positions padded with -1, or None for all.
        """

    @property
    def uses_history(self) -> bool:
        """Whether `select` asks for history scores."""
        return False

    @property
    def uses_lookahead(self) -> bool:
        """Whether `select` asks for lookahead scores, summed or by layer."""
        return False
