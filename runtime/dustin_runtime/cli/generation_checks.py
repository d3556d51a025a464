"""What `dustin-run generate` opens, and refuses before weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dustin_runtime.errors import UsageError

if TYPE_CHECKING:
    import torch

    from dustin_runtime.audit import Audits
    from dustin_runtime.config import DustinConfig
    from dustin_runtime.loading import Pair
    from dustin_runtime.policies import Policy


def check_draws(temperature: float, top_p: float, stop: list[str]) -> None:
    if not 0 <= temperature <= 1e9:  # which NaN fails too
        raise UsageError(f"--temperature {temperature}: give 0, which is greedy, or more, up to 1e9")
    if not 0 < top_p <= 1:
        raise UsageError(f"--top-p {top_p}: give more than 0 and at most 1")
    if top_p < 1 and not temperature:
        raise UsageError(f"--top-p {top_p}: greedy decoding draws nothing; give a --temperature above 0")
    if "" in stop:
        raise UsageError("--stop: is empty; give the text to end at")


def audits_of(most: float | None, share: float | None, policy: Policy, seed: int, world: int) -> Audits | None:
    """Which steps are audited; None for none."""
    from dustin_runtime.audit import SHARE, Audits

    if most is not None and not 0 <= most < float("inf"):
        raise UsageError(f"--max-divergence {most}: give 0 nats or more")
    if share is not None and not 0 <= share <= 1:
        raise UsageError(f"--audit-share {share}: give 0 to 1")
    if most is not None and share == 0:
        raise UsageError("--max-divergence needs audited steps: give an --audit-share above 0, or leave it out")
    if not (share or (share is None and most is not None)):
        return None
    flag = "--audit-share" if most is None else "--max-divergence"
    if world > 1:
        raise UsageError(f"{flag}: audits verify in full in one process; this is one of {world}")
    if not policy.needs_selection:
        raise UsageError(f"{flag}: method {policy.name} verifies in full, so there is nothing to audit")
    return Audits(SHARE if share is None else share, seed)


def require_memory(
    opened: Pair,
    policies: Sequence[Policy],
    rows: int,
    capacity: int,
    depth: int,
    draft_budget: int | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    available_bytes: int,
    temperature: float,
    world: int,
    pipeline: bool,
    audited: bool,
) -> None:
    """Refuse a run that does not fit on the GPU, before its weights are read."""
    from dustin_runtime.memory_plan import plan, require

    need = plan(
        opened.target_shape,
        opened.draft_shape if depth else None,
        batch=rows,
        capacity=capacity,
        depth=depth,
        selection=max(
            (scored for policy in policies if (scored := policy.scored(opened.draft_shape))),
            key=lambda scored: sum(len(entry.heads) for entry in scored.lookahead),
            default=None,
        ),
        element_bytes=dtype.itemsize,
        sampled=temperature > 0,
        draft_stores=opened.draft_stores,
        draft_budget=draft_budget,
        policies=policies,
        world=world,
        pipeline=pipeline,
        kv_bytes=kv_dtype.itemsize if kv_dtype else None,
        audited=audited,
    )
    require(need, available_bytes)


def adjusted(served: DustinConfig | None, budget: int | None, m: int | None) -> DustinConfig | None:
    """The config with another budget or split, checked like one that was emitted."""
    if budget is None and m is None:
        return served
    if served is None:
        raise UsageError("--budget and --m change a config; give one with --config")
    from dustin_runtime.config import changed

    update: dict[str, Any] = {"selection": changed(served.selection, budget, m)}
    if budget is not None:
        update["adaptive_budget"] = None
    return served.model_copy(update=update)


def open_models(
    served: DustinConfig | None,
    pair: str | None,
    target: str | None,
    draft: str | None,
    rope: str | None,
    offline: bool,
) -> tuple[Pair, int]:
    """The pair, and the depth of the config or the recipe."""
    from dustin_runtime.loading import open_configured, open_pair

    depth = 4
    if pair:
        if target or draft:
            raise UsageError("give --pair, or --target and --draft, not both")
        from dustin_runtime.pairs import find_pair

        recipe = find_pair(pair)
        target, draft, depth = recipe.target_id, recipe.draft_id, recipe.depth
    if served:
        return open_configured(served, target, draft, rope=rope, offline=offline), served.depth
    if not (target and draft):
        raise UsageError("which models? give --config, --pair, or both --target and --draft")
    return open_pair(target, draft, rope=rope, offline=offline), depth
