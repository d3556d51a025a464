"""Scratch memory of kernels that split their work: counters that tell the last program to merge."""

from __future__ import annotations

import torch
from torch import Tensor

_counters: dict[tuple[torch.device, str], Tensor] = {}
_outgrown: list[Tensor] = []
"""Smaller ones that a captured graph may still use."""


def counters(device: torch.device, count: int, of: str = "step") -> Tensor:
    """Zeros [>= count] int32, one per group of programs. The last program of a group sets its counter back to zero.

    Kernels that run one after another share them. `of` names those that may run beside others.
    """
    held = _counters.get((device, of))
    if held is None or len(held) < count:
        if held is not None:
            _outgrown.append(held)
        size = max(count, 2 * len(held) if held is not None else 4096)
        held = _counters[device, of] = torch.zeros(size, dtype=torch.int32, device=device)
    return held
