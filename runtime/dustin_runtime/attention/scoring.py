"""Attention rows of chosen heads and queries, recomputed from saved queries and cached keys.

The only place where attention weights exist: O(keys) per head and query, never a whole [queries x keys] map of a prompt
(arXiv 2606.24957, section 4.2.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dustin_runtime.config import LayerHeads
from dustin_runtime.kernels import processors, usable
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.scaled import Held, of_layer, plain, shown

MASS_QUERIES = 64
"""Queries of all heads whose rows over a long prompt exist at once."""


class ScoredHeads:
    """The query heads of one model that are asked which positions they attend to.

    A head of a layer is an *entry*; entries are numbered in the order of the configuration. `len()` counts them.

    Args:
        chosen: layers and their query heads.
        query_heads: of a layer of the model.
        group: query heads per KV head of the model.
        key_layers: where the chosen layers lie in the keys that `scores` is given; by default these are of all layers.

    Attributes:
        layers: the chosen layers of the model.
        heads: [entries] int64, where the entries' query heads lie in the chosen layers' heads one after the other.
        groups: [groups, 2] int32, the (layer, KV head) pairs that are read; members: [groups, most] int32, the entries
            that read each, -1 padded.
    """

    def __init__(
        self,
        chosen: Sequence[LayerHeads],
        query_heads: int,
        group: int,
        device: torch.device | str,
        key_layers: Sequence[int] | None = None,
    ) -> None:
        self.chosen = tuple(chosen)
        self.group = group
        self.query_heads = query_heads
        self.layers = [entry.layer for entry in chosen]
        places = [index * query_heads + head for index, entry in enumerate(chosen) for head in entry.heads]
        self.heads = torch.tensor(places, device=device)
        self._key_layers = list(self.layers if key_layers is None else key_layers)
        readers: dict[tuple[int, int], list[int]] = {}
        numbered = (
            (layer, head) for layer, entry in zip(self._key_layers, chosen, strict=True) for head in entry.heads
        )
        for index, (layer, head) in enumerate(numbered):
            readers.setdefault((layer, head // group), []).append(index)
        most = 1 << (max(map(len, readers.values())) - 1).bit_length()
        padded = [[*entries, *[-1] * (most - len(entries))] for entries in readers.values()]
        self.groups = torch.tensor(list(readers), dtype=torch.int32, device=device)
        self.members = torch.tensor(padded, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        return sum(len(entry.heads) for entry in self.chosen)

    def by_layer(self) -> dict[int, ScoredHeads]:
        """The same heads, layer by layer."""
        return {
            entry.layer: ScoredHeads([entry], self.query_heads, self.group, self.heads.device, [place])
            for entry, place in zip(self.chosen, self._key_layers, strict=True)
        }

    def gather_last(self, passes: Sequence[Mapping[int, Tensor]]) -> Tensor:
        """The queries of all entries at the last token of several passes: [batch, passes, entries, head_size].

        Args:
            passes: queries saved by layer, [batch, tokens, query_heads, head_size].
        """
        saved = [queries[layer][:, -1:] for queries in passes for layer in self.layers]
        together = saved[0] if len(saved) == 1 else torch.cat(saved, dim=2)
        batch, _, _, head_size = together.shape
        return together.reshape(batch, len(passes), -1, head_size).index_select(2, self.heads)

    def scores(self, q: Tensor, keys: Held, position: Tensor, columns: int, share: float | None = None) -> Tensor:
        """Importance of every position: softmax rows, summed over heads, layers and queries (Eq. 5).

        Args:
            q: [batch, queries, entries, head_size] queries after RoPE.
            keys: [layers, batch, capacity, kv_heads, head_size] keys after RoPE; see `key_layers`.
            position: [batch, queries] int64, ascending, where each query stands; its row covers [0, position].
            columns: positions that are wanted, the capacity at most. What lies beyond is not renormalised away.
            share: of the GPU's processors that are used, roughly; by default all, several times over.

        Returns:
            [batch, columns] fp32.
        """
        if usable(q, heads_of=q.shape[3]):
            from dustin_runtime.kernels.scoring import attention_scores as kernel

            programs = None if share is None else int(share * processors(q.device))
            return kernel(q, keys, self.groups, self.members, position, columns, programs)
        return self.reference(q, shown(keys, columns + q.shape[1]), position)[:, :columns]

    def reference(self, q: Tensor, keys: Held, position: Tensor) -> Tensor:
        """`scores` in plain torch, of all positions that `keys` has."""
        total = torch.zeros(keys.shape[1:3], dtype=torch.float32, device=q.device)
        begin = 0
        for layer, entry in zip(self._key_layers, self.chosen, strict=True):
            end = begin + len(entry.heads)
            total += attention_scores(q[:, :, begin:end], of_layer(keys, layer), entry.heads, self.group, position)
            begin = end
        return total


def attention_rows(
    q: Tensor, k: Held, heads: Sequence[int], group: int, position: Tensor
) -> Iterator[tuple[list[int], Tensor]]:
    """Softmax rows of chosen query heads, one KV head at a time so that memory stays at a few rows.

    Args:
        q: [batch, queries, len(heads), head_size] queries of those heads, after RoPE.
        k: [batch, extent, kv_heads, head_size] keys of the layer, after RoPE.
        heads: the query heads' indices in their layer; head h reads KV head h // group.
        position: [batch, queries] int64, where each query stands. Its row covers the positions [0, position].

    Yields:
        Which entries of `heads` share a KV head, and their rows [batch, queries, len(entries), extent] fp32: each sums
        to 1, zero beyond the query's position.
    """
    batch, queries, _, head_size = q.shape
    k = plain(k, torch.float32)
    extent = k.shape[1]
    hidden = torch.arange(extent, device=k.device) > position.unsqueeze(2)  # [batch, queries, extent]
    for kv_head in sorted({head // group for head in heads}):
        entries = [entry for entry, head in enumerate(heads) if head // group == kv_head]
        packed = q[:, :, entries].float().reshape(batch, queries * len(entries), head_size) * head_size**-0.5
        scores = packed @ k[:, :, kv_head].float().transpose(1, 2)
        scores = scores.view(batch, queries, len(entries), extent)
        yield entries, scores.masked_fill_(hidden.unsqueeze(2), float("-inf")).softmax(dim=-1)


def last_rows(q: Tensor, k: Held) -> Tensor:
    """Softmax rows of a sequence's last tokens, of all heads, each over the keys it sees.

    Args:
        q: [batch, tokens, query_heads, head_size] after RoPE.
        k: [batch, keys, kv_heads, head_size] after RoPE, of which the tokens' own are the last.

    Returns:
        [batch, kv_heads, group, tokens, keys] fp32.
    """
    batch, tokens = q.shape[:2]
    last = torch.arange(k.shape[1] - tokens, k.shape[1], device=q.device)
    return rows_at(q, k, last.expand(batch, -1))


def rows_at(q: Tensor, k: Held, position: Tensor) -> Tensor:
    """The same of tokens that stand anywhere.

    Args:
        position: [batch, tokens] int64. A token's row covers the positions [0, position].
    """
    k = plain(k, torch.float32)
    batch, tokens, _, head_size = q.shape
    keys, kv_heads = k.shape[1:3]
    packed = q.float().view(batch, tokens, kv_heads, -1, head_size).permute(0, 2, 3, 1, 4)
    scores = packed @ k.float().permute(0, 2, 3, 1).unsqueeze(2) * head_size**-0.5
    hidden = torch.arange(keys, device=k.device) > position[:, None, None, :, None]
    rows: Tensor = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return rows


def rows_bytes(model: ModelShape, tokens: int, keys: int) -> int:
    """What `rows_at` takes at once in one layer: fp32 scores, hidden and normalised, and fp32 keys per query head."""
    return 4 * model.query_heads * keys * (3 * tokens + model.head_size)


def received_mass(q: Tensor, k: Held) -> Tensor:
    """Attention that a sequence's last tokens pay to every position; shapes as in `last_rows`.

    Returns:
        [batch, kv_heads, group, keys] fp32: softmax rows, summed over the tokens.
    """
    if usable(q, heads_of=q.shape[-1]):
        from dustin_runtime.kernels import mass

        return mass.received_mass(q, k)
    return received_mass_reference(q, k)


def received_mass_reference(q: Tensor, k: Held) -> Tensor:
    """The same in plain torch, `MASS_QUERIES` at a time."""
    k = plain(k, torch.float32)
    batch, tokens, query_heads = q.shape[:3]
    keys, kv_heads = k.shape[1:3]
    size = (batch, kv_heads, query_heads // kv_heads, keys)
    total = torch.zeros(size, dtype=torch.float32, device=k.device)
    for begin in range(0, tokens, MASS_QUERIES):
        end = min(begin + MASS_QUERIES, tokens)
        seen = keys - tokens + end
        total[..., :seen] += last_rows(q[:, begin:end], k[:, :seen]).sum(dim=3)
    return total


def attention_scores(q: Tensor, k: Held, heads: Sequence[int], group: int, position: Tensor) -> Tensor:
    """Importance of every position: the rows of `attention_rows` summed over heads and queries (Eq. 5).

    Returns:
        [batch, extent] fp32.
    """
    total = torch.zeros(k.shape[:2], dtype=torch.float32, device=q.device)
    for _, rows in attention_rows(q, k, heads, group, position):
        total += rows.sum(dim=(1, 2))
    return total
