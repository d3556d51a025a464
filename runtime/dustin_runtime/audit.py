"""How far what is served lies from full verification, measured on a few steps while serving."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

SHARE = 0.02
"""Of steps, unless another is asked for."""
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
"""97.5th percentiles of Student's t with 1, 2, ... degrees of freedom."""
_RESAMPLES = 2_000


@dataclass(frozen=True)
class Audits:
    """Which steps are audited: a random `share` of launches, the same for a `seed`."""

    share: float = SHARE
    seed: int = 0


class Audit(NamedTuple):
    """One row of one audited step."""

    prompt: int
    kl: float
    """Summed over its tokens, in nats."""
    tokens: int
    """That it emitted."""


class Divergence(NamedTuple):
    """KL of full from served verification, mean over emitted tokens, with its 95 % interval."""

    mean: float
    low: float | None
    """None if there is one unit alone."""
    high: float | None
    audits: int
    tokens: int
    unit: Literal["prompt", "step"]
    """What is resampled: prompts, or the steps of a single one."""


def divergence(full: Tensor, served: Tensor, count: Tensor) -> Tensor:
    """KL(full || served), summed over the tokens that a step emits: [rows] fp64, in nats.

    Args:
        full, served: [rows, tokens, vocabulary] logits; count: [rows], tokens that are emitted.
    """
    total = torch.zeros(len(full), dtype=torch.float64, device=full.device)
    for token in range(full.shape[1]):  # one at a time: a vocabulary in fp32 is large
        want, have = (x[:, token].float().log_softmax(-1) for x in (full, served))
        kl = (want.exp() * (want - have)).sum(-1, dtype=torch.float64).clamp(min=0)
        total += torch.where(count > token, kl, 0)
    return total


def summary(audits: Sequence[Audit]) -> Divergence | None:
    """The mean over all audited tokens; None without any.

    Its interval is that of a ratio of two sums over units: a bootstrap over 16 units or more, Student's t below.
    """
    tokens = sum(audit.tokens for audit in audits)
    if not tokens:
        return None
    prompts: dict[int, list[float]] = {}
    for audit in audits:
        of_prompt = prompts.setdefault(audit.prompt, [0.0, 0.0])
        of_prompt[0] += audit.kl
        of_prompt[1] += audit.tokens
    by_prompt = len(prompts) > 1
    units = list(prompts.values()) if by_prompt else [[audit.kl, float(audit.tokens)] for audit in audits]
    low, high = _interval(torch.tensor(units, dtype=torch.float64))
    mean = sum(audit.kl for audit in audits) / tokens
    return Divergence(mean, low, high, len(audits), tokens, "prompt" if by_prompt else "step")


def _interval(units: Tensor) -> tuple[float | None, float | None]:
    """Of the ratio of sums over [units, 2]."""
    count = len(units)
    if count < 2:
        return None, None
    sums, weights = units.unbind(1)
    mean = float(sums.sum() / weights.sum())
    if count <= len(_T) + 1:
        # Each unit's part in the deviation from the mean.
        parts = (sums - mean * weights) * count / weights.sum()
        reach = _T[count - 2] * float(parts.std()) / math.sqrt(count)
        return max(mean - reach, 0.0), mean + reach
    drawn = torch.randint(count, (_RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    low, high = (sums[drawn].sum(1) / weights[drawn].sum(1)).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return low, high
