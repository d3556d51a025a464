"""SpecAttn (arXiv 2510.27641), and what the Dustin paper measured in its place (arXiv 2606.24957, Appendix F)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dustin_runtime.attention.layered import DenseFirst
from dustin_runtime.config import LayerHeads
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.policies.base import Prompted, Signals, Verification
from dustin_runtime.policies.draft_rows import DraftRowsPolicy, all_heads
from dustin_runtime.policies.dustin import DustinD
from dustin_runtime.policies.layer_map import monotone_map, similarities
from dustin_runtime.selection import ascending, ranked

NUCLEUS = 0.95
"""Share of a drafted token's attention on the prefix that its tokens must hold; the largest saving of the paper."""
HALVINGS = 10
"""Steps of the search for the threshold that holds it."""
DENSE = 2
"""First target layers that read everything."""


class LayerMap:
    """The draft layer of every sparse target layer; implements `policies.base.Memory`.

    Attributes:
        layers: [target layers - DENSE, rows] int64.
    """

    def __init__(self, target: ModelShape, rows: int, device: torch.device) -> None:
        self.layers = torch.zeros(max(target.layers - DENSE, 0), rows, dtype=torch.int64, device=device)

    def admit(self, row: int, target: Prompted, draft: Prompted | None) -> None:
        """Compare the layers on the end of a prompt."""
        assert draft is not None
        found = monotone_map(similarities(target, draft).tolist())
        self.layers[:, row] = self.layers.new_tensor(found[DENSE:])


def nucleus(rows: Tensor, share: float) -> Tensor:
    """Which positions hold a share of each row: those of a threshold or more, found by halving [0, the largest].

    Args:
        rows: [..., positions] fp32, not negative.

    Returns:
        The same in bool. A row of zeros is kept whole.
    """
    low, high = torch.zeros_like(rows[..., :1]), rows.amax(dim=-1, keepdim=True)
    wanted = share * rows.sum(dim=-1, keepdim=True)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = torch.where(rows >= middle, rows, 0).sum(dim=-1, keepdim=True) >= wanted
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return rows >= low


def nucleus_lists(rows: Tensor, lengths: Tensor, budget: int) -> Tensor:
    """The union of the drafted tokens' nuclei; of one larger than the budget, what they attend to most together.

    Args:
        rows: [batch, depth, positions] fp32 attention; lengths: [batch] int64 tokens of each prefix.

    Returns:
        [batch, budget] int64 ascending, -1 padded. A prefix that the budget covers is kept whole.
    """
    ends = lengths.unsqueeze(1)
    prefix = torch.arange(rows.shape[2], device=rows.device) < ends  # [batch, positions]
    rows = torch.where(prefix.unsqueeze(1), rows, 0)
    union = nucleus(rows, NUCLEUS).any(dim=1) | (ends <= budget)
    return ascending(ranked(rows.sum(dim=1), union & prefix, budget))


@dataclass(frozen=True)
class SpecAttn(DraftRowsPolicy):
    """A list for every target layer, the nucleus of the draft layer that attends like it; the first two read all.

    Draft layers are mapped to target layers so that the order is kept and the sum of -KL(target || draft) is largest.
    The paper maps them once, on WikiText; here each sequence is mapped on the end of its own prompt, so that no data is
    needed. A layer's attention is the mean over its heads. As published a nucleus has no limit; here it is the budget.
    Nothing is protected: the draft's own attention finds first and last tokens.
    """

    name: ClassVar[str] = "specattn"
    prompt_queries: ClassVar[int] = 32

    def memory(self, target: Decoder, depth: int, rows: int, capacity: int) -> LayerMap:
        return LayerMap(target.shape, rows, target.device)

    def verification(self, signals: Signals) -> Verification:
        return DenseFirst(DENSE, self.select(signals))

    def select(self, signals: Signals) -> Tensor:
        """Lists of the layers behind the dense ones."""
        assert self.selection is not None and isinstance(signals.memory, LayerMap)
        layers, lengths = signals.memory.layers, signals.lengths
        lists = [nucleus_lists(rows.mean(dim=1), lengths, self.selection.budget) for rows in signals.lookahead_rows()]
        every_row = torch.arange(len(lengths), device=lengths.device)
        return torch.stack(lists)[layers, every_row].unsqueeze(2)


@dataclass(frozen=True)
class SpecAttnAll(DustinD):
    """One list, chosen by the attention of all heads of all draft layers over the drafted tokens.

    The Dustin paper's stand-in for SpecAttn, of which no code is public. Against Dustin-D it says what choosing heads
    is worth, and what scoring them all costs.
    """

    name: ClassVar[str] = "specattn-all"
    over_ranks: ClassVar[bool] = False

    def lookahead_heads(self, draft: ModelShape) -> tuple[LayerHeads, ...]:
        return all_heads(draft)
