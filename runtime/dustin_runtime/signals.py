"""The scores of a step. On a GPU they are computed beside the drafting, which leaves most of the bandwidth unused.

What a policy does before the drafting goes the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dustin_runtime.attention.scoring import rows_at
from dustin_runtime.attention.tap import QueryTap
from dustin_runtime.models.decoder import Attention, Decoder
from dustin_runtime.scaled import Held, shown

if TYPE_CHECKING:
    from dustin_runtime.policies.base import Memory
    from dustin_runtime.state import State
    from dustin_runtime.step import Stepper

HISTORY_SHARE, LOOKAHEAD_SHARE = 0.18, 1.0
"""Of the processors: history has the whole drafting to be scored in, and drafting is slowed down by what reads much at
the same time. Of lookahead the last layer's queries come late."""
BESIDE_SHARE = 0.25
"""Of the processors, for what a policy does beside the drafting, behind history."""


class StepSignals:
    """Scores of one step, from saved queries and the caches (implements `policies.Signals`).

    Args:
        beside: the stream on which they are computed as soon as their queries exist: history before the drafting,
            lookahead layer by layer during the last draft pass. None computes them when they are asked for.
    """

    def __init__(self, stepper: Stepper, state: State, beside: torch.cuda.Stream | None = None) -> None:
        self.stepper = stepper
        self.state = state
        self.lengths = state.lengths
        self.drafted = state.drafted
        """The rows that are drafted here, of which lookahead is scored."""
        self._beside = beside
        self._begun = False
        self._history: Tensor | None = None
        self._lookahead: Tensor | None = None
        """Of the heads and rows that are computed here, like `_history`."""
        self._together: dict[str, Tensor] = {}
        """Scores of all heads and rows, where ranks had parts of them."""
        self._passes: list[Mapping[int, Tensor]] = []
        """Queries of the draft's passes, kept alive until `join`."""

    @property
    def memory(self) -> Memory | None:
        return self.state.memory

    def begin(self) -> None:
        """Before the drafting: score history on the other stream, and let the policy work there."""
        policy, history = self.stepper.policy, self.stepper.history_heads is not None
        if self._beside is None:
            policy.begin(self, None)
        elif history or policy.works_beside:
            self._fork()
            with torch.cuda.stream(self._beside):
                if history:
                    self._history = self._history_scores(HISTORY_SHARE)
                policy.begin(self, BESIDE_SHARE)

    def tap(self, attend: Attention, last: bool, until: int | None = None) -> QueryTap:
        """An attention for a pass of the draft that saves the queries which are scored; `last` of the step.

        Args:
            until: the layer with whose queries the pass ends.
        """
        heads = self.stepper.lookahead_heads
        summed = not self.stepper.policy.lookahead_by_layer
        begin = self._begin_lookahead if last and summed and self._beside is not None else None
        tap = QueryTap(attend, heads.layers if heads else (), begin, until=until)
        self._passes.append(tap.queries)
        return tap

    def given(self, queries: Mapping[int, Tensor]) -> None:
        """Take a pass of the draft as done elsewhere. Its cache holds the keys up to the pass's last token; later ones
        may be there too, no query sees them.

        Args:
            queries: by layer that is scored, [batch, tokens, query_heads, head_size] after RoPE; the last token counts.
        """
        self._passes.append(queries)

    def join(self) -> None:
        """Wait for what was begun."""
        if self._beside is not None and self._begun:
            torch.cuda.current_stream(self._beside.device).wait_stream(self._beside)
            self._begun = False

    def of_all_rows(self, drafts: Tensor, probabilities: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Put what ranks drafted, and how they score it, together: in one collective on the stream of the step.

        Args:
            drafts: [drafted rows, depth] int64.
            probabilities: [drafted rows, depth, shared vocabulary] that they were drawn from, or None.

        Returns:
            The same of all rows. As they are where all are drafted here.
        """
        if (blocks := self.state.blocks) is None:
            return drafts, probabilities
        self.join()
        parts = {"drafts": drafts}
        if probabilities is not None:
            parts["probabilities"] = probabilities
        if self.stepper.lookahead_heads is not None:
            parts["lookahead"] = self._own_lookahead()
        found = dict(zip(parts, blocks.gather(list(parts.values())), strict=True))
        if "lookahead" in found:
            self._together["lookahead"] = found["lookahead"]
        return found["drafts"], found.get("probabilities")

    def prefix_keys(self) -> Held:
        return shown(self.state.target_cache.all_keys, self.state.extent)

    def prefix_values(self) -> Held:
        return shown(self.state.target_cache.all_values, self.state.extent)

    def history(self) -> Tensor:
        return self._over_ranks("history", self.stepper.target, self._own_history)

    def lookahead(self) -> Tensor:
        assert self.stepper.draft is not None
        return self._over_ranks("lookahead", self.stepper.draft, self._own_lookahead)

    def _over_ranks(self, which: str, model: Decoder, own: Callable[[], Tensor]) -> Tensor:
        """Scores of all heads: a head's come from the rank that computes it. They are summed on the stream of the step,
        where all sums are, and once, for that is in place. In one process they are computed at every call, which the
        benchmark times."""
        if which in self._together:
            return self._together[which]
        if model.split is None:
            return own()
        together = self._together[which] = model.summed(own())
        return together

    def _own_history(self) -> Tensor:
        return self._history_scores() if self._history is None else self._history

    def _own_lookahead(self) -> Tensor:
        if self._lookahead is not None:
            return self._lookahead
        if (heads := self.stepper.lookahead_heads) is None:
            return self._none()
        return heads.scores(heads.gather_last(self._passes), *self._draft_keys())

    def _none(self) -> Tensor:
        """The scores of no head."""
        return torch.zeros(len(self.lengths), self.state.extent, dtype=torch.float32, device=self.lengths.device)

    def lookahead_rows(self) -> Iterator[Tensor]:
        keys, position, columns = self._draft_keys()
        layers = list(self.stepper.lookahead_layers)
        apart = len(keys) == len(layers)  # or the keys are those of all layers
        for index, layer in enumerate(layers):
            q = torch.cat([queries[layer][:, -1:] for queries in self._passes], dim=1)
            held = keys[index if apart else layer][:, : columns + q.shape[1]]
            yield rows_at(q, held, position)[..., :columns].flatten(1, 2)

    def _history_scores(self, share: float | None = None) -> Tensor:
        heads, query = self.stepper.history_heads, self.state.history_query
        if heads is None or query is None:
            return self._none()
        position = (self.lengths - 1).unsqueeze(1)
        return heads.scores(query, self.state.target_cache.all_keys, position, self.state.extent, share)

    def _begin_lookahead(self, layer: int) -> None:
        """Score a layer whose last query has come, and add it to those before."""
        assert self._beside is not None
        heads = self.stepper.lookahead_layers[layer]
        self._fork()
        with torch.cuda.stream(self._beside):
            found = heads.scores(heads.gather_last(self._passes), *self._draft_keys(), LOOKAHEAD_SHARE)
            self._lookahead = found if self._lookahead is None else self._lookahead.add_(found)

    def _fork(self) -> None:
        assert self._beside is not None
        self._begun = True
        self._beside.wait_stream(torch.cuda.current_stream(self._beside.device))

    def _draft_keys(self) -> tuple[Tensor, Tensor, int]:
        """Keys, positions of the passes' last queries, and how many columns are wanted."""
        cache, lengths = self.drafted.draft_cache, self.drafted.lengths
        assert cache is not None
        turns = torch.arange(len(self._passes), device=lengths.device)
        keys = cache.keys if cache.scored is None else cache.scored
        return keys, lengths.unsqueeze(1) + turns, self.state.extent
