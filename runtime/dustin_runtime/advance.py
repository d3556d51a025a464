"""The end of a step: drafts accepted, state rolled forward."""

from __future__ import annotations

import torch
from torch import Tensor

from dustin_runtime import acceptance
from dustin_runtime.kernels import usable
from dustin_runtime.state import State


def advance(
    state: State,
    ids: Tensor,
    tokens: Tensor,
    accepted: Tensor | None,
    finite: Tensor,
    read: Tensor,
    queries: Tensor | None,
    heads: Tensor | None,
) -> Tensor:
    """`advance_reference`, or the kernel beside it."""
    decided = (ids, tokens, accepted, state.forced, finite, read, queries, heads)
    fields = (state.active, state.lengths, state.recent, state.history_query)
    if usable(read):
        from dustin_runtime.kernels.advance import advance as kernel

        return kernel(*decided, *fields)
    return advance_reference(*decided, *fields)


def advance_reference(
    ids: Tensor,
    tokens: Tensor,
    accepted: Tensor | None,
    forced: Tensor | None,
    finite: Tensor,
    read: Tensor,
    queries: Tensor | None,
    heads: Tensor | None,
    active: Tensor,
    lengths: Tensor,
    recent: Tensor,
    history_query: Tensor | None,
) -> Tensor:
    """Accept drafts, and roll the state of active rows forward in place. Rejected drafts are left behind by length.

    Args:
        ids: [rows, depth + 1] int64, the pending token and the drafts.
        tokens: [rows, depth + 1] int64, the target's own token at each position; what is emitted, if `accepted` says
            how many drafts [rows] int64 that takes. Without it drafts are accepted as `forced` says, or greedily.
        forced: [rows, capacity] bool, see `State`, or None.
        finite: [rows, depth + 1] bool; read: [rows] fp32.
        queries: [rows, depth + 1, query_heads, head_size] of the history layer at the tokens of `ids`, and `heads`
            [entries] int64, which of them are kept; or None.
        active, lengths, recent, history_query: as of `State`.

    Returns:
        `StepResult.packed`.
    """
    drafts = ids[:, 1:]
    if accepted is None and forced is not None:
        positions = lengths.unsqueeze(1) + torch.arange(1, ids.shape[1], device=ids.device)
        tokens, accepted = acceptance.accept_forced(drafts, tokens, forced.gather(1, positions))
    elif accepted is None:
        tokens, accepted = acceptance.accept_greedy(tokens, drafts)
    count = torch.where(active, accepted + 1, 0)
    columns = (count, read, finite.all(dim=1))
    packed = torch.cat((tokens.double(), *(x.double().unsqueeze(1) for x in columns)), dim=1)
    pick = accepted.unsqueeze(1)
    last = torch.cat((ids.gather(1, pick), tokens.gather(1, pick)), dim=1)
    recent.copy_(torch.where(active.unsqueeze(1), last, recent))
    if queries is not None and heads is not None and history_query is not None:
        kept = queries.index_select(2, heads)
        query = kept.gather(1, accepted[:, None, None, None].expand_as(kept[:, :1]))
        history_query.copy_(torch.where(active[:, None, None, None], query, history_query))
    lengths.add_(count)
    return packed
