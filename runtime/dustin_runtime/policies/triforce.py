"""TriForce: a draft that reads chunks of its cache which the end of the prompt points to (arXiv 2404.11912)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dustin_runtime.models.shape import ModelShape
from dustin_runtime.policies.full import SpeculativeDecoding
from dustin_runtime.policies.prompt_lists import PromptLists

CHUNK = 8
"""Tokens of a chunk."""


def retrieve(layer: int, q: Tensor, k: Tensor, budget: int) -> Tensor:
    """The first chunk, and those whose mean key the prompt's last query scores highest, the first of equals.

    The scores of a KV head's query heads are summed. (The paper's models have one each.)

    Args:
        q: [batch, 1, query_heads, head_size] after RoPE; k: [batch, length, kv_heads, head_size] after RoPE.
        budget: tokens, of which whole chunks are read.

    Returns:
        [batch, kv_heads, budget] int64 ascending, -1 padded.
    """
    batch, length, kv_heads, head_size = k.shape
    chunks = -(-length // CHUNK)
    sums = torch.nn.functional.pad(k.float(), (0, 0, 0, 0, 0, chunks * CHUNK - length)).unflatten(1, (chunks, CHUNK))
    sizes = (length - torch.arange(0, length, CHUNK, device=k.device)).clamp(max=CHUNK)
    means = sums.sum(dim=2) / sizes[:, None, None]  # [batch, chunks, kv_heads, head_size]
    together = q[:, -1].float().view(batch, kv_heads, -1, head_size).sum(dim=2)
    scores = torch.einsum("bnhd,bhd->bhn", means, together)
    scores[..., 0] = torch.inf
    # Stable: equal scores keep the order of chunks.
    order = scores.sort(dim=2, descending=True, stable=True).indices[..., : budget // CHUNK].sort(dim=2).values
    positions = (order.unsqueeze(3) * CHUNK + torch.arange(CHUNK, device=k.device)).flatten(2)
    positions = torch.where(positions < length, positions, -1)
    return torch.nn.functional.pad(positions, (0, budget - positions.shape[2]), value=-1)


@dataclass(frozen=True)
class TriForce(SpeculativeDecoding):
    """A draft that reads `retrieve`d chunks of its prompt and what was generated since, verified with the full cache.

    The chunks are chosen once, in every layer and KV head. As published the target with such a cache is the middle of
    three models; here it is what the draft reads, so `self:N` is nearest to the paper. What is generated is read beside
    the budget, where the paper lets it take the place of chunks.
    """

    name: ClassVar[str] = "triforce"
    over_ranks: ClassVar[bool] = False
    partial_draft: ClassVar[bool] = True
    prompt_queries: ClassVar[int] = 1

    def draft_keeps(self, budget: int | None) -> None:
        return None

    def draft_lists(
        self, draft: ModelShape, rows: int, capacity: int, budget: int, device: torch.device
    ) -> PromptLists:
        return PromptLists(retrieve, draft, rows, capacity, budget, device)
