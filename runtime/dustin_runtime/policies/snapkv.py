"""SnapKV: prompt tokens that the prompt's end attends to, chosen once (arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dustin_runtime.attention.scoring import last_rows
from dustin_runtime.policies.prompt_lists import PromptPolicy
from dustin_runtime.selection import ascending, ranked


def window_mass(q: Tensor, k: Tensor) -> Tensor:
    """Attention that the last queries of a prompt pay to the tokens before them, mean over the heads of a KV head.

    Args:
        q: [batch, window, query_heads, head_size] of the last `window` positions.
        k: [batch, length, kv_heads, head_size].

    Returns:
        [batch, kv_heads, length - window] fp32: softmax over all the keys that a query sees, summed over queries.
    """
    before = k.shape[1] - q.shape[1]
    return last_rows(q, k)[..., :before].sum(dim=3).mean(dim=2)


def choose_tokens(mass: Tensor, window: int, budget: int, kernel: int, pooling: Literal["max", "mean"]) -> Tensor:
    """The window, and the tokens before it of the largest pooled mass, the first of equals.

    Args:
        mass: [batch, kv_heads, tokens before the window] fp32.
        kernel: odd width of the pooling, which brings the neighbours of important tokens along.

    Returns:
        [batch, kv_heads, budget] int64 ascending, -1 padded.
    """
    batch, kv_heads, before = mass.shape
    if before:
        pool = F.max_pool1d if pooling == "max" else F.avg_pool1d
        mass = pool(mass, kernel, stride=1, padding=kernel // 2)
    kept = min(window, budget)
    last = torch.arange(before + window - kept, before + window, device=mass.device).expand(batch, kv_heads, -1)
    chosen = ranked(mass, torch.ones_like(mass, dtype=torch.bool), budget - kept)
    return ascending(torch.cat((chosen, last), dim=2))


@dataclass(frozen=True)
class SnapKV(PromptPolicy):
    """Per layer and KV head the tokens of the prompt that its last 32 attend to, max-pooled over 7, as published.

    The mean over the query heads of a KV head is the reading for GQA: the published code repeats keys instead.
    """

    name: ClassVar[str] = "snapkv"
    prompt_queries: ClassVar[int] = 32
    kernel: ClassVar[int] = 7
    pooling: ClassVar[Literal["max", "mean"]] = "max"

    def choose(self, layer: int, q: Tensor, k: Tensor, budget: int) -> Tensor:
        return choose_tokens(window_mass(q, k), q.shape[1], budget, self.kernel, self.pooling)


@dataclass(frozen=True)
class SnapKV8(SnapKV):
    """The same with a window of 8, mean-pooled over 5, as comparisons of KV compression run it (arXiv 2508.02401)."""

    name: ClassVar[str] = "snapkv-8"
    prompt_queries: ClassVar[int] = 8
    kernel: ClassVar[int] = 5
    pooling: ClassVar[Literal["max", "mean"]] = "mean"
