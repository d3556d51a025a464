"""Attention rows of chosen heads and queries, recomputed from saved queries and cached keys.

The only place where attention weights exist: O(keys) per head and query, never a whole [queries x keys] map of a prompt
(arXiv 2606.24957, section 4.2.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def attention_rows(
    q: Tensor, k: Tensor, heads: Sequence[int], group: int, position: Tensor
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
    extent = k.shape[1]
    hidden = torch.arange(extent, device=k.device) > position.unsqueeze(2)  # [batch, queries, extent]
    for kv_head in sorted({head // group for head in heads}):
        entries = [entry for entry, head in enumerate(heads) if head // group == kv_head]
        packed = q[:, :, entries].float().reshape(batch, queries * len(entries), head_size) * head_size**-0.5
        scores = packed @ k[:, :, kv_head].float().transpose(1, 2)
        scores = scores.view(batch, queries, len(entries), extent)
        yield entries, scores.masked_fill_(hidden.unsqueeze(2), float("-inf")).softmax(dim=-1)


def attention_scores(q: Tensor, k: Tensor, heads: Sequence[int], group: int, position: Tensor) -> Tensor:
    """Importance of every position: the rows of `attention_rows` summed over heads and queries (Eq. 5).

    Returns:
        [batch, extent] fp32.
    """
    total = torch.zeros(k.shape[:2], dtype=torch.float32, device=k.device)
    for _, rows in attention_rows(q, k, heads, group, position):
        total += rows.sum(dim=(1, 2))
    return total
