"""The parts of a step, each timed alone on the state of a run; over ranks by all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dustin_runtime.attention.dense import FullAttention
from dustin_runtime.attention.tap import QueryTap
from dustin_runtime.bench.timing import measure_ms
from dustin_runtime.bench.together import Together
from dustin_runtime.models import ops
from dustin_runtime.models.decoder import Attention, Decoder
from dustin_runtime.scaled import Held, shown
from dustin_runtime.signals import StepSignals
from dustin_runtime.state import State
from dustin_runtime.step import Stepper

ALL_REDUCE = "all_reduce"


class _Fixed:
    """Scores that are there already (implements `policies.Signals`)."""

    def __init__(
        self, state: State, history: Tensor | None, lookahead: Tensor | None, lookahead_rows: list[Tensor]
    ) -> None:
        self.lengths = state.lengths
        self.memory = state.memory
        cache = state.target_cache
        self._keys, self._values = (shown(held, state.extent) for held in (cache.all_keys, cache.all_values))
        self._history = history
        self._lookahead = lookahead
        self._lookahead_rows = lookahead_rows

    def prefix_keys(self) -> Held:
        return self._keys

    def prefix_values(self) -> Held:
        return self._values

    def history(self) -> Tensor:
        assert self._history is not None
        return self._history

    def lookahead(self) -> Tensor:
        assert self._lookahead is not None
        return self._lookahead

    def lookahead_rows(self) -> list[Tensor]:
        return self._lookahead_rows


class _Recorded(StepSignals):
    """Signals that can be made anew from the queries of the same drafting."""

    def __init__(self, stepper: Stepper, state: State) -> None:
        super().__init__(stepper, state)
        self._taps: list[Mapping[int, Tensor]] = []

    def tap(self, attend: Attention, last: bool, until: int | None = None) -> QueryTap:
        tap = super().tap(attend, last, until)
        self._taps.append(tap.queries)
        return tap

    def again(self) -> StepSignals:
        """As they were before any score was asked for; over ranks scores are summed in place, and kept."""
        fresh = StepSignals(self.stepper, self.state)
        for queries in self._taps:
            fresh.given(queries)
        return fresh


def components(stepper: Stepper, state: State, repeats: int) -> dict[str, float]:
    """Milliseconds of each part of a step, run alone on the same state.

    Over ranks history has its sum in it, drafting by rows the lookahead scores and the gather that ends it, and the two
    sums of each layer are a part of their own; other parts are what a rank does between them. The slowest rank counts.
    """
    device, policy, together = state.lengths.device, stepper.policy, Together.of(stepper.target)
    signals = _Recorded(stepper, state)
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        found[name] = measure_ms(work, device, repeats, together=together).ms

    if stepper.draft:
        stepper.draft_tokens(state, signals)
        timed("draft", lambda: stepper.draft_tokens(state, StepSignals(stepper, state)))
    history = signals.history() if policy.uses_history else None
    by_layer = policy.uses_lookahead and policy.lookahead_by_layer
    lookahead = signals.lookahead() if policy.uses_lookahead and not by_layer else None
    lookahead_rows = list(signals.lookahead_rows()) if by_layer else []
    ahead = policy.uses_lookahead and state.blocks is None

    def scores() -> None:
        fresh = signals.again()
        if policy.uses_history:
            fresh.history()
        if by_layer:
            list(fresh.lookahead_rows())
        elif ahead:
            fresh.lookahead()

    if policy.uses_history or ahead:
        timed("scores", scores)
    fixed = _Fixed(state, history, lookahead, lookahead_rows)
    chosen = None if policy.chooses_by_layer else policy.verification(fixed)
    if chosen and not isinstance(chosen, FullAttention):
        timed("selection", lambda: policy.verification(fixed))
    shape, cache, tokens = stepper.target.shape, state.target_cache, stepper.depth + 1
    q = torch.randn(state.rows, tokens, shape.query_heads, shape.head_size, dtype=stepper.target.dtype, device=device)
    extent = state.extent + tokens

    def attention() -> None:
        attend = chosen or policy.verification(fixed)
        for layer in range(shape.layers):
            attend(layer, q, *cache.layer(layer, extent), state.lengths)

    timed("verify_attention", attention)
    if policy.works_beside:
        timed("lists", lambda: policy.begin(fixed, None))
    timed("linears", _linears(stepper.target, state.rows * tokens))
    if stepper.target.split:
        timed(ALL_REDUCE, _sums(stepper.target, state.rows, tokens))
    return found


def _linears(model: Decoder, rows: int) -> Callable[[], None]:
    """Every matrix product of one forward pass, as the decoder does them."""
    shape, weights = model.shape, model.weights
    widths = (shape.hidden, shape.query_heads * shape.head_size, shape.ffn)
    x, heads, inner = (torch.randn(rows, width, dtype=model.dtype, device=model.device) for width in widths)

    def run() -> None:
        for layer in weights.layers:
            ops.linear(x, layer.qkv, layer.qkv_bias)
            ops.linear(heads, layer.output)
            ops.gated_linear(x, layer.gate_up)
            ops.linear(inner, layer.down)
        model.own_logits(x)

    return run


def _sums(model: Decoder, rows: int, tokens: int) -> Callable[[], None]:
    """Every sum over ranks of one forward pass."""
    size = (rows, tokens, model.shape.hidden)
    zeros = model.block_room(size)
    if zeros is None:
        zeros = torch.empty(size, dtype=model.dtype, device=model.device)
    zeros.zero_()  # sums stay finite

    def run() -> None:
        for _ in range(2 * model.shape.layers):
            model.whole_block(zeros)

    return run
