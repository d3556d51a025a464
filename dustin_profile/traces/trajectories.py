"""The texts that models are forced through: given answers, or the target's own greedy continuations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dustin_runtime.greedy import GreedyDecoder
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.prefill import chunk_for, prefill


class Trajectories:
    """What is forced behind prompts: a given answer, or the target's own greedy continuation.

    Args:
        rows: prompts that are continued together.
        count: tokens of a continuation at most.

    Attributes:
        cache: [rows], with the prompts in it.
    """

    def __init__(
        self, target: Decoder, rows: int, capacity: int, count: int, stop_ids: frozenset[int], vocab: int
    ) -> None:
        self.target = target
        self.count = count
        self.stop_ids = stop_ids
        self.cache = target.cache(rows, capacity)
        self._decoder = GreedyDecoder(target, self.cache, vocab, count)

    @torch.inference_mode()
    def __call__(self, group: Sequence[tuple[Sequence[int], Sequence[int] | None]]) -> list[list[int]]:
        """The continuations of as many prompts as there are rows, or fewer; each with the answer that is given."""
        chunk = chunk_for(self.target.device)
        last = [prefill(self.target, self.cache.row(row), prompt, chunk=chunk) for row, (prompt, _) in enumerate(group)]
        if all(answer is not None for _, answer in group):
            own: list[list[int]] = [[] for _ in group]
        else:
            own = self._decoder(
                torch.stack(last), [len(prompt) for prompt, _ in group], lambda tokens: tokens[-1] in self.stop_ids
            )
        return [
            found if answer is None else list(answer)[: self.count]
            for found, (_, answer) in zip(own, group, strict=True)
        ]
