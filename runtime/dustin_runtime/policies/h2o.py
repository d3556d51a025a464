"""H2O: the tokens that received the most attention so far, and the last ones (arXiv 2306.14048, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dustin_runtime.attention.sparse import SparseAttention, sparse_rows
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.parallel.split import Part
from dustin_runtime.policies.base import Policy, Prompted, Signals, Verification
from dustin_runtime.scaled import Held
from dustin_runtime.selection import ascending, ranked


class HeavyHitters:
    """Listed tokens and what they have received; implements `policies.base.Memory`.

    Attributes:
        positions: [layers, rows, kv_heads, budget] int64 ascending, -1 padded.
        mass: the same in fp32: attention received, summed over queries and over the query heads of a KV head.
        lengths: [rows] int64 prefix of each row when `positions` was chosen.
        rows: [layers, rows, kv_heads, depth + 1, budget + depth + 1] fp32, what the last step's tokens paid to the list
            and to each other. It is added to `mass` in the next step, when it is known which of them were accepted.
    """

    def __init__(self, target: ModelShape, depth: int, rows: int, budget: int, device: torch.device) -> None:
        size = (target.layers, rows, target.kv_heads)
        self.positions = torch.full((*size, budget), -1, dtype=torch.int64, device=device)
        self.mass = torch.zeros(*size, budget, device=device)
        self.lengths = torch.ones(rows, dtype=torch.int64, device=device)
        self.rows = torch.zeros(*size, depth + 1, budget + depth + 1, device=device)
        self._order = torch.arange(depth + 1, device=device)

    def admit(self, row: int, target: Prompted, draft: Prompted | None) -> None:
        """Choose among all tokens of a prompt."""
        budget = self.positions.shape[3]
        every = torch.arange(target.length, device=self.lengths.device)
        for layer, mass in target.received.items():
            self.positions[layer, row], self.mass[layer, row] = heaviest(
                every.expand_as(mass[0]), mass[0], every.new_tensor(target.length), budget
            )
        self.lengths[row] = target.length

    def lists(self, lengths: Tensor) -> Tensor:
        """Take in what the last step added to each prefix, and choose anew: [layers, rows, kv_heads, budget].

        Args:
            lengths: [rows] int64. Asked again with the same ones, it changes nothing.
        """
        accepted = self._order < (lengths - self.lengths).unsqueeze(1)  # [rows, depth + 1]
        paid = torch.where(accepted[None, :, None, :, None], self.rows, 0).sum(dim=3)
        new = torch.where(accepted, self.lengths.unsqueeze(1) + self._order, -1)
        new = new[None, :, None].expand(*self.positions.shape[:3], -1)
        known = torch.where(self.positions < lengths[:, None, None], self.positions, -1)  # of a row that ended: none
        mass = torch.nn.functional.pad(self.mass, (0, len(self._order))) + paid
        positions, mass = heaviest(torch.cat((known, new), dim=3), mass, lengths[:, None, None], known.shape[3])
        self.positions.copy_(positions)
        self.mass.copy_(mass)
        self.lengths.copy_(lengths)
        return self.positions


def heaviest(positions: Tensor, mass: Tensor, lengths: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """The last `budget // 2` tokens of a prefix, and of those before the ones of the largest mass, the first of equals.

    Args:
        positions: [..., candidates] int64 ascending but for -1, which is none.
        mass: the same in fp32; lengths: broadcast to them, tokens of each prefix.

    Returns:
        positions, mass: [..., budget], ascending, -1 (and no mass) at the end.
    """
    recent = positions >= lengths - budget // 2
    chosen = ascending(ranked(mass.masked_fill(recent, torch.inf), positions >= 0, budget))
    index, absent = chosen.clamp(min=0), chosen < 0
    return positions.gather(-1, index).masked_fill(absent, -1), mass.gather(-1, index).masked_fill(absent, 0)


class ObservedAttention(SparseAttention):
    """Verification over the lists that also keeps its softmax rows; implements `policies.Verification`."""

    def __init__(self, memory: HeavyHitters, kept: Tensor) -> None:
        super().__init__(kept)
        self.memory = memory

    def __call__(self, layer: int, q: Tensor, k: Held, v: Held, start: Tensor) -> Tensor:
        self.memory.rows[layer] = sparse_rows(q, k, start, self.kept(layer)).sum(dim=2)
        return super().__call__(layer, q, k, v, start)


@dataclass(frozen=True)
class H2O(Policy):
    """Draft, then verify over the budget's half of last tokens and half of heavy hitters, per layer and KV head.

    A token's score is the attention that it has received from every query since it came: all of the prompt's, then of
    each emitted token, over what that one read. What is dropped from a list never comes back to it, as if it had been
    evicted. Other than published, tokens are dropped once a step instead of once a token, a KV head's score is the sum
    over its query heads (the paper's models have one each), and rejected drafts leave no trace.
    """

    name: ClassVar[str] = "h2o"
    needs_selection: ClassVar[bool] = True
    prompt_mass: ClassVar[bool] = True

    def memory(self, target: Decoder, depth: int, rows: int, capacity: int) -> HeavyHitters:
        assert self.selection is not None
        return HeavyHitters(target.shape, depth, rows, self.selection.budget, target.device)

    def memory_bytes(
        self, target: Part, draft: ModelShape | None, depth: int, rows: int, capacity: int, element_bytes: int
    ) -> int:
        assert self.selection is not None
        new, budget, lists = depth + 1, self.selection.budget, target.shape.layers * target.shape.kv_heads
        kept = lists * rows * (12 * budget + 4 * new * (budget + new))
        received = 4 * lists * capacity  # of one prompt, all layers
        return 2 * kept + received + super().memory_bytes(target, draft, depth, rows, capacity, element_bytes)

    def verification(self, signals: Signals) -> Verification:
        assert isinstance(signals.memory, HeavyHitters)
        return ObservedAttention(signals.memory, self.select(signals))

    def select(self, signals: Signals) -> Tensor:
        assert isinstance(signals.memory, HeavyHitters)
        return signals.memory.lists(signals.lengths)
