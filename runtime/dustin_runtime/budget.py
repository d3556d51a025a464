"""The one rule about budgets: what is protected must leave something to choose, and m must fit in the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dustin_runtime.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from dustin_runtime.config import Selection
    from dustin_runtime.models.shape import ModelShape


def budget_fault(budget: int, m: int, sink: int, window: int) -> str | None:
    """What is wrong with a split that Eq. 6 of arXiv 2606.24957 cannot fill; None if nothing is. All in tokens."""
    for name, value in (("sink", sink), ("window", window)):
        if value < 0:
            return f"{name}: {value} is negative; give 0 or more tokens"
    if budget <= sink + window:
        return f"budget: {budget} leaves no token to choose; give more than sink + window = {sink + window}"
    if not 0 <= m <= budget - sink - window:
        return f"m: {m} is out of range; give 0 to budget - sink - window = {budget - sink - window}"
    return None


def check_budget(budget: int, m: int, sink: int, window: int) -> None:
    """Refuse such a split.

    Raises:
        ConfigError: naming the field that is out of range.
    """
    if fault := budget_fault(budget, m, sink, window):
        raise ConfigError(fault)


def check_reach(
    selection: Selection | None, draft_budget: int | None, target: ModelShape, draft: ModelShape | None
) -> None:
    """Refuse budgets that exceed their model's context: there all would be read, at the price of lists as long.

    Raises:
        UsageError: naming the budget.
    """
    reads = (("budget", selection and selection.budget, target), ("draft budget", draft_budget, draft))
    for what, tokens, shape in reads:
        if tokens and shape and tokens > shape.context:
            raise UsageError(f"{what}: {tokens} tokens exceed the model's context of {shape.context}; give fewer")
