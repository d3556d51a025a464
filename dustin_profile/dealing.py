"""Units of work dealt to the workers of a run, ranks or teams of them: none depends on who did it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from dustin_profile.progress import progress
from dustin_runtime.parallel.ranks import Ranks

T = TypeVar("T")


def deal(
    ranks: Ranks, title: str, units: Sequence[T], work: Callable[[T], None], cost: Callable[[T], float] = lambda unit: 1
) -> None:
    """Do all units, a round of one per worker at a time.

    Neighbours should cost alike, since a round lasts as long as its longest unit: then ranks wait little, the first
    knows how far all are, and one that fails ends all within a unit.

    Args:
        units: the same on every rank, longest first.
        work: does one and writes its result, so that no rank's end loses what others have done. All ranks of a team
            are given the same, and the one that `keeps` writes.
        cost: of a unit, in the relative time that progress counts.

    Raises:
        DustinError: of the first rank that failed, as `Ranks.alike`.
        PeerError: a rank has ended.
    """
    with progress(title, sum(map(cost, units))) as advance:
        for first in range(0, len(units), ranks.workers):
            turn = units[first : first + ranks.workers]
            with ranks.alike(loading=True):
                if ranks.worker < len(turn):
                    work(turn[ranks.worker])
            advance(sum(map(cost, turn)))


def grouped(units: Sequence[T], size: int, ranks: Ranks) -> list[Sequence[T]]:
    """Neighbours together, `size` of them or fewer, so that no worker is left idle by the last round."""
    size = max(min(size, -(-len(units) // ranks.workers)), 1)
    return [units[first : first + size] for first in range(0, len(units), size)]
