"""What a run will allocate, known before anything is loaded, and what would fit if that is too much.

The plan is for a batch that runs with our kernels in a 16-bit dtype on one GPU, or on each of several ranks, which hold
as much as each other, or no more than the first stage of a pipeline. It is an upper estimate: every part counts as if
all parts lived at once, which a caching allocator and a graph's own pool come close to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from dustin_runtime.cache import window_ring
from dustin_runtime.config import LayerHeads, Selection
from dustin_runtime.errors import CapacityError, UsageError
from dustin_runtime.kernels import row_tile
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.parallel.split import Part, part_of
from dustin_runtime.policies.base import Policy
from dustin_runtime.policies.streaming import STREAMING_SINK
from dustin_runtime.prefill import GPU_CHUNK
from dustin_runtime.pricing import body_weights, held_weights, weights_bytes

OVERHEAD_BYTES = 2 * 2**30
"""CUDA context, compiled kernels, cuBLAS workspaces, one captured graph, and what the allocator cannot use."""
PROCESSORS = 160
"""Streaming multiprocessors, no fewer than any supported GPU has; split kernels run up to two programs on each."""
SAMPLING_COPIES = 8
"""fp32 arrays of the logits' size that probabilities, top-p and the residual take at once."""
COLLECTIVES_BYTES = 2**30
"""NCCL's buffers on each of several ranks; assumed, not measured."""
GIB = 2**30

DraftStores = Literal["all", "layers", "nothing"]
"""What a draft has for itself: all weights, its layers (embedding and head are the target's), or nothing (`self:N`)."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one run, on each of its ranks.

    Attributes:
        target, draft: as a whole, however many ranks share them.
        capacity: positions per row: prompt, new tokens and the overshoot of a last step.
        selection: heads that are scored; None for a method that scores nothing.
        sampled: whether rows may have a temperature.
        draft_stores: what of its weights the draft does not share with the target.
        draft_budget: tokens of its cache that the draft reads; None for all, which are then kept.
        policies: methods that run one after the other; the one that keeps most counts.
        world: ranks that share the target, and with it a draft that stores nothing; any other draft is whole on each.
        pipeline: each has whole layers. The first stage counts, which has the most of them, with the last one's logits.
        kv_bytes: of an element of the target's cache, if not `element_bytes`: 1 for one of 8 bits, which has scales.
    """

    target: ModelShape
    draft: ModelShape | None
    batch: int
    capacity: int
    depth: int
    selection: Selection | None
    element_bytes: int
    sampled: bool
    draft_stores: DraftStores
    prefill_chunk: int
    draft_budget: int | None
    policies: tuple[Policy, ...] = ()
    world: int = 1
    pipeline: bool = False
    kv_bytes: int | None = None
    audited: bool = False

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by component."""
        target, draft = self._target, self._draft
        models = [target, *([draft] if draft else [])]
        return {
            "target weights": self._target_weights(),
            "draft weights": self._draft_weights(),
            "target KV cache": self._target_cache(target),
            "draft KV cache": self._draft_cache(),
            "policy": self._policies(),
            "rotary tables": sum(4 * shape.head_size * self.capacity for shape in models),
            "score scratch": self._scores(),
            "logits": self._logits(),
            "split scratch": max(self._splits(shape) for shape in models),
            "prefill activations": max(
                self._activations(target) + self._converted(target), *map(self._activations, models)
            ),
            "overhead": OVERHEAD_BYTES,
            **({"collectives": COLLECTIVES_BYTES} if self.world > 1 else {}),
        }

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def table(self) -> list[str]:
        """One aligned line per component in GiB, the total last."""
        lines = [*self.parts.items(), ("total", self.total)]
        return [f"{name:<20}{size / GIB:>9.2f} GiB" for name, size in lines if size]

    def resized(self, *, batch: int | None = None, capacity: int | None = None) -> MemoryPlan:
        """The same run with another batch or capacity."""
        return replace(self, batch=batch or self.batch, capacity=capacity or self.capacity)

    @property
    def _share(self) -> Part | None:
        """What a rank holds of the target; None for all of it. Raises UsageError as `part_of`."""
        return part_of(self.target, 0, self.world, self.pipeline) if self.world > 1 else None

    @property
    def _target(self) -> ModelShape:
        """What is computed on a rank."""
        return self._share.shape if self._share else self.target

    @property
    def _draft(self) -> ModelShape | None:
        if self.draft is None or self._share is None or self.draft_stores != "nothing":
            return self.draft
        return self._share.first_layers(self.draft.layers).shape

    @property
    def _queries(self) -> int:
        return self.depth + 1 if self.draft else 1

    def _target_weights(self) -> int:
        return held_weights(self._share) * self.element_bytes if self._share else self._whole(self.target)

    def _whole(self, shape: ModelShape) -> int:
        return weights_bytes(shape, self.element_bytes)

    def _draft_weights(self) -> int:
        if self.draft is None or self.draft_stores == "nothing":
            return 0
        if self.draft_stores == "layers":
            head = 0
            if self._share and not self.target.tied:  # which it borrows, and which the target has in parts
                rows = self.target.vocab if self.pipeline else self._share.vocab_rows * self.world
                head = rows * self.target.hidden
            return (body_weights(self.draft) + head) * self.element_bytes
        return self._whole(self.draft)

    def _cache(self, shape: ModelShape, rows: int) -> int:
        return shape.kv_bytes(self.capacity, self.element_bytes) * rows

    def _target_cache(self, shape: ModelShape) -> int:
        scales = 2 * 4 * shape.layers * shape.kv_heads * self.batch if self.kv_bytes else 0
        return shape.kv_bytes(self.capacity, self.kv_bytes or self.element_bytes) * self.batch + scales

    def _converted(self, shape: ModelShape) -> int:
        """Keys and values of one layer and one row, which prefill takes in the model's dtype."""
        return shape.kv_bytes(self.capacity, self.element_bytes) // shape.layers if self.kv_bytes else 0

    def _draft_cache(self) -> int:
        """All tokens; or a ring of them, all keys of the scored layers, and one whole row to prefill in."""
        draft = self._draft
        # A draft that is whole on every rank drafts a share of the rows there.
        rows = self.batch if self.draft_stores == "nothing" else -(-self.batch // self.world)
        if draft is None or self.draft_budget is None:
            return self._cache(draft, rows) if draft else 0
        ring = window_ring(self.draft_budget, self.depth, STREAMING_SINK)
        slots = draft.kv_bytes(ring.sink + ring.size, self.element_bytes) * rows
        layers = len(self.selection.lookahead) if self.selection else 0
        keys = layers * draft.kv_heads * draft.head_size * self.element_bytes * self.capacity * rows
        return slots + keys + draft.kv_bytes(self.capacity, self.element_bytes)

    def _scores(self) -> int:
        """fp32 logits of every scored row over the whole capacity, and one vector of sums per signal."""
        if self.selection is None:
            return 0
        passes = max((policy.passes(self.depth) for policy in self.policies), default=self.depth)
        lines = _heads((self.selection.history,)) + _heads(self.selection.lookahead) * passes
        return 4 * self.batch * self.capacity * (lines + 2)

    def _policies(self) -> int:
        held = part_of(self.target, 0, self.world, self.pipeline)
        sizes = (self.depth, self.batch, self.capacity, self.element_bytes)
        return max((policy.memory_bytes(held, self._draft, *sizes) for policy in self.policies), default=0)

    def _logits(self) -> int:
        rows = self.batch * self._queries
        copies = 4 * SAMPLING_COPIES if self.sampled else 0
        if self._share is None or self.pipeline:
            # An audit keeps the logits of full verification, and compares one token of each row at a time.
            audit = self.target.vocab * (rows * self.element_bytes + self.batch * 4 * 5) if self.audited else 0
            return rows * self.target.vocab * (self.element_bytes + copies) + audit
        own = rows * self._share.vocab_rows * self.element_bytes
        # Where they are drawn from, those of all ranks are gathered, then put in order.
        return own + (rows * self.target.vocab * (2 * self.element_bytes + copies) if self.sampled else 0)

    def _splits(self, shape: ModelShape) -> int:
        """fp32 partial results of full attention: one tile of rows per program and per KV head of a sequence."""
        rows = self._queries * shape.group
        tile = row_tile(rows)
        groups = self.batch * shape.kv_heads * -(-rows // tile)
        slots = max(2 * PROCESSORS, groups) + groups
        return 4 * slots * tile * (shape.head_size + 2)

    def _activations(self, shape: ModelShape) -> int:
        """One chunk of one prompt in a layer: residual and normed input, projections, attention, the gated MLP."""
        tokens = min(self.prefill_chunk, self.capacity)
        width = 4 * shape.hidden + 2 * (shape.query_heads + shape.kv_heads) * shape.head_size + 3 * shape.ffn
        return tokens * width * self.element_bytes


def plan(
    target: ModelShape,
    draft: ModelShape | None = None,
    *,
    batch: int,
    capacity: int,
    depth: int = 0,
    selection: Selection | None = None,
    element_bytes: int = 2,
    sampled: bool = False,
    draft_stores: DraftStores = "all",
    prefill_chunk: int = GPU_CHUNK,
    draft_budget: int | None = None,
    policies: Sequence[Policy] = (),
    world: int = 1,
    pipeline: bool = False,
    kv_bytes: int | None = None,
    audited: bool = False,
) -> MemoryPlan:
    """What a run needs; arguments as the attributes of `MemoryPlan`.

    Args:
        draft: None for a method that does not draft.
        element_bytes: of a weight or KV element: 2 for bf16, 4 for fp32.
    """
    return MemoryPlan(
        target,
        draft,
        batch,
        capacity,
        depth,
        selection,
        element_bytes,
        sampled,
        draft_stores,
        prefill_chunk,
        draft_budget,
        tuple(policies),
        world,
        pipeline,
        kv_bytes,
        audited,
    )


def free_bytes(device: str) -> int | None:
    """What a GPU has left; None for a CPU, whose memory is not planned."""
    return torch.cuda.mem_get_info(device)[0] if device != "cpu" else None


def require(planned: MemoryPlan, available_bytes: int) -> None:
    """Refuse a run that does not fit.

    Args:
        available_bytes: what the device of this process has left before anything is loaded.

    Raises:
        CapacityError: one line with the need, what is there, and the largest batch or capacity that would fit, or over
            how many ranks all of it would.
    """
    if planned.total <= available_bytes:
        return
    largest = sorted(planned.parts.items(), key=lambda part: -part[1])[:3]
    each = f" on each of {planned.world} ranks" if planned.world > 1 else ""
    need = (
        f"{planned.batch} rows of {planned.capacity} positions need {planned.total / GIB:.1f} GiB{each}"
        f" ({', '.join(f'{name} {size / GIB:.1f}' for name, size in largest)}),"
        f" {available_bytes / GIB:.1f} GiB are available"
    )
    raise CapacityError(f"{need}: {_remedy(planned, available_bytes)}")


def largest_batch(planned: MemoryPlan, available_bytes: int) -> int:
    """Most rows of the planned capacity that fit, the planned batch at most; 0 if not even one does."""
    return _largest(lambda batch: planned.resized(batch=batch).total <= available_bytes, planned.batch)


def largest_capacity(planned: MemoryPlan, available_bytes: int) -> int:
    """Most positions per row that fit at the planned batch, the planned capacity at most; 0 if not even one does."""
    return _largest(lambda capacity: planned.resized(capacity=capacity).total <= available_bytes, planned.capacity)


def _remedy(planned: MemoryPlan, available_bytes: int) -> str:
    """What to change, with the values that fit."""
    rows, positions = largest_batch(planned, available_bytes), largest_capacity(planned, available_bytes)
    alone = 0 if rows or planned.batch == 1 else largest_capacity(planned.resized(batch=1), available_bytes)
    fits = []
    if rows:
        fits.append(f"lower the batch to {rows}")
    if positions:
        fits.append(f"lower the context to {positions} positions a row, new tokens included")
    if alone:
        fits.append(f"run one row of {alone} positions")
    wide = planned.element_bytes > 2
    if wide and replace(planned, element_bytes=2).total <= available_bytes:
        fits.append("use a 16-bit dtype (bfloat16)")
    if more := _enough_ranks(planned, available_bytes):
        fits.append(f"start {more} ranks")
    if fits:
        return " or ".join(fits)
    dtype = "a 16-bit dtype, " if wide else ""
    return f"not even one row of one position fits; use {dtype}a smaller model, or more memory"


def _enough_ranks(planned: MemoryPlan, available_bytes: int) -> int | None:
    """The fewest ranks over which the run fits, where there are several already; None if none do."""
    most = planned.target.layers if planned.pipeline else planned.target.query_heads
    for world in range(planned.world + 1, most + 1) if planned.world > 1 else ():
        try:
            if replace(planned, world=world).total <= available_bytes:
                return world
        except UsageError:  # the target cannot be shared by so many
            continue
    return None


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n in [1, most] that fits, by bisection; 0 if 1 does not. What fits also fits smaller."""
    if not fits(1):
        return 0
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _heads(asked: tuple[LayerHeads, ...]) -> int:
    return sum(len(entry.heads) for entry in asked)
