"""Methods that are compared, one per file; a new one is a new file and a line here."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeGuard

from dustin_runtime.config import AdaptiveBudget, DustinConfig, Estimate, Selection, changed
from dustin_runtime.errors import ConfigError, UsageError
from dustin_runtime.guard import Rule
from dustin_runtime.judge import Coefficients
from dustin_runtime.policies.base import Policy, Signals
from dustin_runtime.policies.compresskv import CompressKV
from dustin_runtime.policies.dustin import Dustin, DustinD, DustinLook, DustinT
from dustin_runtime.policies.dustin_merged import DustinMerged
from dustin_runtime.policies.dustin_rest import DustinRest, DustinRestLook
from dustin_runtime.policies.full import MagicDec, SpeculativeDecoding, Vanilla
from dustin_runtime.policies.h2o import H2O
from dustin_runtime.policies.quest import Quest, QuestQueryHead
from dustin_runtime.policies.smallkv import SmallKV
from dustin_runtime.policies.snapkv import SnapKV, SnapKV8
from dustin_runtime.policies.specattn import SpecAttn, SpecAttnAll
from dustin_runtime.policies.streaming import StreamingLLM, StreamingPrompt
from dustin_runtime.policies.triforce import TriForce

_ALL: tuple[type[Policy], ...] = (
    *(Vanilla, SpeculativeDecoding, MagicDec, TriForce),
    *(Dustin, DustinT, DustinD, DustinLook, DustinRest, DustinRestLook, DustinMerged),
    *(
        StreamingLLM,
        StreamingPrompt,
        SnapKV,
        SnapKV8,
        CompressKV,
        H2O,
        SpecAttn,
        SpecAttnAll,
        Quest,
        QuestQueryHead,
        SmallKV,
    ),
)
_JUDGED: tuple[type[Dustin], ...] = (Dustin, DustinT, DustinD, DustinLook, DustinRest, DustinRestLook)
"""Those whose lists can be judged: they ask the configuration's heads, for which the estimate was fitted."""
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in _ALL}


def make_policy(name: str, selection: Selection | None, option: str = "--method") -> Policy:
    """Build a method by name.

    Args:
        option: what names it on the command line, for errors.

    Raises:
        UsageError: the name is unknown, or the method needs a configuration and none is given.
        ConfigError: the configuration does not say what the method needs.
    """
    if name not in POLICIES:
        raise UsageError(f"{option} {name}: unknown (known: {', '.join(POLICIES)})")
    policy = POLICIES[name]
    if policy.needs_selection and selection is None:
        raise UsageError(f"{option} {name} needs --config: emit one with dustin-profile search")
    if selection and (field := policy.lacking(selection)):
        raise ConfigError(
            f"{option} {name} needs selection.{field}, which the config lacks: emit it anew with dustin-profile search"
        )
    return policy(selection if policy.needs_selection else None)


class Asked(NamedTuple):
    """Of `guarded`, which says what each is."""

    threshold: float | None = None
    every: int | None = None
    target_arr: float | None = None


def guarded(
    policy: Policy,
    config: DustinConfig | None,
    *,
    threshold: float | None = None,
    every: int | None = None,
    target_arr: float | None = None,
) -> Policy:
    """The policy with what is asked of a guard, or what the configuration says of its budget; as it is if nothing is.

    Args:
        threshold: `--guard`; every: `--full-every`; target_arr: `--target-arr`, whose sizes are the configuration's, or
            those that its estimate was fitted at.

    Raises:
        UsageError: the method chooses no lists that could be judged, or a value is out of range.
        ConfigError: the configuration has no estimate to judge by.
    """
    adaptive = config.adaptive_budget if config else None
    if target_arr is not None:
        if not 0 < target_arr <= 1:
            raise UsageError(f"--target-arr {target_arr}: give more than 0 and at most 1")
        fitted = config.guard.sizes if config and config.guard else ()
        sizes_of = {"sizes": adaptive.sizes} if adaptive else {"sizes": tuple(sorted(set(fitted)))} if fitted else {}
        adaptive = AdaptiveBudget(target_arr=target_arr, **sizes_of)
    if not judged(policy):
        if target_arr is not None:
            raise UsageError(f"--target-arr: method {policy.name} has one budget; give one of {able()}")
        adaptive = None
    if threshold is not None and not 0 <= threshold <= 1:
        raise UsageError(f"--guard {threshold}: give 0, which is off, to 1, which verifies everything in full")
    if every is not None and every < 1:
        raise UsageError(f"--full-every {every}: give 1 or more")
    if not (threshold or every or adaptive):
        return policy
    if not judged(policy):
        flag = "--guard" if threshold else "--full-every"
        raise UsageError(f"{flag}: method {policy.name} cannot; give one of {able()}")
    assert policy.selection is not None
    known, sizes = config.guard if config else None, adaptive.sizes if adaptive else ()
    if known is None and (sizes or 0 < (threshold or 0) < 1):
        flag = "--target-arr" if sizes else "--guard"
        raise ConfigError(
            f"{flag} needs guard, which the config lacks: emit it anew with dustin-profile search on its run directory"
        )
    if threshold == 1 and known is None:
        threshold, every = None, 1  # the same, and nothing has to be estimated
    selection = changed(policy.selection, sizes[-1], None) if sizes else policy.selection
    asked = (selection.budget, *sizes) if sizes or threshold else ()
    return replace(
        policy,
        selection=selection,
        rule=Rule(
            threshold or 0.0,
            every or 0,
            sizes,
            adaptive.target_arr if adaptive else 0.0,
            tuple((size, _coefficients(known.at(size))) for size in dict.fromkeys(asked)) if known else (),
        ),
    )


def _coefficients(estimate: Estimate) -> Coefficients:
    return Coefficients(estimate.intercept, estimate.history, estimate.lookahead)


def judged(policy: Policy) -> TypeGuard[Dustin]:
    """Whether `guarded` can give it a rule."""
    return type(policy) in _JUDGED


def rule_of(policy: Policy) -> dict[str, str]:
    """What a guard or several budgets make of a method, for records; nothing without."""
    rule = policy.rule if isinstance(policy, Dustin) else None
    return {"rule": rule.label} if rule else {}


def able() -> str:
    """Names of the methods that `guarded` can give a rule."""
    return ", ".join(one.name for one in _JUDGED)


def require_over_ranks(policy: Policy, world: int) -> None:
    """Refuse a method that needs all heads in one process where the target is split.

    Raises:
        UsageError: the method is named, and those that can.
    """
    if world > 1 and not policy.over_ranks:
        able = ", ".join(name for name, one in POLICIES.items() if one.over_ranks)
        raise UsageError(
            f"method {policy.name} needs all heads in one process, there are {world}; those that do not: {able}"
        )


def draft_window(policy: Policy, asked: int | None, served: DustinConfig | None) -> int | None:
    """Tokens of its cache that the draft reads with this method; None for all.

    Args:
        asked: what the user wants instead of the method's or the configuration's own.
    """
    if asked or policy.partial_draft:
        return asked or 512
    return served.draft_budget if served and policy.needs_selection else None


__all__ = [
    "POLICIES",
    "Asked",
    "Policy",
    "Signals",
    "able",
    "draft_window",
    "guarded",
    "judged",
    "make_policy",
    "require_over_ranks",
]
