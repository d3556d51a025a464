"""How many tokens verification may read, and the trial splits of the draft-layer phase."""

from __future__ import annotations

from typing import NamedTuple

from dustin_profile.choices import Heuristic
from dustin_runtime.budget import check_budget


class Budget(NamedTuple):
    """Tokens of the prefix that verification reads, and those among them that are kept whatever their score."""

    k: int
    sink: int
    window: int

    @property
    def free(self) -> int:
        """Tokens left to choose: the largest m."""
        return self.k - self.sink - self.window


class Split(NamedTuple):
    """A share of the budget: `free` tokens to choose, `m` of them by the draft."""

    free: int
    m: int


def trial_splits(budget: Budget, reading: Heuristic) -> list[Split]:
    """The splits that candidate draft layers are averaged over (arXiv 2606.24957, Sec. 4.2.2, B_search).

    The paper leaves open what its 128, 192 and 256 tokens count. Either way they scale with k: k/4, 3k/8 and k/2.

    Args:
        reading: "m": tokens chosen by the draft, of the whole budget, as the second argument in Alg. 1 suggests.
            "k": the whole budget, sink and window included. Before phase 3 nothing favours either model, so the
            tokens to choose are halved between them.

    Returns:
        Valid splits, at least one, equal ones once.

    Raises:
        ConfigError: the budget is invalid.
    """
    check_budget(budget.k, 0, budget.sink, budget.window)
    sizes = [budget.k // 4, budget.k * 3 // 8, budget.k // 2]
    if reading == "m":
        splits = [Split(budget.free, min(size, budget.free)) for size in sizes]
    else:
        frees = [max(budget._replace(k=size).free, 1) for size in sizes]
        splits = [Split(free, (free + 1) // 2) for free in frees]
    return list(dict.fromkeys(splits))
