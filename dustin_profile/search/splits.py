"""What verification may read at every budget: the candidates of a search for throughput, as far as ARR differs.

The time of a step depends on m only through what it makes unnecessary: m = 0 asks the draft for no scores, and the
largest m asks the target for none. So of every set of draft layers three splits can be best, and the exact curve holds
them all. Heads per layer do not vary: traces hold the sum over a layer's four, and a row for each would take four times
the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from dustin_profile.search.arr import first_best
from dustin_profile.search.phases import CurvePhase, DraftPhase, SearchOptions, SearchResult, find_split, search
from dustin_profile.traces.windows import Documents


class SplitChoice(NamedTuple):
    """One way to spend a budget."""

    budget: int
    found: SearchResult
    """The three phases, with the draft layers of this choice, and its m."""
    searched: Tensor
    """[search documents] fp64 ARR."""
    reported: Tensor
    """[reported documents] fp64 ARR."""

    @property
    def m(self) -> int:
        return self.found.curve.m

    @property
    def free(self) -> int:
        """The largest m."""
        return self.found.curve.per_document.shape[1] - 1

    @property
    def layers(self) -> int:
        """Draft layers that are scored."""
        return len(self.found.draft.layers) if self.m else 0

    @property
    def history(self) -> bool:
        """Whether the target's scores are needed."""
        return self.m < self.free


def split_choices(searched: Documents, reported: Documents, options: SearchOptions) -> Iterator[SplitChoice]:
    """All of one budget that can be the best for their cost: history alone; and for every number of draft layers, in
    the order in which the greedy phase appended them, lookahead alone and the best m between.

    Raises: as `search`.
    """
    whole = search(searched, options)
    target, layers, budget = whole.target.layer, whole.draft.layers, options.budget
    for count in range(1, len(layers) + 1):
        chosen = layers[:count]
        last = count == len(layers)
        curve = (whole.curve if last else find_split(searched, target, chosen, budget)).per_document
        behind = find_split(reported, target, chosen, budget).per_document

        def at(m: int, draft: DraftPhase, curve: Tensor = curve, behind: Tensor = behind) -> SplitChoice:
            found = SearchResult(whole.target, draft, CurvePhase(m, curve))
            return SplitChoice(budget.k, found, curve[:, m], behind[:, m])

        draft = DraftPhase(chosen, whole.draft.rounds)
        if last:  # the emitted config names all layers, should somebody raise its m
            yield at(0, draft)
        inner = curve.mean(0)[1 : budget.free]
        if len(inner):
            yield at(1 + first_best(inner), draft)
        yield at(budget.free, draft)
