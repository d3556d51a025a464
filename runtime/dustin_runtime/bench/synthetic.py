"""Random caches, queries and lists of one workload, with enough different caches that none is found in the L2."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from dustin_runtime.attention.scoring import ScoredHeads
from dustin_runtime.bench.workload import Sizes, Workload
from dustin_runtime.cache import KVCache
from dustin_runtime.errors import CapacityError
from dustin_runtime.kernels import ceil_div
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.selection import select

LEAST_CACHES, LEAST_BYTES = 12, 2**30
"""Layers take turns on this many caches, or on more that hold this much together, unless there are fewer layers."""
FEWEST_CACHES = 4
"""Fewer would leave the listed tokens of all of them in an L2 of 50 MB."""
SCORINGS = 4
"""Different layers that are scored in turn."""
USABLE = 0.8
"""Share of the free memory that caches may fill; results, scratch and other kernels' workspaces need the rest."""


class Synthetic:
    """Tensors of one workload; all that is random is normal, all rows are equally long.

    Attributes:
        cache: the target's layers, `[caches, batch, capacity, kv_heads, head_size]`; layer i uses cache i mod caches.
        draft_keys: [scored draft layers * scorings, batch, capacity, kv_heads, head_size] keys of the draft.
        q: [batch, depth + 1, query_heads, head_size]; start: [batch] int64, where the first of them stands.
        history, lookahead: the scored heads, one entry per scoring.
        history_q: [batch, 1, entries, head_size]; lookahead_q: [batch, depth, entries, draft's head_size].
        history_at, lookahead_at: [batch, queries] int64 positions of those.
    """

    def __init__(self, sizes: Sizes, workload: Workload, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.workload = sizes, workload
        context, batch = workload
        self._random = torch.Generator(device).manual_seed(0)
        target, draft = sizes.target, sizes.draft
        caches = caches_that_fit(sizes, workload, dtype, device)
        scorings = min(SCORINGS, caches)
        tokens = sizes.depth + 1
        keys, values = (self._cached(target, caches, batch, context + tokens, dtype, device) for _ in range(2))
        self.cache = KVCache(keys, values)
        self.draft_keys = self._cached(
            draft, sizes.scored_draft_layers * scorings, batch, context + sizes.depth, dtype, device
        )
        self.q = self.queries(tokens, sizes.query_heads, sizes.head_size, dtype)
        self.start = torch.full((batch,), context, device=device)

        chosen = [sizes.selection(index) for index in range(scorings)]
        self.selection = chosen[0]
        self.history = [ScoredHeads([one.history], target.query_heads, target.group, device) for one in chosen]
        self.lookahead = [ScoredHeads(one.lookahead, draft.query_heads, draft.group, device) for one in chosen]
        self.history_q = self.queries(1, len(self.history[0]), sizes.head_size, dtype)
        self.lookahead_q = self.queries(sizes.depth, len(self.lookahead[0]), draft.head_size, dtype)
        self.history_at = self.start.unsqueeze(1) - 1
        self.lookahead_at = self.start.unsqueeze(1) + torch.arange(sizes.depth, device=device)

    def queries(self, tokens: int, heads: int, head_size: int, dtype: torch.dtype) -> Tensor:
        """Random queries of every row: [batch, tokens, heads, head_size]."""
        shape = (self.workload.batch, tokens, heads, head_size)
        return torch.randn(shape, generator=self._random, device=self._random.device).to(dtype)

    def kept(self, lengths: Tensor) -> Tensor:
        """A random list per row, ascending, with sink and window: [1, batch, 1, budget]."""
        shape = (2, self.workload.batch, int(lengths.max()))
        lookahead, history = torch.rand(shape, generator=self._random, device=lengths.device)
        return self.choose(lookahead, history, lengths)[None, :, None]

    def choose(self, lookahead: Tensor, history: Tensor, lengths: Tensor) -> Tensor:
        """`select` as the runtime calls it."""
        one = self.selection
        return select(lookahead, history, lengths, budget=one.budget, m=one.m, sink=one.sink, window=one.window)

    def history_scores(self, scoring: int) -> Tensor:
        """[batch, context] fp32, from cache `scoring`."""
        heads = self.history[scoring]
        return heads.scores(self.history_q, self.cache.keys, self.history_at, self.workload.context)

    def lookahead_scores(self, scoring: int) -> Tensor:
        """[batch, context] fp32, from the draft layers of this scoring."""
        heads = self.lookahead[scoring]
        return heads.scores(self.lookahead_q, self.draft_keys, self.lookahead_at, self.workload.context)

    def _cached(
        self, shape: ModelShape, layers: int, batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        size = (layers, batch, shape.kv_heads, capacity, shape.head_size)  # as `KVCache.allocate` lays it out
        cached = torch.empty(size, dtype=dtype, device=device)
        for layer in cached:  # all at once could exceed 2^31 elements
            layer.normal_(generator=self._random)
        return cached.transpose(2, 3)


def caches_that_fit(sizes: Sizes, workload: Workload, dtype: torch.dtype, device: torch.device) -> int:
    """How many caches the layers take turns on.

    Raises:
        CapacityError: memory does not suffice for `FEWEST_CACHES`.
    """
    if device.type != "cuda":
        return min(sizes.layers, 2)  # caches of a CPU are larger than what is tried there
    one = cache_bytes(sizes, workload, dtype)
    wanted = min(sizes.layers, max(LEAST_CACHES, ceil_div(LEAST_BYTES, one)))
    draft, (context, batch) = sizes.draft, workload
    keys = draft.kv_heads * draft.head_size * (context + sizes.depth) * batch * dtype.itemsize
    gc.collect()  # what the workload before held
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    room = USABLE * free - sizes.scored_draft_layers * SCORINGS * keys
    count = min(wanted, int(room // one))
    if count < min(FEWEST_CACHES, sizes.layers):
        need = FEWEST_CACHES * one + sizes.scored_draft_layers * SCORINGS * keys
        raise CapacityError(
            f"--workload {workload}: caches of {FEWEST_CACHES} layers need {need / 2**30:.1f} GiB, "
            f"{USABLE * free / 2**30:.1f} GiB may be used; give a smaller context or batch"
        )
    return count


def cache_bytes(sizes: Sizes, workload: Workload, dtype: torch.dtype) -> int:
    """Keys and values of one layer."""
    per_token = 2 * sizes.kv_heads * sizes.head_size * dtype.itemsize
    return workload.batch * (workload.context + sizes.depth + 1) * per_token
