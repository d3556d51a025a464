"""What the best lists would do: chosen by full verification's own attention on the tokens that they serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dustin_profile.evaluation.fidelity import attention_rows
from dustin_profile.evaluation.text_run import Prefilled
from dustin_runtime.policies import Policy, Signals
from dustin_runtime.selection import ascending, ranked


@dataclass(frozen=True)
class GivenLists(Policy):
    """Serves one text with lists that are made beforehand."""

    name: ClassVar[str] = "given"
    needs_selection: ClassVar[bool] = True
    lists: Tensor | None = None
    """By step of the text, [steps, layers or 1, 1, kv_heads or 1, budget] int64 ascending, -1 padded."""
    prompt: int = 0
    """Tokens before the text."""
    stride: int = 1
    """Tokens of a step."""

    def select(self, signals: Signals) -> Tensor:
        assert self.lists is not None
        step = (signals.lengths - self.prompt) // self.stride
        return self.lists.index_select(0, step)[0]


@dataclass(frozen=True)
class Oracle(GivenLists):
    """The `budget` positions of the most attention, all heads of all layers together: the bound of one list for all.

    Nothing is protected (arXiv 2606.24957, Eq. 3).
    """

    name: ClassVar[str] = "oracle"
    by_head: ClassVar[bool] = False


@dataclass(frozen=True)
class OracleByHead(Oracle):
    """A list for every KV head of every layer: the bound of lists that differ."""

    name: ClassVar[str] = "oracle-by-head"
    by_head: ClassVar[bool] = True


ORACLES: dict[str, type[Oracle]] = {policy.name: policy for policy in (Oracle, OracleByHead)}


def bound(policies: Sequence[Policy], ready: Prefilled, depth: int) -> list[Policy]:
    """The same with their oracles' lists of one text, for which its attention is computed once."""
    oracles = {index: policy for index, policy in enumerate(policies) if isinstance(policy, Oracle)}
    found = list(policies)
    if oracles and len(ready.text) > 1:
        lists = oracle_lists(ready, depth, [(_budget(policy), policy.by_head) for policy in oracles.values()])
        for (index, policy), one in zip(oracles.items(), lists, strict=True):
            found[index] = type(policy)(policy.selection, one, len(ready.prompt), depth + 1)
    return found


def _budget(policy: Oracle) -> int:
    assert policy.selection is not None
    return policy.selection.budget


@torch.inference_mode()
def oracle_lists(ready: Prefilled, depth: int, wanted: Sequence[tuple[int, bool]]) -> list[Tensor]:
    """For every step of a text, the positions before it of the most attention, the first of equals.

    Args:
        wanted: the budget of each list, and whether it is for every KV head of every layer or one for all.

    Returns:
        `GivenLists.lists` for each that is wanted.
    """
    found: list[list[Tensor]] = [[] for _ in wanted]
    for begin in range(0, len(ready.text) - 1, depth + 1):
        prefix = len(ready.prompt) + begin
        layers = range(ready.target.shape.layers)
        mass = torch.stack([attention_rows(ready, layer, begin, depth)[..., :prefix].sum(1) for layer in layers])
        for steps, (budget, by_head) in zip(found, wanted, strict=True):
            scores = mass if by_head else mass.sum(dim=(0, 1)).view(1, 1, -1)
            lists = ranked(scores, torch.ones_like(scores, dtype=torch.bool), budget)
            steps.append(ascending(lists).unsqueeze(1))
    return [torch.stack(steps) for steps in found]
