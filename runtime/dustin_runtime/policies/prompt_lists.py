"""What methods share that compress a prompt once, at its end, and keep all that follows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.parallel.split import Part
from dustin_runtime.policies.base import Policy, Prompted, Signals
from dustin_runtime.selection import ascending

Choose = Callable[[int, Tensor, Tensor, int], Tensor]
MOST_GENERATED = 1024
"""Generated tokens that are read, the last ones; as published all are."""


class PromptLists:
    """Kept prompt tokens of one model; implements `policies.base.Memory`.

    Args:
        choose: see `PromptPolicy.choose`.

    Attributes:
        kept: [layers, rows, kv_heads, budget] int64 ascending, -1 padded.
        prompts: [rows] int64, tokens of each prompt.
    """

    def __init__(
        self, choose: Choose, model: ModelShape, rows: int, capacity: int, budget: int, device: torch.device
    ) -> None:
        size = (model.layers, rows, model.kv_heads, budget)
        self._choose = choose
        self.kept = torch.full(size, -1, dtype=torch.int64, device=device)
        self.prompts = torch.ones(rows, dtype=torch.int64, device=device)
        self._generated = torch.arange(min(capacity, MOST_GENERATED), device=device)

    def admit(self, row: int, target: Prompted, draft: Prompted | None) -> None:
        """Choose in the target's prompt."""
        self.take(row, target)

    def take(self, row: int, prompted: Prompted) -> None:
        """Choose, layer by layer."""
        for layer, q in prompted.queries.items():
            self.kept[layer, row] = self._choose(layer, q, prompted.keys(layer), self.kept.shape[3])[0]
        self.prompts[row] = prompted.length

    def lists(self, lengths: Tensor) -> Tensor:
        """Kept prompt tokens and what was generated since: [layers, rows, kv_heads, entries] int64, -1 padded.

        Of a row without a sequence, whose length is 1, nothing more is listed.
        """
        layers, _, kv_heads, _ = self.kept.shape
        kept = torch.where(self.kept < lengths[:, None, None], self.kept, -1)
        begin = torch.maximum(self.prompts, lengths - len(self._generated)).unsqueeze(1)
        new = begin + self._generated
        new = torch.where(new < lengths.unsqueeze(1), new, -1)[None, :, None].expand(layers, -1, kv_heads, -1)
        return ascending(torch.cat((kept, new), dim=3))


@dataclass(frozen=True)
class PromptPolicy(Policy):
    """Draft, then verify over what `choose` kept of the prompt and what was generated since.

    The budget is the prompt's.
    """

    needs_selection: ClassVar[bool] = True

    @abstractmethod
    def choose(self, layer: int, q: Tensor, k: Tensor, budget: int) -> Tensor:
        """Choose prompt tokens in one layer.

        Args:
            q: [batch, tokens, query_heads, head_size] queries of the prompt's last `prompt_queries` tokens, after RoPE.
            k: [batch, length, kv_heads, head_size] keys of the prompt, after RoPE.

        Returns:
            [batch, kv_heads, budget] int64 ascending, -1 padded.
        """

    def memory(self, target: Decoder, depth: int, rows: int, capacity: int) -> PromptLists:
        assert self.selection is not None
        return PromptLists(self.choose, target.shape, rows, capacity, self.selection.budget, target.device)

    def memory_bytes(
        self, target: Part, draft: ModelShape | None, depth: int, rows: int, capacity: int, element_bytes: int
    ) -> int:
        assert self.selection is not None
        kept = self.selection.budget
        read = kept + min(capacity, MOST_GENERATED)  # int64, as they are, masked, sorted, and their order
        lists = 8 * target.shape.layers * rows * target.shape.kv_heads * (kept + 4 * read)
        return lists + super().memory_bytes(target, draft, depth, rows, capacity, element_bytes)

    def select(self, signals: Signals) -> Tensor:
        assert isinstance(signals.memory, PromptLists)
        return signals.memory.lists(signals.lengths)
