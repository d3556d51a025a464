"""Choosing between speed and recovery: what is dominated, and which candidate a rule takes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dustin_profile.choices import Rule
from dustin_runtime.errors import UsageError

_DECIMALS = 12
"""ARRs that differ less differ by the order of summation only."""


def front(speed: Sequence[float], arr: Sequence[float]) -> list[int]:
    """Indices of candidates that no other one equals or beats in both and beats in one, the fastest first.

    Of equal ones the first is kept.
    """
    order = sorted(range(len(speed)), key=lambda index: (-speed[index], -round(arr[index], _DECIMALS), index))
    kept: list[int] = []
    best = -1.0
    for index in order:
        if round(arr[index], _DECIMALS) > best:
            best = round(arr[index], _DECIMALS)
            kept.append(index)
    return kept


def choose(rule: Rule, least_arr: float, speed: Sequence[float], per_document: Tensor) -> int:
    """The fastest candidate that the rule lets through; of equally fast ones that of the highest ARR, then the first.

    Args:
        per_document: [candidates, documents] fp64 ARR of the documents to choose on.

    Raises:
        UsageError: none reaches `least_arr`; says what is reachable.
    """
    mean = per_document.mean(1)
    rounded = [round(value, _DECIMALS) for value in mean.tolist()]
    best = rounded.index(max(rounded))
    if rule == "least-arr":
        allowed = [index for index, value in enumerate(rounded) if value >= least_arr]
        if not allowed:
            raise UsageError(
                f"--least-arr {least_arr:g}: the best candidate has {rounded[best]:.4f} on the search documents;"
                " ask for less, or give larger --budgets"
            )
    else:
        behind = per_document[best] - per_document
        documents = per_document.shape[1]
        error = behind.std(1) / documents**0.5 if documents > 1 else 0 * mean
        allowed = [
            i
            for i, (gap, se) in enumerate(zip(behind.mean(1).tolist(), error.tolist(), strict=True))
            if round(gap, _DECIMALS) <= round(se, _DECIMALS)
        ]
    return min(allowed, key=lambda index: (-speed[index], -rounded[index], index))
