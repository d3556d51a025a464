"""ARR of a chosen configuration beside its bounds, per document: what the held-out split is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from dustin_profile.search.arr import arr, mass, prefix_arr
from dustin_profile.search.budget import Budget
from dustin_profile.search.curve import lookahead_sum
from dustin_profile.search.phases import over_documents
from dustin_profile.traces.windows import Documents, Windows
from dustin_runtime.policies.streaming import STREAMING_SINK
from dustin_runtime.selection import select

Policy = Literal["oracle", "hybrid", "dustin_t", "dustin_d", "streaming"]
"""oracle: top-k of the truth on the prefix, nothing protected (arXiv 2606.24957, Eq. 3). hybrid: the configuration.
dustin_t, dustin_d: its m set to 0, and to all that is free. streaming: the first 4 tokens and the last k - 4
(StreamingLLM, arXiv 2309.17453)."""

POLICIES: tuple[Policy, ...] = get_args(Policy)


class Recovery(NamedTuple):
    """What one policy recovers, per document."""

    arr: Tensor
    """[documents] fp64: windowed ARR, positions at and after the pending token counted as kept."""
    prefix_arr: Tensor
    """[documents] fp64: share of the mass on the prefix alone."""


def evaluate(
    documents: Documents, *, target_layer: int, draft_layers: Sequence[int], m: int, budget: Budget
) -> dict[Policy, Recovery]:
    """Measure every policy at k tokens on the same windows, so that documents can be compared in pairs.

    Raises:
        ConfigError: the budget or m is invalid.
        NothingMeasuredError: there are no documents, or their traces are empty or not finite.
    """

    def measure(windows: Windows) -> Tensor:
        history = windows.history[target_layer].float()
        lookahead = lookahead_sum(windows, draft_layers)
        rows = []
        for policy in POLICIES:
            recovered = mass(windows.truth, _kept(policy, windows, history, lookahead, m, budget)).sum(-1)
            rows.append(torch.stack([arr(windows, recovered), prefix_arr(windows, recovered)]))
        return torch.stack(rows)

    values = over_documents(documents, measure)
    return {policy: Recovery(values[:, row, 0], values[:, row, 1]) for row, policy in enumerate(POLICIES)}


def top(scores: Tensor, prefix: Tensor, k: int) -> Tensor:
    """[W, k] int64 prefix positions of the highest scores, nothing protected; -1 padded.

    Args:
        scores: [W, N] fp32; prefix: [W] int64.
    """
    return select(None, scores, prefix, budget=k, m=0, sink=0, window=0)


def _kept(policy: Policy, windows: Windows, history: Tensor, lookahead: Tensor, m: int, budget: Budget) -> Tensor:
    """[W, k] int64 positions that the policy keeps, -1 padded."""
    k, sink, window = budget
    if policy == "oracle":
        return top(windows.truth, windows.prefix, k)
    if policy == "streaming":
        # Scored by position, the last tokens are the best ones; fp32 holds positions exactly up to 2**24.
        recency = torch.arange(windows.truth.shape[-1], dtype=torch.float32, device=windows.truth.device)
        first = min(STREAMING_SINK, k - 1)
        recency = recency.expand_as(windows.truth)
        return select(None, recency, windows.prefix, budget=k, m=0, sink=first, window=0)
    share = {"hybrid": m, "dustin_t": 0, "dustin_d": budget.free}[policy]
    return select(lookahead, history, windows.prefix, budget=k, m=share, sink=sink, window=window)
