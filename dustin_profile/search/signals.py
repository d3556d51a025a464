"""What traces have of a step's scores: a document's windows stand for the rows of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dustin_profile.search.curve import lookahead_sum
from dustin_profile.traces.windows import Windows
from dustin_runtime.config import Selection


@dataclass(frozen=True, eq=False)
class TraceSignals:
    """Scores of all windows of a document under one configuration (implements `policies.Signals`)."""

    windows: Windows
    selection: Selection

    @property
    def lengths(self) -> Tensor:
        return self.windows.prefix

    @property
    def memory(self) -> None:
        return None

    def prefix_keys(self) -> Tensor:
        raise NotImplementedError("traces hold no keys")

    def prefix_values(self) -> Tensor:
        raise NotImplementedError("traces hold no values")

    def history(self) -> Tensor:
        return self.windows.history[self.selection.history.layer].float()

    def lookahead(self) -> Tensor:
        return lookahead_sum(self.windows, [entry.layer for entry in self.selection.lookahead])

    def lookahead_rows(self) -> list[Tensor]:
        raise NotImplementedError("traces hold the sum over heads and drafted tokens, not their rows")
