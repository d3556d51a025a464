"""What a configuration says and a run does otherwise: it is served, and said."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import NamedTuple

from dustin_runtime.config import DustinConfig, Guard, Selection, changed
from dustin_runtime.errors import ConfigWarning
from dustin_runtime.policies import Policy, able
from dustin_runtime.policies.dustin import Dustin, DustinD, DustinT


class Misfit(NamedTuple):
    """One thing that a guard was fitted at, and is not used at."""

    field: str
    fitted: str
    here: str
    remedy: str


def warn_of_config(policy: Policy, config: DustinConfig, selection: Selection, *, depth: int, windowed: bool) -> None:
    """Warn with `ConfigWarning` of a guard that was fitted at another depth, m, draft cache or budget, of an adaptive
    budget where the method reads one, and of a last look for which nothing is asked.

    Args:
        policy: of `policies.guarded`.
        config: what is served, without an adaptive budget if it gives way to one that is asked for.
        selection: that the method was made with.
        depth: draft tokens per step; windowed: whether the draft reads a part of its cache only.
    """
    rule = policy.rule if isinstance(policy, Dustin) else None
    # With other rules nothing is estimated, or all is verified in full whatever the estimate is.
    if rule and config.guard and (rule.sizes or 0 < rule.threshold < 1):
        sizes = [size for size, _ in rule.estimate]
        for one in _misfits(policy, config.guard, selection, sizes, depth, windowed):
            _warn(
                f"guard.{one.field}: the estimate of ARR was fitted at {one.fitted} and is used at {one.here}, where it"
                f" may be off: {one.remedy}"
            )
    if policy.last_look and not policy.uses_lookahead:
        _warn(f"m is 0, so that {policy.name} asks the draft nothing, and does not look once more either: give --m")
    if config.adaptive_budget and policy.selection and not (rule and rule.sizes):
        _warn(
            f"adaptive_budget: {policy.name} reads {policy.selection.budget} tokens at every step here; a --method that"
            f" chooses among {', '.join(map(str, config.adaptive_budget.sizes))} is one of {able()}"
        )


def _misfits(
    policy: Policy, guard: Guard, selection: Selection, sizes: list[int], depth: int, windowed: bool
) -> Iterator[Misfit]:
    passes = policy.passes(depth)  # what lookahead was summed over, be it a draft or a look
    if guard.depth not in (None, passes):
        looks = passes - depth
        verify = f"verify at --depth {guard.depth - looks}, or " if guard.depth > looks else ""
        looked = f"{depth} and a last look" if looks else str(depth)
        yield Misfit("depth", str(guard.depth), looked, f"{verify}search with --depth {passes}")
    if guard.m is not None and not isinstance(policy, DustinT | DustinD):  # which read one side, whatever m is
        fitted = selection.model_copy(update={"budget": guard.budget, "m": guard.m})
        if (m := changed(fitted, selection.budget, None).m) != selection.m:
            yield Misfit("m", str(m), str(selection.m), f"give --m {m}, or search again")
    cache = "sink+window" if windowed else "full"
    if cache != guard.draft_cache:
        remedy = f"serve with draft_cache {guard.draft_cache}, without --draft-budget"
        yield Misfit("draft_cache", guard.draft_cache, cache, remedy)
    among = {guard.budget, *guard.sizes}
    if beyond := [size for size in sizes if not min(among) <= size <= max(among)]:
        said = f"k = {min(among)} to {max(among)}" if len(among) > 1 else f"k = {guard.budget}"
        yield Misfit("sizes", said, f"k = {beyond[0]}", f"give k among these, or search with --budget {beyond[0]}")


def _warn(message: str) -> None:
    warnings.warn(message, ConfigWarning, stacklevel=3)
