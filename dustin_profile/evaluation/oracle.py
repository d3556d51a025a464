"""What the best lists would do: chosen by full verification's own attention on the tokens that they serve."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dustin_profile.evaluation.fidelity import Prefilled, attention_rows
from dustin_runtime.policies import Policy, Signals
from dustin_runtime.selection import ascending, ranked


@dataclass(frozen=True)
class GivenLists(Policy):
    """Serves one text with lists that are made beforehand."""

    name: ClassVar[str] = "given"
    needs_selection: ClassVar[bool] = True
    steps: list[Tensor] = field(default_factory=list)
    """Lists of the steps to come, [layers or 1, 1, kv_heads or 1, budget] each."""

    def select(self, signals: Signals) -> Tensor:
        return self.steps.pop(0)


@dataclass(frozen=True)
class Oracle(GivenLists):
    """The `budget` positions of the most attention, all heads of all layers together: the bound of one list for all.

    Nothing is protected (arXiv 2606.24957, Eq. 3).
    """

    name: ClassVar[str] = "oracle"
    by_head: ClassVar[bool] = False

    def bound(self, ready: Prefilled, depth: int) -> Oracle:
        """The same for one text."""
        assert self.selection is not None
        return type(self)(self.selection, oracle_lists(ready, depth, self.selection.budget, self.by_head))


@dataclass(frozen=True)
class OracleByHead(Oracle):
    """A list for every KV head of every layer: the bound of lists that differ."""

    name: ClassVar[str] = "oracle-by-head"
    by_head: ClassVar[bool] = True


ORACLES: dict[str, type[Oracle]] = {policy.name: policy for policy in (Oracle, OracleByHead)}


@torch.inference_mode()
def oracle_lists(ready: Prefilled, depth: int, budget: int, by_head: bool) -> list[Tensor]:
    """For every step of a text, the positions before it of the most attention, the first of equals.

    Returns:
        [layers or 1, 1, kv_heads or 1, budget] int64 ascending, -1 padded, by step.
    """
    found = []
    for begin in range(0, len(ready.text) - 1, depth + 1):
        prefix = len(ready.prompt) + begin
        layers = range(ready.target.shape.layers)
        mass = torch.stack([attention_rows(ready, layer, begin, depth)[..., :prefix].sum(1) for layer in layers])
        scores = mass if by_head else mass.sum(dim=(0, 1)).view(1, 1, -1)
        lists = ranked(scores, torch.ones_like(scores, dtype=torch.bool), budget)
        found.append(ascending(lists).unsqueeze(1))
    return found
