"""What one step must move through memory at least, and how long that takes: a floor from the models' shapes alone.

Counted are weights, keys and values that are read, and logits, which are written and read. Activations and the keys
of new tokens are not: they are a thousandth of these. Neither is anything that an implementation adds, such as the
logits that our scoring kernels keep between their two launches.

Of a target that is split over ranks it is the floor of one of them: its own heads, its part of the MLP and its rows of
the head. What ranks tell each other is priced in `links`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dustin_runtime.config import LayerHeads, Selection
from dustin_runtime.method_names import METHODS, PARTIAL_DRAFT, QUEST, SPARSE
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.parallel.shards import Share
from dustin_runtime.policies import POLICIES, Policy
from dustin_runtime.policies.dustin_rest import DustinRest, rest_of
from dustin_runtime.policies.quest import DENSE_LAYERS, PAGE
from dustin_runtime.policies.specattn import DENSE
from dustin_runtime.pricing import DEVICES, Device, body_weights


class Cost(NamedTuple):
    """Work of one component in one step."""

    bytes: int
    flops: float

    def milliseconds(self, device: Device = DEVICES["h200"]) -> float:
        """The longer of reading memory and computing; the two overlap."""
        return 1e3 * max(self.bytes / device.bytes_per_s, self.flops / device.flops_per_s)


NOTHING = Cost(0, 0.0)


class Part(NamedTuple):
    """What one rank computes of a model; of one process, all."""

    shape: ModelShape
    head_rows: int
    shares: tuple[Share, ...] = ()
    """Of all ranks; none for a model that is whole."""

    @classmethod
    def of(cls, whole: ModelShape, world: int) -> Part:
        """Raises UsageError as `Share.of`."""
        if world == 1:
            return cls(whole, whole.vocab)
        shares = tuple(Share.of(whole, rank, world) for rank in range(world))
        return cls(shares[0].shape, shares[0].vocab_rows, shares)

    def asked(self, heads: Sequence[LayerHeads]) -> list[tuple[LayerHeads, ...]]:
        """Of the model's heads, those that each rank scores."""
        return [share.held(heads) for share in self.shares] or [tuple(heads)]


class StepCosts(NamedTuple):
    """Work of one step by component."""

    target_linears: Cost
    """All weights of the layers, the head, and the rows of the embedding that are looked up."""
    verify_attention: Cost
    draft_linears: Cost
    """Of all passes together."""
    draft_attention: Cost
    scores: Cost
    """Keys of the KV heads that are asked for history and lookahead scores."""
    logits: Cost
    """Of target and draft."""

    @property
    def total_bytes(self) -> int:
        return sum(cost.bytes for cost in self)

    def milliseconds(self, device: Device = DEVICES["h200"]) -> float:
        """Components run one after the other."""
        return sum(cost.milliseconds(device) for cost in self)

    def as_dict(self, device: Device = DEVICES["h200"]) -> dict[str, dict[str, float]]:
        """For a report: bytes and milliseconds by component, and of the whole step."""
        parts: dict[str, dict[str, float]] = {
            name: {"bytes": cost.bytes, "ms": cost.milliseconds(device)} for name, cost in self._asdict().items()
        }
        return parts | {"step": {"bytes": self.total_bytes, "ms": self.milliseconds(device)}}


def step_costs(
    method: str,
    target: ModelShape,
    draft: ModelShape | None,
    lengths: Sequence[int],
    *,
    depth: int,
    selection: Selection | None = None,
    draft_budget: int | None = None,
    element_bytes: int = 2,
    world: int = 1,
    draft_split: bool = False,
    kv_bytes: int | None = None,
    policy: Policy | None = None,
    read: float | None = None,
) -> StepCosts:
    """The floor of one step, on one rank of `world`.

    Args:
        method: its name. `magicdec` and `triforce` draft over `draft_budget` tokens; of the sparse ones those score
            that use history or lookahead.
        draft: None for vanilla.
        lengths: tokens in every row's cache before the step (its prefix).
        depth: draft tokens per step; vanilla has none.
        selection: budget, and the heads that are asked; for the sparse methods.
        draft_budget: tokens of sink and window that the draft attends to, new ones aside; None: its whole cache.
        element_bytes: of a weight, a KV element and a logit: 2 for bf16, 4 for fp32.
        world: ranks that share the target. The draft is whole on each, for a share of the rows, unless `draft_split`.
        kv_bytes: of an element of the target's cache, if not `element_bytes`.
        policy: the method as it serves, where a rule asks for more scores; by default as its name says.
        read: prefix tokens that a row was seen to read, where a rule decides that; by default the method's budget.

    Raises:
        UsageError: so many ranks cannot share the model evenly.
        ValueError: the method is unknown, or lacks its draft, selection or draft budget.
    """
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown (known: {', '.join(METHODS)})")
    if method in SPARSE and selection is None:
        raise ValueError(f"{method} needs a selection")
    if method in PARTIAL_DRAFT and draft_budget is None:
        raise ValueError(f"{method} needs a draft budget")
    kv_bytes = kv_bytes or element_bytes
    rows = len(lengths)
    if method == "vanilla":
        draft, depth = None, 0
    elif draft is None:
        raise ValueError(f"{method} needs a draft")

    tokens = depth + 1
    part = Part.of(target, world)
    kept = [min(n, selection.budget) for n in lengths] if method in SPARSE and selection else lengths
    if method in (*QUEST, "specattn"):  # the first layers read everything
        dense = (DENSE_LAYERS if method in QUEST else DENSE) / target.layers
        # Quest reads two bounds per page, as much as a token, and keeps them in the model's dtype.
        bounds = element_bytes / kv_bytes / PAGE if method in QUEST else 0.0
        kept = [round(dense * n + (1 - dense) * (k + n * bounds)) for n, k in zip(lengths, kept, strict=True)]
    if read is not None:
        kept = [round(min(n, read)) for n in lengths]
    target_linears = linears_cost(part, rows * tokens, rows * tokens, element_bytes)
    verify = attention_cost(part.shape, [n + tokens for n in kept], tokens, kv_bytes)
    logits = logits_bytes(part, rows * tokens, element_bytes)
    if draft is None:
        return StepCosts(target_linears, verify, NOTHING, NOTHING, NOTHING, Cost(logits, 0.0))

    drafting = Part.of(draft, world if draft_split else 1)
    each = rows if draft_split else -(-rows // world)
    drafted = max((lengths[first : first + each] for first in range(0, rows, each)), key=sum)  # by the slowest rank
    draft_linears, draft_attention = NOTHING, NOTHING
    policy = policy or POLICIES[method](selection)
    for turn in range(policy.passes(depth)):
        fed = 2 if turn == 0 else 1  # the first pass takes the last processed token too
        before = [n + turn + 1 - fed for n in drafted]
        if draft_budget is not None:
            before = [min(n, draft_budget) for n in before]
        linears = linears_cost(drafting, len(drafted) * fed, len(drafted), element_bytes)
        attention = attention_cost(drafting.shape, [n + fed for n in before], fed, element_bytes)
        if turn < depth:
            logits += logits_bytes(drafting, len(drafted), element_bytes)
        else:  # a pass for the scores alone: no head, and of the last layer that is scored the queries and keys
            shape, last = drafting.shape, max(entry.layer for entry in policy.lookahead_heads(draft))
            below = 1.0 if draft_split else last / draft.layers
            width = 0 if draft_split else (shape.query_heads + shape.kv_heads) * shape.head_size
            weights = round(body_weights(shape) * below) + shape.hidden * width
            linears = Cost(weights * element_bytes, 2.0 * weights * len(drafted))
            attention = Cost(round(attention.bytes * below), attention.flops * below)
        draft_linears, draft_attention = sum_costs(draft_linears, linears), sum_costs(draft_attention, attention)
    scores = NOTHING
    if selection is not None and (policy.uses_history or policy.uses_lookahead):
        past = part.asked([selection.history] if policy.uses_history else [])
        ahead = drafting.asked(policy.lookahead_heads(draft) if policy.uses_lookahead else ())
        by_rank = [
            sum_costs(
                *(history_cost(part.shape, entry, lengths, kv_bytes) for entry in past[rank % len(past)]),
                lookahead_cost(drafting.shape, ahead[rank % len(ahead)], drafted, policy.passes(depth), element_bytes),
            )
            for rank in range(world)
        ]
        scores = max(by_rank, key=lambda cost: cost.bytes)  # a step waits for the rank that has the most
        if isinstance(policy, DustinRest):
            rest = rest_of(selection)
            part_of_layers = 1 / rest.period  # of all; keys and values are read as by attention
            every = attention_cost(part.shape, lengths, rest.queries, kv_bytes)
            scores = sum_costs(scores, Cost(round(every.bytes * part_of_layers), every.flops * part_of_layers))
    return StepCosts(target_linears, verify, draft_linears, draft_attention, scores, Cost(logits, 0.0))


def linears_cost(part: Part, tokens: int, predicted: int, element_bytes: int) -> Cost:
    """One forward pass of `tokens` tokens in all rows, `predicted` of which go through the head."""
    shape = part.shape
    head = part.head_rows * shape.hidden
    looked_up = 0 if shape.tied else min(tokens, shape.vocab) * shape.hidden  # a tied head reads those rows anyway
    body = body_weights(shape)
    return Cost((body + head + looked_up) * element_bytes, 2.0 * (body * tokens + head * predicted))


def attention_cost(shape: ModelShape, read: Sequence[int], queries: int, element_bytes: int) -> Cost:
    """Attention of `queries` new tokens a row in all layers, where row i reads `read[i]` tokens, new ones included."""
    positions = sum(read)
    return Cost(
        shape.kv_bytes(positions, element_bytes),
        4.0 * shape.layers * shape.query_heads * shape.head_size * queries * positions,
    )


def history_cost(shape: ModelShape, asked: LayerHeads, lengths: Sequence[int], element_bytes: int) -> Cost:
    """Scores of the last processed token's query, over each row's prefix."""
    return _scores_cost(shape, (asked,), lengths, 1, element_bytes)


def lookahead_cost(
    shape: ModelShape, asked: Sequence[LayerHeads], lengths: Sequence[int], passes: int, element_bytes: int
) -> Cost:
    """Scores of the queries of `passes` of the draft, the last of which stands `passes - 1` behind the prefix."""
    return _scores_cost(shape, asked, [n + passes for n in lengths], passes, element_bytes)


def logits_bytes(part: Part, tokens: int, element_bytes: int) -> int:
    """Logits of `tokens` tokens, written by the head and read by the choice of tokens."""
    return 2 * tokens * part.head_rows * element_bytes


def _scores_cost(
    shape: ModelShape, asked: Sequence[LayerHeads], seen: Sequence[int], queries: int, element_bytes: int
) -> Cost:
    """Keys of a KV head are read once, whatever the heads and queries that ask it."""
    kv_heads = sum(len({head // shape.group for head in entry.heads}) for entry in asked)
    heads = sum(len(entry.heads) for entry in asked)
    positions = sum(seen)
    return Cost(
        kv_heads * shape.head_size * positions * element_bytes, 2.0 * heads * queries * shape.head_size * positions
    )


def sum_costs(*costs: Cost) -> Cost:
    """Of work that is done one after the other."""
    return Cost(sum(cost.bytes for cost in costs), sum(cost.flops for cost in costs))
