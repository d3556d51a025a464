"""What methods share that ask every head of the draft about every drafted token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dustin_runtime.attention.scoring import rows_bytes
from dustin_runtime.config import LayerHeads
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.parallel.split import Part
from dustin_runtime.policies.base import Policy


@dataclass(frozen=True)
class DraftRowsPolicy(Policy):
    """Draft, then verify over what `Signals.lookahead_rows` of all heads says."""

    needs_selection: ClassVar[bool] = True
    lookahead_by_layer: ClassVar[bool] = True

    @property
    def uses_lookahead(self) -> bool:
        return True

    def lookahead_heads(self, draft: ModelShape) -> tuple[LayerHeads, ...]:
        return all_heads(draft)

    def memory_bytes(
        self, target: Part, draft: ModelShape | None, depth: int, rows: int, capacity: int, element_bytes: int
    ) -> int:
        assert draft is not None
        at_prompt = super().memory_bytes(target, draft, depth, rows, capacity, element_bytes)
        return at_prompt + rows * rows_bytes(draft, self.passes(depth), capacity)


def all_heads(shape: ModelShape) -> tuple[LayerHeads, ...]:
    """Every query head of every layer."""
    heads = tuple(range(shape.query_heads))
    return tuple(LayerHeads(layer=layer, heads=heads) for layer in range(shape.layers))
