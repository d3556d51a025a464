"""StreamingLLM: the first tokens and the last ones (arXiv 2309.17453), at their absolute positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dustin_runtime.attention.window import first_and_last
from dustin_runtime.policies.base import Policy, Signals
from dustin_runtime.policies.prompt_lists import PromptPolicy

STREAMING_SINK = 4
"""First tokens that the method keeps, whatever another method's configuration protects."""
PROMPT_LAST = 8


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Draft, then verify over the first 4 and the last `budget - 4` tokens. Keys are not renumbered."""

    name: ClassVar[str] = "streaming"
    over_ranks: ClassVar[bool] = True
    needs_selection: ClassVar[bool] = True

    def select(self, signals: Signals) -> Tensor:
        assert self.selection is not None
        return first_and_last(signals.lengths, self.selection.budget, STREAMING_SINK)[None, :, None]


@dataclass(frozen=True)
class StreamingPrompt(PromptPolicy):
    """What comparisons of KV compression call StreamingLLM: the prompt's first `budget - 8` and last 8 tokens."""

    name: ClassVar[str] = "streaming-prompt"
    prompt_queries: ClassVar[int] = 1

    def choose(self, layer: int, q: Tensor, k: Tensor, budget: int) -> Tensor:
        lengths = q.new_full((len(q),), k.shape[1]).long()
        chosen = first_and_last(lengths, budget, max(budget - PROMPT_LAST, 0))
        return chosen.unsqueeze(1).expand(-1, k.shape[2], -1)
