"""What the attention benchmark runs: sizes of the models, workloads, and the heads that are asked."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from dustin_runtime.budget import budget_fault
from dustin_runtime.config import LayerHeads, Selection
from dustin_runtime.errors import UsageError
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.pairs import find_pair

PAIR = "qwen72b:0.5b"
"""The paper's: its sizes are the defaults, and the draft's are always its draft's."""
SINK, WINDOW = 4, 16
SCORED_HEADS = 4
"""Heads that are asked in a layer."""
SCORED_DRAFT_LAYERS = 3


class Workload(NamedTuple):
    """Equal rows."""

    context: int
    """Tokens in every row's cache before the step."""
    batch: int

    def __str__(self) -> str:
        size = f"{self.context // 1024}K" if self.context % 1024 == 0 else str(self.context)
        return f"{size}x{self.batch}"


PAPER_WORKLOADS = (Workload(16384, 8), Workload(16384, 16), Workload(32768, 8), Workload(32768, 16))
PAPER_SPEEDUPS = dict(zip(PAPER_WORKLOADS, (9.35, 15.58, 16.57, 27.85), strict=True))
"""arXiv 2606.24957, Figure 10, of full-cache verification over sparse attention with estimation."""


def parse_workload(text: str) -> Workload:
    """`16Kx8` or `16384x8`: tokens of context (K is 1024), rows.

    Raises:
        UsageError: it is neither, or a number is 0.
    """
    found = re.fullmatch(r"(\d+)(k?)x(\d+)", text.strip().lower())
    if found is None:
        raise UsageError(f"--workload {text}: give CONTEXTxBATCH, such as 16Kx8 or 1000x2")
    context, batch = int(found[1]) * (1024 if found[2] else 1), int(found[3])
    if not (context and batch):
        raise UsageError(f"--workload {text}: context and batch must be at least 1")
    return Workload(context, batch)


def draft_shape() -> ModelShape:
    """The draft whose keys the lookahead scores read."""
    return find_pair(PAIR).draft.shape


@dataclass(frozen=True)
class Sizes:
    """The target's attention, and the method's settings.

    Attributes:
        draft: whose keys the lookahead scores read.
        heads: a configuration whose heads, split and protected tokens are taken; None for made-up ones that cost most.
    """

    layers: int = 80
    query_heads: int = 64
    kv_heads: int = 8
    head_size: int = 128
    budget: int = 512
    depth: int = 4
    draft: ModelShape = field(default_factory=draft_shape)
    heads: Selection | None = None

    def check(self) -> None:
        """Refuse sizes that contradict each other.

        Raises:
            UsageError: names the option.
        """
        if self.query_heads % self.kv_heads:
            raise UsageError(f"--query-heads {self.query_heads}: must be a multiple of --kv-heads {self.kv_heads}")
        if fault := budget_fault(self.budget, 0, SINK, WINDOW):
            raise UsageError(f"--{fault}")

    @property
    def target(self) -> ModelShape:
        """A model with this attention; its other sizes are the paper's target's and are not used."""
        changes = {name: getattr(self, name) for name in ("layers", "query_heads", "kv_heads", "head_size")}
        return find_pair(PAIR).target.shape.model_copy(update=changes)

    @property
    def scored_draft_layers(self) -> int:
        return SCORED_DRAFT_LAYERS if self.heads is None else len(self.heads.lookahead)

    def selection(self, index: int) -> Selection:
        """What is scored in turn `index`: each reads other caches, or it would find them in the L2."""
        if self.heads is None:
            return spread_selection(self.target, self.draft, self.budget, index)
        first = index * self.scored_draft_layers
        placed = (entry.model_copy(update={"layer": first + place}) for place, entry in enumerate(self.heads.lookahead))
        history = self.heads.history.model_copy(update={"layer": index})
        return self.heads.model_copy(update={"history": history, "lookahead": tuple(placed)})

    @property
    def papers(self) -> bool:
        """Whether they are the paper's own."""
        return self == Sizes()


def spread_heads(shape: ModelShape, layer: int) -> LayerHeads:
    """Heads of a layer that lie as far apart as possible: they ask the most KV heads, so scoring costs the most."""
    count = min(SCORED_HEADS, shape.query_heads)
    return LayerHeads(layer=layer, heads=tuple(index * shape.query_heads // count for index in range(count)))


def spread_selection(target: ModelShape, draft: ModelShape, budget: int, layer: int = 0) -> Selection:
    """The paper's estimator on made-up layers: one of the target, three of the draft from 3 `layer` on, m one half."""
    layers = range(SCORED_DRAFT_LAYERS * layer, SCORED_DRAFT_LAYERS * (layer + 1))
    return Selection(
        budget=budget,
        sink=SINK,
        window=WINDOW,
        m=(budget - SINK - WINDOW) // 2,
        history=spread_heads(target, layer),
        lookahead=tuple(spread_heads(draft, index) for index in layers),
    )
