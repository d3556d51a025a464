"""StreamingLLM: the first tokens and the last ones (arXiv 2309.17453), at their absolute positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dustin_runtime.policies.base import Policy, Signals

STREAMING_SINK = 4
"""First tokens that the method keeps, whatever another method's configuration protects."""


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Draft, then verify over the first 4 and the last `budget - 4` tokens. Keys are not renumbered."""

    name: ClassVar[str] = "streaming"
    needs_selection: ClassVar[bool] = True

    def select(self, signals: Signals) -> Tensor:
        assert self.selection is not None
        return first_and_last(signals.lengths, self.selection.budget, STREAMING_SINK)[None, :, None]


def first_and_last(lengths: Tensor, budget: int, sink: int) -> Tensor:
    """The first `sink` and the last `budget - sink` positions of prefixes: [batch, budget] int64, -1 padded.

    Args:
        lengths: [batch] int64.
    """
    sink = min(sink, budget - 1)
    slots = torch.arange(budget, device=lengths.device)
    ends = lengths.unsqueeze(1)
    recent = torch.where(slots < sink, slots, ends - budget + slots)
    everything = torch.where(slots < ends, slots, -1)
    return torch.where(ends <= budget, everything, recent)
