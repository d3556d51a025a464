"""Dustin with one ranking for each layer: what the draft looks ahead to, and what the layer's own queries attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dustin_runtime.config import MAX_OWN_QUERIES, Fusion, Selection
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.policies.base import Prompted, Signals, Verification
from dustin_runtime.policies.dustin_layers import FreshDustin, FreshQueries, KeepingAttention
from dustin_runtime.selection import eligible_positions, select


def fusion_of(selection: Selection) -> Fusion:
    """How scores are joined; the defaults where a configuration does not say."""
    return selection.fusion or Fusion()


def shares_of(scores: Tensor, eligible: Tensor) -> Tensor:
    """Scores [..., N] as shares of their sum over the eligible positions, and 0 elsewhere."""
    scores = torch.where(eligible, scores, 0)  # what lies beyond a prefix may be anything, NaN too
    # In fp64, or the order in which `sum` adds, which depends on how many columns are shown, would be seen.
    total = scores.sum(dim=-1, keepdim=True, dtype=torch.float64).float()
    return scores / total.clamp(min=torch.finfo(torch.float32).tiny)


class FreshScores(FreshQueries):
    """What each layer's last queries attend to.

    Attributes:
        mass: [layers, rows, kv_heads or 1, capacity] fp32 shares of the positions that competed at the time; what was
            generated since has none.
    """

    def __init__(
        self,
        selection: Selection,
        target: ModelShape,
        depth: int,
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        fusion = fusion_of(selection)
        super().__init__(fusion, selection, target, depth, rows, dtype, device)
        self.kept = fusion.kept
        size = (target.layers, rows, self.lists, capacity)
        self.mass = torch.zeros(size, dtype=torch.float32, device=device)

    def admit(self, row: int, target: Prompted, draft: Prompted | None) -> None:
        """Score every layer of a prompt, and keep nothing of what was in the row."""
        kept, self.kept = self.kept, 0.0
        super().admit(row, target, draft)
        self.kept = kept

    def _take(self, layer: Tensor, row: Tensor, mass: Tensor, lengths: Tensor) -> None:
        columns = mass.shape[-1]
        eligible = eligible_positions(lengths, columns, sink=self.sink, window=self.window).unsqueeze(1)
        new = torch.nn.functional.pad(shares_of(mass, eligible), (0, self.mass.shape[3] - columns))
        if self.kept:
            new = torch.lerp(new, self.mass[layer, row], self.kept)
        self.mass[layer, row] = new


@dataclass(frozen=True)
class DustinFused(FreshDustin):
    """Every layer reads the best of one ranking: the draft's lookahead, the same for all, and its own attention.

    The latter is that of its last accepted queries, at the time when it was its turn: `Fusion.per_step` layers are
    scored in each step, in rotation. Both are divided by their sums over the positions that compete, and weighted.
    """

    name: ClassVar[str] = "dustin-fused"

    @property
    def uses_history(self) -> bool:
        assert self.selection is not None
        return fusion_of(self.selection).history > 0

    @property
    def uses_lookahead(self) -> bool:
        assert self.selection is not None
        return fusion_of(self.selection).lookahead > 0 and bool(self.selection.lookahead)

    def memory(
        self, target: ModelShape, depth: int, rows: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> FreshScores:
        assert self.selection is not None
        return FreshScores(self.selection, target, depth, rows, capacity, dtype, device)

    def memory_bytes(
        self, target: ModelShape, draft: ModelShape | None, depth: int, rows: int, capacity: int, element_bytes: int
    ) -> int:
        assert self.selection is not None
        selection, fusion = self.selection, fusion_of(self.selection)
        lists = rows * (target.kv_heads if fusion.heads == "kv_head" else 1)
        width = target.query_heads * target.head_size * element_bytes
        step = target.layers * rows * (depth + 1) * width  # of all layers, until they are kept, and stacked
        queries = target.layers * rows * (fusion.queries + depth) * width + 2 * step
        prompt = target.layers * MAX_OWN_QUERIES * width
        scores = 2 * 4 * target.layers * lists * capacity  # kept, and joined with the others
        turns = min(fusion.per_step, target.layers)
        sums = 3 * 4 * turns * rows * (target.kv_heads + 1) * capacity
        return queries + prompt + scores + sums + 2 * 8 * target.layers * lists * selection.budget

    def verification(self, signals: Signals) -> Verification:
        return KeepingAttention(self.select(signals))

    def select(self, signals: Signals) -> Tensor:
        """[layers, batch, kv_heads or 1, k]."""
        assert self.selection is not None and isinstance(signals.memory, FreshScores)
        selection, fusion, lengths, mass = (
            self.selection,
            fusion_of(self.selection),
            signals.lengths,
            signals.memory.mass,
        )
        others: Tensor | None = None
        for weight, used, score in (
            (fusion.lookahead, self.uses_lookahead, signals.lookahead),
            (fusion.history, self.uses_history, signals.history),
        ):
            if used:
                found = score()
                eligible = eligible_positions(lengths, found.shape[1], sink=selection.sink, window=selection.window)
                found = weight * shares_of(found, eligible)
                others = found if others is None else others + found
        columns = mass.shape[3] if others is None else others.shape[1]
        joined = fusion.own * mass[..., :columns]
        if others is not None:
            joined = joined + others[None, :, None]
        layers, rows, lists, _ = joined.shape
        kept = select(
            None,
            joined.flatten(0, 2),
            lengths[None, :, None].expand(layers, -1, lists).flatten(),
            budget=selection.budget,
            m=0,
            sink=selection.sink,
            window=selection.window,
        )
        return kept.view(layers, rows, lists, -1)
