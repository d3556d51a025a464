"""CompressKV: prompt tokens that a layer's retrieval heads attend to at the prompt's end (arXiv 2508.02401)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dustin_runtime.attention.scoring import last_rows
from dustin_runtime.config import Selection
from dustin_runtime.policies.prompt_lists import PromptPolicy
from dustin_runtime.policies.snapkv import choose_tokens


@dataclass(frozen=True)
class CompressKV(PromptPolicy):
    """Per layer the tokens of the prompt that its retrieval heads attend to from the last 8, mean-pooled over 5.

    A layer's KV heads keep the same tokens. This is its selection as published; that every layer has the same budget
    is not (the paper spreads it by errors measured on the benchmark's own tasks).
    """

    name: ClassVar[str] = "compresskv"
    prompt_queries: ClassVar[int] = 8
    kernel: ClassVar[int] = 5

    @classmethod
    def lacking(cls, selection: Selection) -> str | None:
        return None if selection.retrieval_heads else "retrieval_heads"

    def choose(self, layer: int, q: Tensor, k: Tensor, budget: int) -> Tensor:
        assert self.selection is not None
        mass = retrieval_mass(q, k, self.selection.retrieval_heads[layer])
        return choose_tokens(mass, q.shape[1], budget, self.kernel, "mean").expand(-1, k.shape[2], -1)


def retrieval_mass(q: Tensor, k: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Attention that chosen heads pay to the tokens before the window, from the last queries of a prompt.

    Args:
        q: [batch, window, query_heads, head_size] of the last `window` positions.
        k: [batch, length, kv_heads, head_size].

    Returns:
        [batch, 1, length - window] fp32: softmax over all the keys that a query sees, summed over queries, mean over
        heads.
    """
    before = k.shape[1] - q.shape[1]
    rows = last_rows(q, k)[..., :before].flatten(1, 2)  # [batch, query_heads, window, before]
    return rows[:, list(heads)].sum(dim=2).mean(dim=1, keepdim=True)
