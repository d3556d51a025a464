"""Counting what would make a GPU wait for the host, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    torch.ops.aten.item.default,  # what the next one is seen as in inference mode
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.lift_fresh.default,
}


class HostReads(TorchDispatchMode):
    """Within it, `count` is the number of single values read (`float(x)`, `x.item()`) and of tensors made from Python
    numbers (`torch.tensor`)."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in READS
        return func(*args, **(kwargs or {}))
