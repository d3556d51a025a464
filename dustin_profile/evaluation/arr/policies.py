"""What traces say about the runtime's own methods: a trace's windows stand for the rows of a batch.

Traces hold the retrieval heads' scores alone. So a method is computable if it chooses one list from history and
lookahead scores of the configured heads; one that keeps a memory, asks other heads, or chooses in each layer is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from dustin_profile.search.curve import lookahead_sum
from dustin_profile.search.evaluate import top
from dustin_profile.search.signals import TraceSignals
from dustin_runtime.policies import POLICIES, Policy
from dustin_runtime.policies.dustin import Dustin

ORACLE = "oracle"


class Rule(NamedTuple):
    """A policy by name; `choose` gives the [W, k] int64 positions that it keeps, -1 padded."""

    name: str
    about: str
    choose: Callable[[TraceSignals], Tensor]


def rules() -> list[Rule]:
    """The bound, the computable methods, and single signals without anything protected (Figures 2, 3 and 11)."""
    return [
        Rule(ORACLE, "the truth's own top k, nothing protected", _by(lambda s: s.windows.truth)),
        *(Rule(name, _first_line(policy), _by_method(policy)) for name, policy in computable().items()),
        Rule("history-top", "top k of history, nothing protected", _by(TraceSignals.history)),
        Rule("lookahead-top", "top k of lookahead, nothing protected", _by(TraceSignals.lookahead)),
        Rule("lookahead-top-all", "the same of all draft layers' retrieval heads", _by(_all_layers)),
    ]


def computable() -> dict[str, type[Policy]]:
    """Methods of the runtime that traces suffice for."""
    return {
        name: policy
        for name, policy in POLICIES.items()
        if policy.needs_selection
        and not policy.chooses_by_layer
        and not policy.lookahead_by_layer
        and not policy.last_look
        and policy.memory in (Policy.memory, Dustin.memory)  # the latter keeps nothing without a rule
        and policy.lookahead_heads is Policy.lookahead_heads
    }


def kept(signals: TraceSignals, chosen: Sequence[Rule]) -> dict[str, Tensor]:
    """Positions that every rule keeps, by name."""
    return {rule.name: rule.choose(signals) for rule in chosen}


def _by(scores: Callable[[TraceSignals], Tensor]) -> Callable[[TraceSignals], Tensor]:
    return lambda signals: top(scores(signals), signals.lengths, signals.selection.budget)


def _by_method(policy: type[Policy]) -> Callable[[TraceSignals], Tensor]:
    def choose(signals: TraceSignals) -> Tensor:
        found = policy(signals.selection).select(signals)
        assert found is not None  # methods that read everything need no selection
        return found[0, :, 0]

    return choose


def _all_layers(signals: TraceSignals) -> Tensor:
    return lookahead_sum(signals.windows, range(len(signals.windows.lookahead)))


def _first_line(policy: type[Policy]) -> str:
    return (policy.__doc__ or policy.name).split("\n")[0].rstrip(".")
