"""Scratch memory of kernels that split their work: partial results, and counters that tell the last one to merge."""

from __future__ import annotations

import torch
from torch import Tensor

_counters: dict[torch.device, Tensor] = {}
_outgrown: list[Tensor] = []
"""Smaller ones that a captured graph may still use."""


def counters(device: torch.device, count: int) -> Tensor:
    """Zeros [>= count] int32, one per group of programs. The last program of a group sets its counter back to zero.

    Shared by all kernels, which run one after another on one stream.
    """
    held = _counters.get(device)
    if held is None or len(held) < count:
        if held is not None:
            _outgrown.append(held)
        size = max(count, 2 * len(held) if held is not None else 4096)
        held = _counters[device] = torch.zeros(size, dtype=torch.int32, device=device)
    return held
