"""Methods whose verification reads the whole cache: they define the text that the others are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dustin_runtime.policies.base import Policy, Signals


@dataclass(frozen=True)
class Vanilla(Policy):
    """One token per step, no draft."""

    name: ClassVar[str] = "vanilla"
    over_ranks: ClassVar[bool] = True
    drafts: ClassVar[bool] = False

    def select(self, signals: Signals) -> None:
        return None


@dataclass(frozen=True)
class SpeculativeDecoding(Policy):
    """Classic speculative decoding: draft, then verify with the full cache (arXiv 2211.17192)."""

    name: ClassVar[str] = "sd"
    over_ranks: ClassVar[bool] = True

    def select(self, signals: Signals) -> None:
        return None


@dataclass(frozen=True)
class MagicDec(SpeculativeDecoding):
    """A draft that reads only its first and last tokens, verified with the full cache (arXiv 2408.11049)."""

    name: ClassVar[str] = "magicdec"
    partial_draft: ClassVar[bool] = True
