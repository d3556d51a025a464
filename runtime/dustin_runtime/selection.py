"""Which tokens of the prefix verification reads (arXiv 2606.24957, Eq. 6): the one rule of search and serving.

Equal scores are ordered by position, the smaller first. Kernels differ in what they do with ties, so score and
position are packed into one integer key that has none: CPU and GPU then keep exactly the same tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dustin_runtime.budget import check_budget
from dustin_runtime.kernels import usable

_LOW_31_BITS = 0x7FFFFFFF


def eligible_positions(lengths: Tensor, columns: int, *, sink: int, window: int) -> Tensor:
    """Mask [B, columns] of the prefix tokens that have to compete: neither sink, nor window, nor beyond the prefix.

    Args:
        lengths: [B] int64, tokens in each prefix.
    """
    position = torch.arange(columns, device=lengths.device)
    return (position >= sink) & (position < (lengths - window).unsqueeze(-1))


def ranked(scores: Tensor, eligible: Tensor, count: int) -> Tensor:
    """The `count` best eligible positions in order of decreasing score, ties by position.

    Args:
        scores: [..., N] fp32, not negative.
        eligible: bool, broadcast to the shape of `scores`.

    Returns:
        [..., count] int64; -1 fills the end of a row that has fewer.
    """
    keys, _ = _keys(scores, eligible).topk(min(count, scores.shape[-1]))
    return torch.nn.functional.pad(_positions(keys), (0, count - keys.shape[-1]), value=-1)


def ascending(positions: Tensor) -> Tensor:
    """Int64 positions with their last axis sorted, -1 at its end."""
    absent = torch.iinfo(torch.int64).max  # sorts behind every position
    ordered = positions.masked_fill(positions < 0, absent).sort(-1).values
    return ordered.masked_fill(ordered == absent, -1)


def select(
    lookahead: Tensor | None,
    history: Tensor | None,
    lengths: Tensor,
    *,
    budget: int,
    m: int,
    sink: int,
    window: int,
) -> Tensor:
    """Choose the kept tokens of every sequence: sink, window, the `m` best of the draft, the rest of the target.

    Shapes depend on the arguments' shapes alone and nothing waits for the device, so a CUDA graph can hold the call.

    Args:
        lookahead: [B, N] fp32, not negative: the draft's scores (Eq. 5). None if `m` is 0.
        history: [B, N] fp32, not negative: the target's scores (Eq. 5). None if the draft chooses all.
        lengths: [B] int64, tokens in each prefix, N at most. Columns beyond are ignored.

    Returns:
        [B, budget] int64, ascending positions; -1 fills the end of a row whose prefix is shorter than the budget
        (then every token is kept).

    Raises:
        ConfigError: the split is invalid (see `check_budget`).
        ValueError: a list that has a share of the budget is None.
    """
    check_budget(budget, m, sink, window)
    rest = budget - sink - window - m
    if (m and lookahead is None) or (rest and history is None):
        raise ValueError(f"scores missing: lookahead chooses {m} tokens and history {rest}")
    scores = lookahead if m else history
    assert scores is not None
    if usable(scores):
        from dustin_runtime.kernels import selection as kernels

        if kernels.fits(scores.shape[1], budget, sink, window):
            return kernels.select(lookahead, history, lengths, budget=budget, m=m, sink=sink, window=window)
    return select_reference(lookahead, history, lengths, budget=budget, m=m, sink=sink, window=window)


def select_reference(
    lookahead: Tensor | None,
    history: Tensor | None,
    lengths: Tensor,
    *,
    budget: int,
    m: int,
    sink: int,
    window: int,
) -> Tensor:
    """`select` in plain torch, on any device."""
    rest = budget - sink - window - m
    first = torch.arange(sink, device=lengths.device)
    ends = lengths.unsqueeze(-1)
    last = ends + torch.arange(-window, 0, device=lengths.device)
    kept = [first.expand(len(lengths), -1).masked_fill(first >= ends, -1), last.masked_fill(last < sink, -1)]

    shares = [(scores, count) for scores, count in ((lookahead, m), (history, rest)) if scores is not None and count]
    eligible = eligible_positions(lengths, shares[0][0].shape[-1], sink=sink, window=window)
    chosen: Tensor | None = None
    for scores, count in shares:
        keys = _keys(scores, eligible)
        if chosen is not None:
            keys = keys.scatter(-1, chosen, -1)
        best, chosen = keys.topk(min(count, keys.shape[-1]), sorted=False)
        kept.append(_positions(best))

    positions = ascending(torch.cat(kept, -1))
    return torch.nn.functional.pad(positions, (0, budget - positions.shape[-1]), value=-1)


def _keys(scores: Tensor, eligible: Tensor) -> Tensor:
    """Distinct int64 keys whose order is (score, then smaller position first); -1 where not eligible."""
    if scores.dtype != torch.float32:
        raise TypeError(f"scores must be float32, not {scores.dtype}")
    # The bits of non-negative floats order as the floats do; without the sign bit, -0.0 equals 0.0.
    bits = (scores.contiguous().view(torch.int32) & _LOW_31_BITS).long()
    inverted = torch.arange(_LOW_31_BITS, _LOW_31_BITS - scores.shape[-1], -1, device=scores.device)
    return ((bits << 31) | inverted).masked_fill(~eligible, -1)


def _positions(keys: Tensor) -> Tensor:
    """The positions that `_keys` packed; -1 stays -1."""
    return (_LOW_31_BITS - (keys & _LOW_31_BITS)).masked_fill(keys < 0, -1)
