"""Dustin with a part of the budget for each layer: tokens that the layer's own last queries attend to most."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dustin_runtime.attention.scoring import layer_mass
from dustin_runtime.attention.sparse import SparseAttention
from dustin_runtime.config import MAX_OWN_QUERIES, Fusion, OwnLists, Selection
from dustin_runtime.guard import Rule
from dustin_runtime.kernels import usable, usable_for_positions
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.policies.base import Prompted, Signals, Verification
from dustin_runtime.policies.dustin import Dustin
from dustin_runtime.scaled import Held, shown
from dustin_runtime.selection import ascending, eligible_positions, ranked


class Shares(NamedTuple):
    """How a budget is shared: protected and global tokens, `m` of them by lookahead, and a layer's own."""

    shared: int
    m: int
    own: int


def shares(selection: Selection) -> Shares:
    """The split that `selection.own`, or its defaults, asks for. At least one token stays global."""
    free = selection.budget - selection.sink - selection.window
    own = min(round(own_lists(selection).share * free), free - 1)
    return Shares(selection.budget - own, selection.m * (free - own) // free, own)


def own_lists(selection: Selection) -> OwnLists:
    """What layers choose themselves; the defaults where a configuration does not say."""
    return selection.own or OwnLists()


def candidates(mass: Tensor, lengths: Tensor, count: int, *, sink: int, window: int) -> Tensor:
    """Unprotected tokens in order of decreasing mass, ties by position; then those that come next into the prefix.

    With the latter, all `count` are unprotected once the prefix has grown to `sink + window + count` tokens.

    Args:
        mass: [..., batch, lists, columns] fp32, not negative; lengths: [batch] int64 tokens of each prefix.

    Returns:
        [..., batch, lists, count] int64, all different.
    """
    if usable(mass):
        from dustin_runtime.kernels import ranking

        if ranking.fits(mass.shape[-1], count):
            return ranking.candidates(mass, lengths, count, sink=sink, window=window)
    return candidates_reference(mass, lengths, count, sink=sink, window=window)


def candidates_reference(mass: Tensor, lengths: Tensor, count: int, *, sink: int, window: int) -> Tensor:
    """`candidates` in plain torch, on any device."""
    eligible = eligible_positions(lengths, mass.shape[-1], sink=sink, window=window)
    best = ranked(mass, eligible.unsqueeze(1), count)
    # Of `e` eligible positions, which are [sink, sink + e), the rank j >= e is missing: sink + j is free.
    return torch.where(best < 0, sink + torch.arange(count, device=best.device), best)


def merge(shared: Tensor, candidates: Tensor, lengths: Tensor, own: int, window: int) -> Tensor:
    """Every layer's list: the shared one, and the layer's first candidates that are not in it.

    Args:
        shared: [batch, s] int64 ascending, -1 padded: protected and global tokens.
        candidates: [layers, batch, lists, c] int64, of which a prefix may have grown out; `c` is at least `own` and the
            unprotected tokens of `shared`.
        lengths: [batch] int64 tokens of each prefix; those of the window are protected.
        own: how many of the candidates are taken.

    Returns:
        [layers, batch, lists, s + own] int64 ascending, -1 padded.
    """
    if usable_for_positions(shared):
        from dustin_runtime.kernels import merging

        if merging.fits(shared.shape[1], candidates.shape[3], own):
            return merging.merge(shared, candidates, lengths, own, window)
    return merge_reference(shared, candidates, lengths, own, window)


def merge_reference(shared: Tensor, candidates: Tensor, lengths: Tensor, own: int, window: int) -> Tensor:
    """`merge` in plain torch, on any device."""
    layers, batch, lists, _ = candidates.shape
    rows = candidates.transpose(0, 1).flatten(1).contiguous()  # [batch, layers * lists * c]
    ordered = shared.masked_fill(shared < 0, torch.iinfo(torch.int64).max)
    place = torch.searchsorted(ordered, rows).clamp(max=shared.shape[1] - 1)
    free = (ordered.gather(1, place) != rows) & (rows < (lengths - window).unsqueeze(1))
    free = free.view(batch, layers, lists, -1).transpose(0, 1)
    order = free.cumsum(dim=3)
    # Taken ones move to their rank, all others to one place behind, which is cut off.
    target = torch.where(free & (order <= own), order - 1, own)
    taken = candidates.new_full((*candidates.shape[:3], own + 1), -1).scatter(3, target, candidates)[..., :own]
    return ascending(torch.cat((shared[None, :, None].expand(layers, -1, lists, -1), taken), dim=3))


class FreshQueries(ABC):
    """Each layer's last queries, and what they say when it is the layer's turn; implements `policies.base.Memory`.

    Args:
        own: how many queries, layers a step, and lists a layer.

    Attributes:
        queries: [layers, rows, slots, query_heads, head_size]. A position's query lies in slot `position % slots`, and
            there are as many more slots than `OwnLists.queries` as a step has drafts: a rejected draft's query lies
            behind the prefix, where it is not read, until the token that takes its position overwrites it, and no
            draft's slot is that of a query which the next step reads.
        lists: of a layer, its KV heads or 1.
        steps: [rows] int64 since the row was filled: which layers' turn it is. A row has a count of its own, so that
            its text does not depend on what the others do.
    """

    def __init__(
        self,
        own: OwnLists | Fusion,
        selection: Selection,
        target: ModelShape,
        depth: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pooled = own.queries
        self.per_step = min(own.per_step, target.layers)
        self.by_head = own.heads == "kv_head"
        self.lists = target.kv_heads if self.by_head else 1
        self.sink, self.window = selection.sink, selection.window
        slots = own.queries + depth
        size = (target.layers, rows, slots, target.query_heads, target.head_size)
        self.queries = torch.zeros(size, dtype=dtype, device=device)
        self.steps = torch.zeros(rows, dtype=torch.int64, device=device)
        self._row = torch.arange(rows, device=device).unsqueeze(1)
        self._new = torch.arange(depth + 1, device=device)
        self._last = torch.arange(-own.queries, 0, device=device)
        self._turn = torch.arange(self.per_step, device=device).unsqueeze(1)

    def admit(self, row: int, target: Prompted, draft: Prompted | None) -> None:
        """Choose in every layer of a prompt."""
        slots, one = self.queries.shape[2], slice(row, row + 1)
        for layer, q in target.queries.items():
            last = q[:, -min(self.pooled, target.length) :]
            position = torch.arange(target.length - last.shape[1], target.length, device=q.device)
            self.queries[layer, row, position % slots] = last[0]
        lengths = self.steps.new_full((1,), target.length)
        keys = shown(target.cache.all_keys, target.length)
        for layer in target.queries:
            self._choose(lengths.new_full((1, 1), layer), lengths, keys, one)
        self.steps[row] = 0

    def refresh(self, lengths: Tensor, keys: Held, share: float | None = None) -> None:
        """Let the layers whose turn it is choose anew.

        Args:
            lengths: [rows] int64; keys: [layers, rows, columns, kv_heads, head_size].
            share: of the GPU's processors that are used, see `layer_mass`.
        """
        layers = (self.steps * self.per_step + self._turn) % len(self.queries)  # [per_step, rows]
        self._choose(layers, lengths, keys, slice(None), share)
        self.steps.add_(1)

    def _choose(self, layer: Tensor, lengths: Tensor, keys: Held, rows: slice, share: float | None = None) -> None:
        """Choose candidates in some layers [turns, rows] of each of some rows."""
        row = self._row[rows]
        # A prefix shorter than the pool asks its first token several times, all of whose attention is on itself.
        position = (lengths.unsqueeze(1) + self._last).clamp(min=0)
        q = self.queries[layer.unsqueeze(2), row, position % self.queries.shape[2]]
        mass = layer_mass(q, keys, layer, position, share)
        if not self.by_head:
            # One by one: the order in which `sum` adds depends on how many columns are shown.
            mass = reduce(torch.add, mass.split(1, dim=2))
        self._take(layer, row[:, 0], mass, lengths)

    @abstractmethod
    def _take(self, layer: Tensor, row: Tensor, mass: Tensor, lengths: Tensor) -> None:
        """Keep what the mass [turns, rows, lists, columns] of some layers says."""

    def keep(self, queries: list[Tensor], start: Tensor) -> None:
        """Keep the queries of a step's tokens, accepted or not.

        Args:
            queries: by layer, [rows, depth + 1, query_heads, head_size]; start: [rows] int64, position of the first.
        """
        slot = (start.unsqueeze(1) + self._new) % self.queries.shape[2]
        self.queries[:, self._row, slot] = torch.stack(queries)


class FreshLists(FreshQueries):
    """Which tokens each layer's last queries preferred.

    Attributes:
        candidates: [layers, rows, kv_heads or 1, free] int64, see `candidates`.
    """

    def __init__(
        self,
        selection: Selection,
        target: ModelShape,
        depth: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(own_lists(selection), selection, target, depth, rows, dtype, device)
        free = selection.budget - selection.sink - selection.window
        first = self.sink + torch.arange(free, device=device)
        self.candidates = first.expand(target.layers, rows, self.lists, -1).contiguous()

    def _take(self, layer: Tensor, row: Tensor, mass: Tensor, lengths: Tensor) -> None:
        count = self.candidates.shape[3]
        self.candidates[layer, row] = candidates(mass, lengths, count, sink=self.sink, window=self.window)


class KeepingAttention(SparseAttention):
    """Verification over the lists that also holds the queries of all layers; implements `policies.Verification`."""

    def __init__(self, kept: Tensor, *, full: Tensor | None = None, estimate: Tensor | None = None) -> None:
        super().__init__(kept, full=full, estimate=estimate)
        self.queries: dict[int, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Held, v: Held, start: Tensor) -> Tensor:
        self.queries[layer] = q
        return super().__call__(layer, q, k, v, start)


@dataclass(frozen=True)
class FreshDustin(Dustin):
    """What methods share whose layers are asked anew in rotation, beside the drafting."""

    over_ranks: ClassVar[bool] = False
    works_beside: ClassVar[bool] = True
    prompt_queries: ClassVar[int] = MAX_OWN_QUERIES

    def begin(self, signals: Signals, share: float | None) -> None:
        """Each call is the next turn of the rotation."""
        assert isinstance(signals.memory, FreshQueries)
        signals.memory.refresh(signals.lengths, signals.prefix_keys(), share)

    def end(self, signals: Signals, verification: Verification) -> None:
        assert isinstance(signals.memory, FreshQueries) and isinstance(verification, KeepingAttention)
        signals.memory.keep(list(verification.queries.values()), signals.lengths)


@dataclass(frozen=True)
class DustinLayers(FreshDustin):
    """Dustin's list at a smaller count, the same for all, and for every layer what its own last queries attend to.

    Each layer's (or KV head's) part of the budget is `OwnLists.share`; in every step the next `per_step` layers choose
    anew. The others keep their order of preference, and take the first tokens of it that the step's global list lacks.
    """

    name: ClassVar[str] = "dustin-layers"
    adapts: ClassVar[bool] = False

    @property
    def _settings(self) -> tuple[int, int, int, int]:
        assert self.selection is not None
        shared, m, _ = shares(self.selection)
        return shared, self.selection.sink, self.selection.window, m

    def memory(
        self, target: ModelShape, depth: int, rows: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> FreshLists:
        assert self.selection is not None
        return FreshLists(self.selection, target, depth, rows, dtype, device)

    def memory_bytes(
        self, target: ModelShape, draft: ModelShape | None, depth: int, rows: int, capacity: int, element_bytes: int
    ) -> int:
        assert self.selection is not None
        selection, own = self.selection, own_lists(self.selection)
        free = selection.budget - selection.sink - selection.window
        lists = rows * (target.kv_heads if own.heads == "kv_head" else 1)
        width = target.query_heads * target.head_size * element_bytes
        step = target.layers * rows * (depth + 1) * width  # of all layers, until they are kept, and stacked
        queries = target.layers * rows * (own.queries + depth) * width + 2 * step
        prompt = target.layers * MAX_OWN_QUERIES * width
        # Candidates, their places in the shared list, ranks and targets; lists as they are, sorted, and their order.
        chosen = 8 * target.layers * lists * (5 * free + 4 * selection.budget)
        turns = min(own.per_step, target.layers)
        sums = 4 * turns * rows * (2 * target.kv_heads + 1) * capacity  # of parts of the queries, added
        ranked = 8 * turns * lists * (capacity + 2 * free)  # the best of each chunk: at most all
        return queries + prompt + chosen + sums + ranked

    def verification(self, signals: Signals) -> Verification:
        if self.rule is None:
            return KeepingAttention(self.select(signals))
        return super().verification(signals)

    def _attention(
        self, signals: Signals, kept: Tensor, full: Tensor | None, estimate: Tensor | None
    ) -> SparseAttention:
        return KeepingAttention(kept, full=full, estimate=estimate)

    def _due(self, signals: Signals, rule: Rule) -> Tensor:
        assert isinstance(signals.memory, FreshLists)
        return rule.due(signals.memory.steps - 1)  # `begin` has counted this one

    def _lists(self, signals: Signals, lookahead: Tensor | None, history: Tensor | None) -> Tensor:
        """[layers, batch, kv_heads or 1, k]."""
        assert self.selection is not None and isinstance(signals.memory, FreshLists)
        lengths, own = signals.lengths, shares(self.selection).own
        shared = self._global_list(lengths, lookahead, history)
        return merge(shared, signals.memory.candidates, lengths, own, self.selection.window)
