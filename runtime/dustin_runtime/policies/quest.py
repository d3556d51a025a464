"""Quest: pages of the cache whose keys could score highest for the query at hand (arXiv 2406.10774)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.sparse import SparseAttention, sparse_by_query_head
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.parallel.split import Part
from dustin_runtime.policies.base import Policy, Prompted, Signals, Verification
from dustin_runtime.scaled import Held, at_slots

PAGE = 16
"""Tokens of a page."""
DENSE_LAYERS = 2
"""First layers that read everything: their attention is spread out."""
LEAST_PAGES = 3


class PageBounds:
    """The smallest and largest value of every channel of a page's keys; implements `policies.base.Memory`.

    Pages that a step has filled are computed anew in the next one: pages are never read as a whole.

    Attributes:
        lowest, highest: [layers - DENSE_LAYERS, rows, pages, kv_heads, head_size].
    """

    def __init__(self, target: ModelShape, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        layers = max(target.layers - DENSE_LAYERS, 0)
        size = (layers, rows, -(-capacity // PAGE), target.kv_heads, target.head_size)
        self.lowest, self.highest = torch.zeros(2, *size, dtype=dtype, device=device)

    def admit(self, row: int, target: Prompted, draft: Prompted | None) -> None:
        """Compute all pages of a prompt."""
        length = target.length
        pages = -(-length // PAGE)
        for index in range(len(self.lowest)):
            keys = target.keys(index + DENSE_LAYERS)[0]  # [length, kv_heads, head_size]
            # The last page repeats its last key, which changes neither bound.
            padding = keys[-1:].expand(pages * PAGE - length, -1, -1)
            paged = torch.cat((keys, padding)).unflatten(0, (pages, PAGE))
            self.lowest[index, row, :pages] = paged.amin(dim=1)
            self.highest[index, row, :pages] = paged.amax(dim=1)

    def refresh(self, layer: int, k: Held, start: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Bring the bounds of a layer up to date.

        Args:
            k: [batch, extent, kv_heads, head_size] keys of the layer.
            start: [batch] int64 length of each prefix, of which at most `tokens` were added since the last call.

        Returns:
            lowest, highest: [batch, pages, kv_heads, head_size] of pages that begin in the extent.
        """
        lowest, highest = self.lowest[layer - DENSE_LAYERS], self.highest[layer - DENSE_LAYERS]
        touched = (tokens - 1 + PAGE - 1) // PAGE + 1  # pages that `tokens` tokens can lie in
        last = (start - 1).clamp(min=0) // PAGE
        page = (last.unsqueeze(1) - torch.arange(touched, device=start.device)).clamp(min=0)  # [batch, touched]
        position = page.unsqueeze(2) * PAGE + torch.arange(PAGE, device=start.device)
        position = torch.minimum(position, (start - 1).clamp(min=0)[:, None, None])  # the last key, again
        rows = torch.arange(len(start), device=start.device)
        keys = at_slots(k, position.flatten(1).unsqueeze(1), lowest.dtype).transpose(1, 2).unflatten(1, (touched, PAGE))
        lowest[rows[:, None], page] = keys.amin(dim=2)  # [batch, touched, kv_heads, head_size]
        highest[rows[:, None], page] = keys.amax(dim=2)
        pages = -(-k.shape[1] // PAGE)
        return lowest[:, :pages], highest[:, :pages]


def page_scores(q: Tensor, lowest: Tensor, highest: Tensor, by_query_head: bool) -> Tensor:
    """The largest score that any key of a page could have, for the best of a head's queries.

    Args:
        q: [batch, tokens, query_heads, head_size]; lowest, highest: [batch, pages, kv_heads, head_size].
        by_query_head: whether a head is a query head, or a KV head with the queries of its group.

    Returns:
        [batch, query_heads or kv_heads, pages] fp32.
    """
    batch, tokens, _, head_size = q.shape
    kv_heads = lowest.shape[2]
    packed = q.float().view(batch, tokens, kv_heads, -1, head_size).permute(0, 2, 1, 3, 4).flatten(2, 3)
    low, high = (x.float().permute(0, 2, 3, 1) for x in (lowest, highest))  # [batch, kv_heads, head_size, pages]
    bound = packed.clamp(min=0) @ high + packed.clamp(max=0) @ low
    if not by_query_head:
        return bound.amax(dim=2)
    return bound.view(batch, kv_heads, tokens, -1, bound.shape[3]).amax(dim=2).flatten(1, 2)


def choose_pages(scores: Tensor, lengths: Tensor, budget: int) -> Tensor:
    """The last page, and those of the highest scores, the first of equals, as positions.

    Args:
        scores: [batch, heads, pages]; lengths: [batch] int64 tokens of each prefix.
        budget: tokens; `LEAST_PAGES` pages are read whatever it says.

    Returns:
        [batch, heads, budget in whole pages] int64 ascending, -1 padded.
    """
    count = min(max(budget // PAGE, LEAST_PAGES), scores.shape[2])
    page = torch.arange(scores.shape[2], device=scores.device)
    last = ((lengths - 1) // PAGE)[:, None, None]
    scores = scores.masked_fill(page == last, torch.inf).masked_fill(page > last, -torch.inf)
    # Stable: equal scores keep the order of pages.
    order = scores.sort(dim=2, descending=True, stable=True).indices[..., :count]
    order = torch.where(order <= last, order, scores.shape[2]).sort(dim=2).values  # pages that are not there come last
    position = (order.unsqueeze(3) * PAGE + torch.arange(PAGE, device=scores.device)).flatten(2)
    return torch.where(position < lengths[:, None, None], position, -1)


class QuestAttention:
    """Verification that chooses pages in each layer; implements `policies.Verification`.

    Args:
        by_query_head: whether each query head reads pages of its own, rather than all of a KV head the same.
    """

    def __init__(self, bounds: PageBounds, budget: int, by_query_head: bool) -> None:
        self.bounds = bounds
        self.budget = budget
        self.by_query_head = by_query_head
        self._read: list[Tensor | None] = []
        self._lists: list[Tensor | None] = []

    def __call__(self, layer: int, q: Tensor, k: Held, v: Held, start: Tensor) -> Tensor:
        if layer < DENSE_LAYERS:
            self._lists.append(None)
            self._read.append(None)
            return dense_attention(layer, q, k, v, start)
        scores = page_scores(q, *self.bounds.refresh(layer, k, start, q.shape[1]), self.by_query_head)
        kept = choose_pages(scores, start, self.budget)
        self._lists.append(kept)
        if self.by_query_head:
            self._read.append(distinct(kept.unflatten(1, (k.shape[2], -1)).flatten(2)).float().mean(dim=1))
            return sparse_by_query_head(q, k, v, start, kept)
        attend = SparseAttention(kept.unsqueeze(0))
        self._read.append(attend.tokens_read(start))
        return attend(0, q, k, v, start)

    def tokens_read(self, lengths: Tensor) -> Tensor:
        """[batch] fp32, mean over layers and KV heads, of which each reads what any of its query heads does.

        The bounds, one token's worth per page, are not counted.
        """
        return torch.stack([lengths.float() if read is None else read for read in self._read]).mean(dim=0)

    def kept(self, layer: int) -> Tensor | None:
        """[batch, kv_heads or query_heads, k]."""
        return self._lists[layer]


def distinct(positions: Tensor) -> Tensor:
    """How many different positions each list [..., n] has; -1 is none."""
    ordered = positions.sort(dim=-1).values
    first = torch.nn.functional.pad(ordered[..., 1:] != ordered[..., :-1], (1, 0), value=True)
    return (first & (ordered >= 0)).sum(dim=-1)


@dataclass(frozen=True)
class Quest(Policy):
    """Draft, then verify over the pages of 16 tokens whose bounds promise most to any new query of a KV head.

    As published a page is chosen per query head (`QuestQueryHead`), for one query; here per KV head, for the best of
    the step's queries, so that each key is read once. The first two layers read everything.
    """

    name: ClassVar[str] = "quest"
    by_query_head: ClassVar[bool] = False
    chooses_by_layer: ClassVar[bool] = True
    needs_selection: ClassVar[bool] = True

    def memory(self, target: Decoder, depth: int, rows: int, capacity: int) -> PageBounds:
        return PageBounds(target.shape, rows, capacity, target.dtype, target.device)

    def memory_bytes(
        self, target: Part, draft: ModelShape | None, depth: int, rows: int, capacity: int, element_bytes: int
    ) -> int:
        shape, pages = target.shape, -(-capacity // PAGE)
        width = shape.kv_heads * shape.head_size * element_bytes
        return 2 * max(shape.layers - DENSE_LAYERS, 0) * rows * pages * width

    def verification(self, signals: Signals) -> Verification:
        assert self.selection is not None and isinstance(signals.memory, PageBounds)
        return QuestAttention(signals.memory, self.selection.budget, self.by_query_head)

    def select(self, signals: Signals) -> Tensor:
        raise NotImplementedError("Quest chooses in each layer, see `verification`")


@dataclass(frozen=True)
class QuestQueryHead(Quest):
    """The same with pages of its own for every query head, as published, but for the best of the step's queries.

    The budget is a query head's; a KV head reads the pages of all its query heads, up to their number times as many.
    """

    name: ClassVar[str] = "quest-query-head"
    by_query_head: ClassVar[bool] = True
