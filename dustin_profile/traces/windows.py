"""One document's traces: per verification window, what the target attended to and what the cheap signals said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Windows:
    """W verification windows of one document, each over a prefix of at most N tokens.

    Recovered mass is linear in the attention row (arXiv 2606.24957, Eq. 2), so one averaged row per window and one
    row per layer hold all that a search needs. Columns at or beyond a window's prefix are zero.
    """

    document: str
    """Id of the document: the unit of splitting and of resampling."""
    prefix: Tensor
    """[W] int64: tokens before the pending token, which itself is at this position."""
    truth: Tensor
    """[W, N] fp32: target attention on the prefix, mean over the evaluation heads and the window's queries."""
    tail: Tensor
    """[W] fp32: the same attention's mass at and beyond the prefix. `truth.sum(1) + tail` is 1 up to rounding."""
    history: Tensor
    """[target layers, W, N] fp16: attention of the last processed position, summed over the layer's SRHs."""
    lookahead: Tensor
    """[draft layers, W, N] fp16: attention of the draft's queries, summed over queries and the layer's SRHs."""
    text: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """[C] int64: the continuation over which the windows lie."""
    agrees: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """[C] bool: whether the draft, having read all before a token of the continuation, would propose that token."""


class Documents(Protocol):
    """Traces read one document at a time; a list of `Windows` is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Windows: ...
