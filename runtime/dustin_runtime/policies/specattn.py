"""SpecAttn as the Dustin paper measured it: every layer and head of the draft scores (arXiv 2606.24957, App. F)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dustin_runtime.config import LayerHeads
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.policies.dustin import DustinD


@dataclass(frozen=True)
class SpecAttnAll(DustinD):
    """One list, chosen by the attention of all heads of all draft layers over the drafted tokens.

    A stand-in: SpecAttn itself (arXiv 2510.27641) maps draft layers to target layers and keeps a nucleus; no code of it
    is public. Against Dustin-D it says what choosing heads is worth, and what scoring them all costs.
    """

    name: ClassVar[str] = "specattn-all"

    def lookahead_heads(self, draft: ModelShape) -> tuple[LayerHeads, ...]:
        return all_heads(draft)


def all_heads(shape: ModelShape) -> tuple[LayerHeads, ...]:
    """Every query head of every layer."""
    heads = tuple(range(shape.query_heads))
    return tuple(LayerHeads(layer=layer, heads=heads) for layer in range(shape.layers))
