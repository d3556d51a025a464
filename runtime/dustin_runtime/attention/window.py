"""Causal attention of a few new tokens over the first and the last tokens before them (arXiv 2309.17453)."""

from __future__ import annotations

import torch
from torch import Tensor

from dustin_runtime.attention.sparse import sparse_reference
from dustin_runtime.cache import WHOLE, Ring
from dustin_runtime.kernels import usable
from dustin_runtime.scaled import Held


class WindowAttention:
    """A cheap draft's attention; implements `models.decoder.Attention`.

    Args:
        budget: tokens of the prefix that are read, at most: the first `sink` and the last `budget - sink`.
        ring: in which slots of the cache positions lie.
            On a GPU the kernel may read `start` while its predecessor still runs, so an ordinary operation has to lie
            between what writes it and the first use; in a decoder that is the embedding.
    """

    def __init__(self, budget: int, sink: int, ring: Ring = WHOLE) -> None:
        self.budget = budget
        self.sink = min(sink, budget - 1)
        self.ring = ring

    def __call__(self, layer: int, q: Tensor, k: Held, v: Held, start: Tensor) -> Tensor:
        if usable(q, heads_of=q.shape[3]):
            from dustin_runtime.kernels.sparse import window_attention

            return window_attention(q, k, v, start, self.budget, self.sink, ring=self.ring)
        return window_reference(q, k, v, start, self.budget, self.sink, self.ring)


def window_reference(q: Tensor, k: Held, v: Held, start: Tensor, budget: int, sink: int, ring: Ring = WHOLE) -> Tensor:
    """The plain reference: sparse attention over a list. Shapes as in `models.decoder.Attention`."""
    return sparse_reference(q, k, v, start, first_and_last(start, budget, sink)[:, None], ring)


def first_and_last(lengths: Tensor, budget: int, sink: int) -> Tensor:
    """The first `sink` and the last `budget - sink` positions of prefixes: [batch, budget] int64, -1 padded.

    Args:
        lengths: [batch] int64.
    """
    sink = min(sink, budget - 1)
    slots = torch.arange(budget, device=lengths.device)
    ends = lengths.unsqueeze(1)
    recent = torch.where(slots < sink, slots, ends - budget + slots)
    everything = torch.where(slots < ends, slots, -1)
    return torch.where(ends <= budget, everything, recent)
