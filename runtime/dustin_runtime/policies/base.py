"""What a method of verification is: whether it drafts, and which prefix tokens the target reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from dustin_runtime.config import Selection


class Signals(Protocol):
    """Scores of one step, computed when asked for: a policy pays only for what it uses."""

    @property
    def lengths(self) -> Tensor:
        """[batch] int64 prefix length of every sequence."""
        ...

    def history(self) -> Tensor:
        """[batch, positions] fp32 attention of the target's heads at the last processed token."""
        ...

    def lookahead(self) -> Tensor:
        """[batch, positions] fp32 attention of the draft's heads, summed over the drafted tokens."""
        ...


@dataclass(frozen=True)
class Policy(ABC):
    """A method; `selection` is the emitted configuration's, or None for methods that read everything."""

    selection: Selection | None
    name: ClassVar[str]
    drafts: ClassVar[bool] = True
    needs_selection: ClassVar[bool] = False
    windowed_draft: ClassVar[bool] = False
    """Whether the draft reads only the first and last tokens of its cache, whatever a configuration says."""

    @abstractmethod
    def select(self, signals: Signals) -> Tensor | None:
        """Choose what verification reads.

        Returns:
            [layers or 1, batch, kv_heads or 1, k] int64 ascending prefix positions padded with -1, or None for all.
        """

    @property
    def uses_history(self) -> bool:
        """Whether `select` asks for history scores."""
        return False

    @property
    def uses_lookahead(self) -> bool:
        """Whether `select` asks for lookahead scores."""
        return False
