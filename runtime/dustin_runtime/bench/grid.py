"""Decoding speed of every method in one engine: tokens per second, where the time of a step goes, and its floor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dustin_runtime.acceptance import rate_for
from dustin_runtime.attention.dense import FullAttention
from dustin_runtime.bench.document import roofline_device
from dustin_runtime.bench.timing import measure_ms
from dustin_runtime.cache import KVCache
from dustin_runtime.config import Selection
from dustin_runtime.engine import Draw, Engine, capacity_beyond, to_host
from dustin_runtime.models import ops
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.policies import POLICIES, Policy, make_policy
from dustin_runtime.policies.base import Prompted
from dustin_runtime.roofline import StepCosts, step_costs
from dustin_runtime.signals import StepSignals
from dustin_runtime.step import State, Stepper

WARM_UP = 3
"""Steps before the clock starts."""


@dataclass(frozen=True)
class Setup:
    """What all rows of a grid share.

    Attributes:
        draft_budget: tokens that a windowed draft reads.
        forced_tau: tokens per step that acceptance is forced to; None lets the models decide.
        prompts: token ids to prefill, cut to the context; None fills the caches with noise.
        random_weights: whether the models' weights are noise.
        steps: steps that are timed, of the whole batch.
    """

    target: Decoder
    draft: Decoder
    selection: Selection
    depth: int
    shared_vocab: int
    draft_budget: int
    forced_tau: float | None
    prompts: Sequence[Sequence[int]] | None
    random_weights: bool
    steps: int
    repeats: int

    @property
    def synthetic(self) -> list[str]:
        """What of a row is not real, for every line that reports it."""
        said = {
            "random weights": self.random_weights,
            f"acceptance forced to {self.forced_tau}": self.forced_tau is not None,
            "synthetic context": self.prompts is None,
        }
        return [what for what, applies in said.items() if applies]


@dataclass(frozen=True)
class Case:
    """One row of the grid."""

    method: str
    batch: int
    context: int
    windowed: bool
    """Whether the draft reads only its first and last tokens."""


def new_tokens(steps: int, depth: int) -> int:
    """Positions that a run needs beyond its context, every draft accepted."""
    return capacity_beyond((steps + WARM_UP) * (depth + 1) + 1, depth)


@torch.inference_mode()
def measure(setup: Setup, case: Case) -> dict[str, Any]:
    """Run one case and report it."""
    if setup.target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    kind = POLICIES[case.method]
    policy = make_policy(case.method, setup.selection if kind.needs_selection else None)
    forced = setup.forced_tau if kind.drafts else None
    stepper = Stepper(
        setup.target,
        setup.draft,
        policy,
        policy.selection,
        setup.depth,
        setup.shared_vocab,
        draft_budget=setup.draft_budget if case.windowed and kind.drafts else None,
        forced_rate=rate_for(forced, setup.depth) if forced else None,
    )
    engine = Engine(stepper)
    new = new_tokens(setup.steps, stepper.depth)
    if setup.prompts is None:
        state, prefill_s = engine.prepare(case.batch, case.context + new), None
        fill(stepper, state, case.context)
    else:
        prompts = [ids[: case.context] for ids in setup.prompts[: case.batch]]
        draws = [Draw(seed=row) for row in range(case.batch)]  # so that a forced acceptance differs from row to row
        engine.prepare(case.batch, case.context + new)
        began = time.perf_counter()
        state = engine.fill(prompts, case.context + new, draws)
        _wait(state)
        prefill_s = time.perf_counter() - began
    figures = _timed(engine, state, setup.steps, stepper.depth) | {"prefill_s": prefill_s}
    state.lengths.fill_(case.context)
    state.active.fill_(True)
    components = _components(stepper, state, setup.repeats)
    components["rest"] = figures["step_ms"] - sum(components.values())
    costs = step_costs(
        case.method,
        setup.target.shape,
        setup.draft.shape,
        [case.context] * case.batch,
        depth=setup.depth,
        selection=setup.selection,
        draft_budget=stepper.draft_budget,
        element_bytes=setup.target.dtype.itemsize,
    )
    roofline = costs.milliseconds(roofline_device(setup.target.device)[1])
    return {
        "method": case.method,
        "batch": case.batch,
        "context": case.context,
        "depth": stepper.depth,
        "budget": setup.selection.budget if kind.needs_selection else None,
        "draft_reads": (stepper.draft_budget or "all") if kind.drafts else None,
        **figures,
        "roofline_ms": roofline,
        "over_roofline": figures["step_ms"] / roofline,
        "components_ms": components,
        "components_gb_per_s": _rates(costs, components),
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if state.lengths.is_cuda else None,
        "synthetic": setup.synthetic,
    }


def fill(stepper: Stepper, state: State, context: int) -> None:
    """Caches of noise, every row `context` tokens long and active."""
    for cache in (state.target_cache, state.draft_cache):
        if cache is not None:
            for layer in range(len(cache.keys)):
                cache.keys[layer].normal_()
                cache.values[layer].normal_()
            if cache.scored is not None:
                cache.scored.normal_()
    if state.history_query is not None:
        state.history_query.normal_()
    for row in range(state.rows) if state.memory or state.draft_lists else ():
        drafted = None
        if stepper.draft and state.draft_cache:
            cache = state.draft_prefill or state.draft_cache.row(row)
            drafted = _noise(stepper.draft.shape, stepper.policy, cache, context)
        if state.memory:
            target = _noise(stepper.target.shape, stepper.policy, state.target_cache.row(row), context)
            state.memory.admit(row, target, drafted)
        if state.draft_lists and drafted:
            state.draft_lists.take(row, drafted)
    state.sampling.seed.copy_(torch.arange(state.rows))
    state.recent.random_(0, 1000)
    state.lengths.fill_(context)
    state.active.fill_(True)


def _noise(shape: ModelShape, policy: Policy, cache: KVCache, context: int) -> Prompted:
    """A prompt in a cache of noise."""
    keys = cache.keys
    size = (1, policy.prompt_queries, shape.query_heads, shape.head_size)
    queries = {layer: torch.randn(size, device=keys.device, dtype=keys.dtype) for layer in range(shape.layers)}
    mass = {layer: torch.rand(1, shape.kv_heads, context, device=keys.device) for layer in range(shape.layers)}
    return Prompted(context, cache, queries, mass)


def _timed(engine: Engine, state: State, steps: int, depth: int) -> dict[str, Any]:
    """Step as the engine does, a step's result read while the next one runs."""
    for _ in range(WARM_UP):
        engine.step(state)
    _wait(state)
    emitted, accepted = 0, [0] * depth
    began = time.perf_counter()
    late: list[tuple[Tensor, torch.cuda.Event | None]] = []
    for turn in range(steps + 1):
        if turn < steps:
            late.append(to_host(engine.step(state)[1]))
        if turn:
            host, arrived = late.pop(0)
            if arrived:
                arrived.synchronize()
            for count in host[:, depth + 1].tolist():
                emitted += int(count)
                for position in range(int(count) - 1):
                    accepted[position] += 1
    _wait(state)
    seconds = time.perf_counter() - began
    return {
        "tokens_per_s": emitted / seconds,
        "tau": emitted / (steps * state.rows),
        "acceptance_per_position": [count / (steps * state.rows) for count in accepted],
        "step_ms": 1e3 * seconds / steps,
    }


class _Fixed:
    """Scores that are there already (implements `policies.Signals`)."""

    def __init__(
        self, state: State, history: Tensor | None, lookahead: Tensor | None, lookahead_rows: list[Tensor]
    ) -> None:
        self.lengths = state.lengths
        self.memory = state.memory
        self._history = history
        self._lookahead = lookahead
        self._lookahead_rows = lookahead_rows

    def history(self) -> Tensor:
        assert self._history is not None
        return self._history

    def lookahead(self) -> Tensor:
        assert self._lookahead is not None
        return self._lookahead

    def lookahead_rows(self) -> list[Tensor]:
        return self._lookahead_rows


def _components(stepper: Stepper, state: State, repeats: int) -> dict[str, float]:
    """Milliseconds of each part of a step, run alone on the same state."""
    device, policy = state.lengths.device, stepper.policy
    signals = StepSignals(stepper, state)
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        found[name] = measure_ms(work, device, repeats).ms

    if stepper.draft:
        stepper.draft_tokens(state, signals)
        timed("draft", lambda: stepper.draft_tokens(state, StepSignals(stepper, state)))
    history = signals.history() if policy.uses_history else None
    by_layer = policy.uses_lookahead and policy.lookahead_by_layer
    lookahead = signals.lookahead() if policy.uses_lookahead and not by_layer else None
    lookahead_rows = list(signals.lookahead_rows()) if by_layer else []

    def scores() -> None:
        if policy.uses_history:
            signals.history()
        if by_layer:
            list(signals.lookahead_rows())
        elif policy.uses_lookahead:
            signals.lookahead()

    if policy.uses_history or policy.uses_lookahead:
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
            attend(layer, q, cache.keys[layer][:, :extent], cache.values[layer][:, :extent], state.lengths)

    timed("verify_attention", attention)
    timed("linears", _linears(stepper.target, state.rows * tokens))
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
        model.logits(x)

    return run


def _rates(costs: StepCosts, components: dict[str, float]) -> dict[str, float]:
    """GB/s that each component reads its floor of bytes at."""
    read = {
        "draft": costs.draft_linears.bytes + costs.draft_attention.bytes,
        "scores": costs.scores.bytes,
        "verify_attention": costs.verify_attention.bytes,
        "linears": costs.target_linears.bytes,
    }
    return {name: read[name] / components[name] / 1e6 for name in read if components.get(name)}


def _wait(state: State) -> None:
    if state.lengths.is_cuda:
        torch.cuda.synchronize(state.lengths.device)
