"""Decoding speed of every method in one engine: tokens per second, where the time of a step goes, and its floor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dustin_runtime.acceptance import rate_for
from dustin_runtime.bench.components import components as _components
from dustin_runtime.bench.document import roofline_device
from dustin_runtime.bench.noise import fill
from dustin_runtime.bench.together import Together
from dustin_runtime.config import DustinConfig, Selection
from dustin_runtime.engine import Engine
from dustin_runtime.generation import Draw, capacity_beyond
from dustin_runtime.links import LINKS, step_sums_ms
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.parallel.ranks import Ranks
from dustin_runtime.parallel.sums import SizeClass
from dustin_runtime.policies import POLICIES, Asked, Policy, guarded, judged, make_policy, rule_of
from dustin_runtime.roofline import StepCosts, step_costs
from dustin_runtime.scaled import dtype_name
from dustin_runtime.serving import to_host
from dustin_runtime.state import State
from dustin_runtime.step import Stepper

WARM_UP = 3
"""Steps before the clock starts."""


NOTHING = Asked()


def made(method: str, selection: Selection, config: DustinConfig | None = None, asked: Asked = NOTHING) -> Policy:
    """A method; with what is asked of a guard, and of several budgets, if it can do that.

    Raises: as `policies.guarded`.
    """
    policy = make_policy(method, selection if POLICIES[method].needs_selection else None)
    return guarded(policy, config, **asked._asdict()) if judged(policy) else policy


@dataclass(frozen=True)
class Setup:
    """What all rows of a grid share.

    Attributes:
        draft_budget: tokens that a windowed draft reads.
        forced_tau: tokens per step that acceptance is forced to; None lets the models decide.
        prompts: token ids to prefill, cut to the context; None fills the caches with noise.
        random_weights: whether the models' weights are noise.
        steps: steps that are timed, of the whole batch.
        ranks: that share the target; each of them measures, and the slowest counts.
        sums: which way sums the target's blocks over them, by size; empty where there was no choice.
        kv_dtype: as of `Stepper`.
        make: a method by its name, with what is asked of it; None makes them from `selection` alone.
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
    ranks: Ranks = field(default_factory=lambda: Ranks(0, 1, 0))
    sums: tuple[SizeClass, ...] = ()
    kv_dtype: torch.dtype | None = None
    make: Callable[[str], Policy] | None = None

    def policy(self, method: str) -> Policy:
        return self.make(method) if self.make else made(method, self.selection)

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
    """Run one case and report it; over ranks on each of them, with the same report.

    Raises:
        CapacityError: memory does not suffice; on all ranks.
        ConflictError: ranks decided differently; on all of them.
        PeerError: another rank has ended.
    """
    if setup.target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    kind = POLICIES[case.method]
    policy = setup.policy(case.method)
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
        kv_dtype=setup.kv_dtype,
    )
    engine = Engine(stepper)
    new = new_tokens(setup.steps, stepper.depth)
    together = Together.of(setup.target)
    with setup.ranks.alike(loading=True):
        engine.reserve(case.batch, case.context + new)
    state, prefill_s = engine.prepare(case.batch, case.context + new), None
    if setup.prompts is None:
        fill(stepper, state, case.context)
    else:
        prompts = [ids[: case.context] for ids in setup.prompts[: case.batch]]
        draws = [Draw(seed=row) for row in range(case.batch)]  # so that a forced acceptance differs from row to row
        together.begin()
        began = time.perf_counter()
        state = engine.fill(prompts, case.context + new, draws)
        _wait(state)
        (prefill_s,) = together.slowest(time.perf_counter() - began)
    figures = _timed(engine, state, setup.steps, stepper.depth, together) | {"prefill_s": prefill_s}
    setup.ranks.agree(
        {
            f"how many drafts {case.method} accepted": figures["acceptance_per_position"],
            f"the last tokens of {case.method}": state.recent.tolist(),
        }
    )
    state.lengths.fill_(case.context)
    state.active.fill_(True)
    components = _components(stepper, state, setup.repeats)
    components["rest"] = figures["step_ms"] - sum(components.values())
    size, split_draft = setup.target.dtype.itemsize, setup.draft.split is not None
    costs = step_costs(
        case.method,
        whole_shape(setup.target),
        whole_shape(setup.draft),
        [case.context] * case.batch,
        depth=setup.depth,
        selection=setup.selection,
        draft_budget=stepper.draft_budget,
        element_bytes=size,
        world=setup.ranks.world,
        draft_split=split_draft,
        kv_bytes=setup.kv_dtype.itemsize if setup.kv_dtype else None,
        policy=policy,
        read=figures.get("kept_tokens_per_step"),
    )
    name, figures_of_device = roofline_device(setup.target.device)
    roofline = costs.milliseconds(figures_of_device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if state.lengths.is_cuda else None
    over_ranks: dict[str, float] = {}
    if setup.ranks.world > 1:
        draft = setup.draft.shape if split_draft else None
        sums = step_sums_ms(
            setup.target.shape, draft, case.batch, stepper.depth, stepper.passes, setup.ranks.world, size, LINKS[name]
        )
        over_ranks["roofline_all_reduce_ms"] = sums
        roofline += sums
        peak = together.slowest(peak)[0] if peak is not None else None
    return {
        "method": case.method,
        "batch": case.batch,
        "context": case.context,
        "depth": stepper.depth,
        "budget": setup.selection.budget if kind.needs_selection else None,
        "draft_reads": (stepper.draft_budget or "all") if kind.drafts else None,
        "kv_dtype": dtype_name(setup.kv_dtype, setup.target.dtype),
        **figures,
        "roofline_ms": roofline,
        **over_ranks,
        "over_roofline": figures["step_ms"] / roofline,
        "components_ms": components,
        "components_gb_per_s": _rates(costs, components, by_rows=state.blocks is not None),
        "peak_memory_gib": peak,
        "synthetic": setup.synthetic,
    }


def whole_shape(model: Decoder) -> ModelShape:
    """A model's shape, also where only a part of it is here."""
    return model.split.share.whole if model.split else model.shape


def _timed(engine: Engine, state: State, steps: int, depth: int, together: Together) -> dict[str, Any]:
    """Step as the engine does, a step's result read while the next one runs."""
    for _ in range(WARM_UP):
        engine.step(state)
    _wait(state)
    emitted, read, full, accepted = 0, 0.0, 0.0, [0] * depth
    together.begin()
    began = time.perf_counter()
    late: list[tuple[Tensor, torch.cuda.Event | None]] = []
    for turn in range(steps + 1):
        if turn < steps:
            late.append(to_host(engine.step(state)[1]))
        if turn:
            host, arrived = late.pop(0)
            if arrived:
                with engine.stepper.target.watched():
                    arrived.synchronize()
            for values in host[:, depth + 1 :].tolist():
                count = values[0]
                emitted += int(count)
                read += values[1]
                full += sum(values[3:4])
                for position in range(int(count) - 1):
                    accepted[position] += 1
    _wait(state)
    rows, judged = steps * state.rows, getattr(engine.stepper.policy, "rule", None) is not None
    (seconds,) = together.slowest(time.perf_counter() - began)
    return (
        {
            "tokens_per_s": emitted / seconds,
            "tau": emitted / (steps * state.rows),
            "acceptance_per_position": [count / (steps * state.rows) for count in accepted],
            "step_ms": 1e3 * seconds / steps,
        }
        | ({"kept_tokens_per_step": read / rows, "full_steps_share": full / rows} if judged else {})
        | rule_of(engine.stepper.policy)
    )


def _rates(costs: StepCosts, components: dict[str, float], by_rows: bool) -> dict[str, float]:
    """GB/s that each component reads its floor of bytes at; not of scores, if a part of them is timed with drafting."""
    read = {
        "draft": costs.draft_linears.bytes + costs.draft_attention.bytes,
        "scores": 0 if by_rows else costs.scores.bytes,
        "verify_attention": costs.verify_attention.bytes,
        "linears": costs.target_linears.bytes,
    }
    return {name: read[name] / components[name] / 1e6 for name in read if read[name] and components.get(name)}


def _wait(state: State) -> None:
    if state.lengths.is_cuda:
        torch.cuda.synchronize(state.lengths.device)
