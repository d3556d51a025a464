"""Traces where the search computes: read from disk once if they fit, else again for every phase."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from dustin_profile.traces.windows import Documents, Windows

AHEAD = 8
"""Documents that are read from disk while others are computed on."""
SHARE = 0.5
"""Of a device's free memory that traces may fill: the search needs room of its own."""


class Resident:
    """Documents on a device (implements `windows.Documents`); a GPU keeps those that it has room for.

    Args:
        documents: on the host.
    """

    def __init__(self, documents: Documents, device: torch.device) -> None:
        self.documents = documents
        self.device = device
        self.room = int(SHARE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0
        self._kept: dict[int, Windows] = {}
        self._reading: dict[int, Future[Windows]] = {}
        self._readers = ThreadPoolExecutor(AHEAD // 2)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Windows:
        if (kept := self._kept.get(index)) is not None:
            return kept
        for ahead in range(index, min(index + AHEAD, len(self))):
            if ahead not in self._reading and ahead not in self._kept:
                self._reading[ahead] = self._readers.submit(self.documents.__getitem__, ahead)
        windows = to_device(self._reading.pop(index).result(), self.device)
        size = sum(value.nbytes for value in vars(windows).values() if isinstance(value, torch.Tensor))
        if size <= self.room:
            self.room -= size
            self._kept[index] = windows
        return windows


def resident(documents: Documents, device: torch.device) -> Documents:
    """The documents on a device; as they are on a CPU."""
    return documents if device.type == "cpu" else Resident(documents, device)


def to_device(windows: Windows, device: torch.device) -> Windows:
    """One document's traces on a device."""
    moved: dict[str, Any] = {
        name: value.to(device) for name, value in vars(windows).items() if isinstance(value, torch.Tensor)
    }
    return replace(windows, **moved)
