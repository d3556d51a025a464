"""Methods that are compared, one per file; a new one is a new file and a line here."""

from __future__ import annotations

from dustin_runtime.config import DustinConfig, Selection
from dustin_runtime.errors import ConfigError, UsageError
from dustin_runtime.policies.adaptive_split import DustinFeedback, DustinMarginal, DustinMerged
from dustin_runtime.policies.base import Policy, Signals
from dustin_runtime.policies.compresskv import CompressKV
from dustin_runtime.policies.dustin import Dustin, DustinD, DustinT
from dustin_runtime.policies.dustin_fused import DustinFused
from dustin_runtime.policies.dustin_layers import DustinLayers
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
    *(Dustin, DustinT, DustinD, DustinLayers, DustinFused, DustinMerged, DustinMarginal, DustinFeedback),
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


__all__ = ["POLICIES", "Policy", "Signals", "draft_window", "make_policy", "require_over_ranks"]
