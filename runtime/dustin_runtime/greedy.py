"""Greedy continuations with the full cache, of all rows of a cache at once: what profiling takes as given text.

Serving has `engine.Engine`, whose vanilla method does the same with admission, sampling and statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.cache import KVCache
from dustin_runtime.graph import WARM_UPS, Graph, capturable
from dustin_runtime.models.decoder import Decoder

Stop = Callable[[list[int]], bool]
"""Whether a continuation is complete."""
LOOK_EVERY = 8
"""Tokens between two looks at what a graph has written: each look waits for the device."""


class GreedyDecoder:
    """Continues every row of a cache; on a GPU one captured graph per token.

    A row's tokens do not depend on what the other rows hold, only on how many there are.

    Args:
        cache: of `model`. A capture writes to its first positions, so prompts are prefilled after this.
        vocab: only ids below it are proposed.
        most: tokens of a continuation at most.
    """

    def __init__(self, model: Decoder, cache: KVCache, vocab: int, most: int) -> None:
        rows, device = cache.keys.shape[1], model.device
        self.model = model
        self.cache = cache
        self.vocab = vocab
        self.most = most
        self._pending = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(rows, max(most, WARM_UPS), dtype=torch.int64, device=device)
        graph = most > 1 and capturable(model)
        self._captured = Graph(lambda: self._step(cache.capacity), device, reads=model.rope) if graph else None

    def _step(self, extent: int) -> Tensor:
        """One more token of every row."""
        hidden = self.model.forward(self._pending, self._positions, self.cache, dense_attention, extent)
        best, _ = self.model.argmax_finite(self.model.own_logits(hidden), self.vocab)
        self._tokens.index_copy_(1, self._turn, best)
        self._pending.copy_(best)
        self._positions += 1
        self._turn += 1
        return best

    @torch.inference_mode()
    def __call__(self, hidden: Tensor, lengths: Sequence[int], stop: Stop) -> list[list[int]]:
        """Continue the first rows of the cache.

        Args:
            hidden: [rows, hidden] of each prompt's last token; fewer rows than the cache has leave the others
                idle, which overwrites their first positions.
            lengths: tokens of each prompt, which the cache holds.

        Returns:
            `most` tokens of each at most, less where `stop` said so. The last one has not been processed.
        """
        rows = len(lengths)
        first, _ = self.model.argmax_finite(self.model.own_logits(hidden), self.vocab)
        self._pending.zero_()
        self._positions.zero_()
        self._turn.zero_()
        self._pending[:rows, 0] = first
        self._positions[:rows] = torch.tensor(lengths, device=first.device)
        found = [[token] for token in first.tolist()]
        ended = [stop(tokens) for tokens in found]
        done, longest = 1, max(lengths)
        while done < self.most and not all(ended):
            turns = min(LOOK_EVERY, self.most - done) if self._captured else 1
            for turn in range(turns):
                if self._captured:
                    self._captured()
                else:
                    self._step(longest + done + turn)
            for row, new in enumerate(self._tokens[:rows, done - 1 : done - 1 + turns].tolist()):
                for token in new:
                    if not ended[row]:
                        found[row].append(token)
                        ended[row] = stop(found[row])
            done += turns
        return found
