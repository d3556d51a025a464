"""That what is timed computes what it should: nothing is printed otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

from dustin_runtime.attention.sparse import SparseAttention, sparse_reference
from dustin_runtime.bench.full_kernels import Call, FullKernel
from dustin_runtime.bench.synthetic import Synthetic
from dustin_runtime.errors import NothingMeasuredError
from dustin_runtime.selection import select_reference

ATTENTION = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-9}
"""Allowed error of attention by dtype, as the norm of the difference over the norm of the reference."""
SCORES = 1e-4
"""The same of scores: exact products of rounded inputs, summed in fp32."""
SHORT = 200
"""Positions beyond the budget that a short prefix has."""
SCORED_ROWS = 2
"""Rows whose scores are compared: the reference keeps whole rows of attention."""


def relative_error(found: Tensor, want: Tensor) -> float:
    """By norms; NaN where anything is, which is below no limit."""
    return float((found.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def check_full(kernel: FullKernel, data: Synthetic) -> float:
    """Compare with the reference over the first positions of a cache, ragged if the kernel can.

    Returns:
        The error.

    Raises:
        NothingMeasuredError: it is too large.
    """
    short, k, v = _short(data)
    start = torch.full_like(data.start, short)
    if kernel.ragged:
        start = start - torch.arange(len(start), device=start.device) * 37 % (short // 2 + 1)
    found = kernel.restore(kernel.bind(data.q, k, start)(k, v), data.q)
    return _require(f"{kernel.name} against its reference", found, kernel.reference(data.q, k, v, start), data.q.dtype)


def check_against(ours: Tensor, kernel: FullKernel, call: Call, data: Synthetic) -> float:
    """Compare with our result of the whole workload; a kernel without a causal mask by the last token alone.

    Returns:
        The error.

    Raises:
        NothingMeasuredError: it is too large.
    """
    other = kernel.restore(call(data.cache.keys[0], data.cache.values[0]), data.q)
    comparable = slice(None) if kernel.causal else slice(-1, None)
    return _require(f"full attention against {kernel.name}", ours[:, comparable], other[:, comparable], data.q.dtype)


def check_sparse(data: Synthetic) -> float:
    """Compare sparse attention with its reference, over the first positions of a cache.

    Returns:
        The error.

    Raises:
        NothingMeasuredError: it is too large.
    """
    short, k, v = _short(data)
    start = torch.full_like(data.start, short)
    kept = data.kept(start).clone()  # see `SparseAttention`: it may be read before its writer has ended
    found = SparseAttention(kept)(0, data.q, k, v, start)
    want = sparse_reference(data.q.double(), k.double(), v.double(), start, kept[0])
    return _require("sparse attention against its reference", found, want, data.q.dtype)


def check_estimation(data: Synthetic) -> float:
    """Compare scores with their reference, and the chosen lists with the reference's, token by token.

    Returns:
        The larger error of the two scores.

    Raises:
        NothingMeasuredError: an error is too large, or a list differs.
    """
    rows = slice(SCORED_ROWS)
    context = data.workload.context
    history, lookahead = data.history_scores(0), data.lookahead_scores(0)
    worst = 0.0
    for name, found, heads, q, keys, at in (
        ("history", history, data.history[0], data.history_q, data.cache.keys, data.history_at),
        ("lookahead", lookahead, data.lookahead[0], data.lookahead_q, data.draft_keys, data.lookahead_at),
    ):
        extent = context + q.shape[1]
        want = heads.reference(q[rows], keys[:, rows, :extent], at[rows])[:, :context]
        worst = max(worst, _require(f"{name} scores against their reference", found[rows], want, None))
    one, kept = data.selection, data.choose(lookahead, history, data.start)
    want = select_reference(
        lookahead, history, data.start, budget=one.budget, m=one.m, sink=one.sink, window=one.window
    )
    if not torch.equal(kept, want):
        raise NothingMeasuredError("selection: keeps other tokens than its reference; no times are printed")
    return worst


def _short(data: Synthetic) -> tuple[int, Tensor, Tensor]:
    """Tokens of a short prefix, and keys and values that hold it and the new ones."""
    short = min(data.workload.context, data.sizes.budget + SHORT)
    extent = short + data.sizes.depth + 1
    return short, data.cache.keys[0][:, :extent], data.cache.values[0][:, :extent]


def _require(what: str, found: Tensor, want: Tensor, dtype: torch.dtype | None) -> float:
    error, allowed = relative_error(found, want), ATTENTION[dtype] if dtype else SCORES
    if not error < allowed:
        raise NothingMeasuredError(f"{what}: error {error:.1e}, allowed {allowed:.0e}; no times are printed")
    return error
