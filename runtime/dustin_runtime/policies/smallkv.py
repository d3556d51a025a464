"""SmallKV: the draft's attention chooses tokens, and stands in for the target's on marginal ones (arXiv 2508.02751)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dustin_runtime.attention.scoring import received_mass
from dustin_runtime.attention.sparse import SparseAttention
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.parallel.split import Part
from dustin_runtime.policies.base import Prompted, Signals, Verification
from dustin_runtime.policies.draft_rows import DraftRowsPolicy
from dustin_runtime.scaled import Held, at_slots
from dustin_runtime.selection import ascending, eligible_positions, ranked

MOST_COMPARED = 256
"""Positions by which heads are matched, or a quarter of a prompt that is shorter than four times this."""


class HeadMap:
    """The draft head of every target head; implements `policies.base.Memory`.

    Attributes:
        heads: [layers, rows, query_heads] int64, heads of the draft's layers counted one after the other.
    """

    def __init__(self, target: ModelShape, rows: int, device: torch.device) -> None:
        self.heads = torch.zeros(target.layers, rows, target.query_heads, dtype=torch.int64, device=device)

    def admit(self, row: int, target: Prompted, draft: Prompted | None) -> None:
        """Compare the heads on the end of a prompt."""
        assert draft is not None
        theirs = torch.cat([important(draft, layer) for layer in sorted(draft.queries)])
        for layer in target.queries:
            self.heads[layer, row] = most_alike(important(target, layer), theirs)


def important(prompted: Prompted, layer: int) -> Tensor:
    """The positions that each query head of a layer attends to most, from the prompt's last queries together.

    Compared are the positions before these queries: among the queries' own, every head attends to the nearest, so that
    all would be alike. A prompt that has fewer before them than of them is compared whole.

    Returns:
        [query_heads, positions] bool, equally many in each row.
    """
    q = prompted.queries[layer]
    mass = received_mass(q, prompted.keys(layer))[0].flatten(0, 1)
    before = prompted.length - q.shape[1]
    mass = mass[:, :before] if before >= q.shape[1] else mass
    chosen = ranked(mass, torch.ones_like(mass, dtype=torch.bool), min(-(-mass.shape[1] // 4), MOST_COMPARED))
    return torch.zeros_like(mass, dtype=torch.bool).scatter(1, chosen, True)


def most_alike(ours: Tensor, theirs: Tensor) -> Tensor:
    """For every row of `ours` the row of `theirs` of the largest Jaccard similarity, the first of equals.

    All rows have equally many positions, so the one with which most are shared has it.

    Args:
        ours, theirs: [heads, positions] bool.

    Returns:
        [heads of ours] int64.
    """
    shared = (ours.float() @ theirs.float().T).long()
    order = torch.arange(len(theirs), 0, -1, device=shared.device)
    return (shared * (len(theirs) + 1) + order).argmax(dim=1)


def tiers(scores: Tensor, lengths: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Tokens read in full, the critical and the recent ones, and marginal ones, of which only values are read.

    Critical, recent and marginal are as 2 : 1 : 2. A marginal token counts half, so that they fill the budget.

    Args:
        scores: [batch, kv_heads, positions] fp32, not negative; lengths: [batch] int64 tokens of each prefix.

    Returns:
        full: [batch, kv_heads, budget] int64 ascending; marginal: [batch, kv_heads, about budget / 2] int64; both -1
        padded. A prefix that the budget covers is read in full.
    """
    critical, recent = budget // 2, budget // 4
    half = 2 * (budget - critical - recent)
    eligible = eligible_positions(lengths, scores.shape[2], sink=0, window=recent)
    best = ranked(scores, eligible.unsqueeze(1), critical + half)
    ends = lengths[:, None, None]
    last = (ends + torch.arange(-recent, 0, device=scores.device)).clamp(min=-1).expand(*scores.shape[:2], -1)
    full = ascending(torch.cat((best[..., :critical], last), dim=2))
    full = torch.nn.functional.pad(full, (0, budget - full.shape[2]), value=-1)
    slots = torch.arange(budget, device=scores.device)
    covered = ends <= budget
    full = torch.where(covered, torch.where(slots < ends, slots, -1), full)
    return full, torch.where(covered, -1, best[..., critical:])


class SmallKVAttention:
    """Verification over the tiers of each layer and KV head; implements `policies.Verification`.

    Args:
        rows: [batch, draft heads, depth, positions] fp32 attention of the drafted tokens.
    """

    def __init__(self, memory: HeadMap, rows: Tensor, lengths: Tensor, budget: int) -> None:
        self.memory = memory
        self.rows = rows
        self.received = rows.sum(dim=2)
        self.lengths = lengths
        self.budget = budget
        self._tiers: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, q: Tensor, k: Held, v: Held, start: Tensor) -> Tensor:
        heads = self.memory.heads[layer]  # [batch, query_heads]
        row = torch.arange(len(heads), device=heads.device)
        scores = self.received[row[:, None], heads].unflatten(1, (k.shape[2], -1)).sum(dim=2)
        full, marginal = tiers(scores, self.lengths, self.budget)
        self._tiers.append((full, marginal))
        near = SparseAttention(full.unsqueeze(0))(0, q, k, v, start)
        group = q.shape[2] // k.shape[2]
        at = marginal.clamp(min=0).repeat_interleave(group, dim=1)  # [batch, query_heads, marginal]
        weights = self.rows[row[:, None, None], heads[:, :, None], :, at]  # [batch, query_heads, marginal, depth]
        weights = weights * (marginal >= 0).repeat_interleave(group, dim=1).unsqueeze(3)
        return stand_in(near, weights, v, marginal)

    def tokens_read(self, lengths: Tensor) -> Tensor:
        """[batch] fp32, mean over layers and KV heads; a marginal token counts half."""
        return torch.stack([_read(full) + _read(marginal) / 2 for full, marginal in self._tiers]).mean(dim=0)

    def kept(self, layer: int) -> Tensor:
        """[batch, kv_heads, k], those read in full."""
        return self._tiers[layer][0]


def stand_in(near: Tensor, weights: Tensor, v: Held, marginal: Tensor) -> Tensor:
    """Join attention to the tokens read in full with the draft's weights on marginal ones; all weights then sum to 1.

    The last drafted token has no weights, as the draft has not processed it: those of the one before serve.

    Args:
        near: [batch, tokens, query_heads, head_size], attention to the others alone.
        weights: [batch, query_heads, marginal, depth] fp32; v: [batch, extent, kv_heads, head_size].
        marginal: [batch, kv_heads, marginal] int64 positions.

    Returns:
        As `near`.
    """
    tokens, depth, kv_heads = near.shape[1], weights.shape[3], v.shape[2]
    weights = torch.cat((weights, weights[..., -1:].expand(-1, -1, -1, tokens - depth)), dim=3)
    values = at_slots(v, marginal.clamp(min=0), torch.float32).float()  # [batch, kv_heads, marginal, head_size]
    far = weights.transpose(2, 3).unflatten(1, (kv_heads, -1)) @ values.unsqueeze(2)
    far = far.flatten(1, 2).transpose(1, 2)  # [batch, tokens, query_heads, head_size]
    own = 1 - weights.sum(dim=2).transpose(1, 2).unsqueeze(3)
    out: Tensor = near * own + far
    return out.to(near.dtype)


def _read(positions: Tensor) -> Tensor:
    return (positions >= 0).sum(dim=2).float().mean(dim=1)


@dataclass(frozen=True)
class SmallKV(DraftRowsPolicy):
    """Per layer and KV head, the tokens that matched draft heads attend to; less important ones keep only their values.

    Each target head is matched to the draft head whose most attended positions, from the prompt's last 128 tokens, are
    most like its own. Other than published, scores are what the matched heads pay from the step's drafted tokens, not
    from the whole sequence, and are summed over the query heads of a KV head. How many positions are compared is a
    choice of ours.
    """

    name: ClassVar[str] = "smallkv"
    chooses_by_layer: ClassVar[bool] = True
    prompt_queries: ClassVar[int] = 128

    def memory(self, target: Decoder, depth: int, rows: int, capacity: int) -> HeadMap:
        return HeadMap(target.shape, rows, target.device)

    def memory_bytes(
        self, target: Part, draft: ModelShape | None, depth: int, rows: int, capacity: int, element_bytes: int
    ) -> int:
        assert draft is not None
        joined = 4 * rows * draft.layers * draft.query_heads * capacity * (depth + 1)  # rows once more, and their sums
        return joined + super().memory_bytes(target, draft, depth, rows, capacity, element_bytes)

    def verification(self, signals: Signals) -> Verification:
        assert self.selection is not None and isinstance(signals.memory, HeadMap)
        rows = torch.cat(list(signals.lookahead_rows()), dim=1)
        return SmallKVAttention(signals.memory, rows, signals.lengths, self.selection.budget)

    def select(self, signals: Signals) -> Tensor:
        raise NotImplementedError("SmallKV chooses in each layer, see `verification`")
