"""What one step leaves to the next, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from dustin_runtime.acceptance import Sampling
from dustin_runtime.cache import KVCache
from dustin_runtime.parallel.rows import RowBlocks
from dustin_runtime.policies.base import DraftLists, Memory


@dataclass
class State:
    """What one step leaves to the next, in buffers that keep their place. n = `lengths`: tokens the target processed.

    Attributes:
        draft_prefill: one row of all positions, in which prompts are prefilled for a draft cache that keeps only the
            first and last; None if it keeps all.
        lengths: [rows] int64, at least 1.
        recent: [rows, 2] int64, the last processed token (at n - 1) and the pending one (at n, emitted but not yet
            processed). The draft's first pass always takes both, so that a fully accepted step needs no other shape.
        history_query: [rows, 1, heads, head_size] queries of the history heads at n - 1, saved by the pass before.
        active: [rows] bool; a row that is not stays as it is.
        memory: what the policy keeps between steps; None for most.
        draft_lists: what the draft reads of its cache, where a policy chooses that; or None.
        forced: [rows, capacity] bool, at which positions drafts are accepted whatever the models say; or None.
        sampling: how each row draws its tokens.
        blocks: the rows that each rank drafts, where ranks share them; None if all are drafted here. The draft's caches
            have the rank's own block alone.
        extent: bound on max(lengths): how much of the cache the plain attention is shown. Kernels read lengths on the
            device, so a graph takes the whole capacity.
    """

    target_cache: KVCache
    draft_cache: KVCache | None
    draft_prefill: KVCache | None
    lengths: Tensor
    recent: Tensor
    history_query: Tensor | None
    active: Tensor
    sampling: Sampling
    memory: Memory | None
    draft_lists: DraftLists | None
    forced: Tensor | None
    blocks: RowBlocks | None
    extent: int

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def drafted(self) -> State:
        """The same with what drafting reads of it cut to the rows that are drafted here; itself if these are all."""
        if self.blocks is None:
            return self
        own, sampling = self.blocks.own, self.sampling
        return replace(
            self,
            lengths=own(self.lengths),
            recent=own(self.recent),
            sampling=Sampling(own(sampling.temperature), own(sampling.top_p), own(sampling.seed)),
            blocks=None,
        )


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        packed: [rows, depth + 4] fp64, so that one copy brings all to the host: depth + 1 tokens, of which the first
            `count` are emitted; `count`, accepted drafts plus the target's own token, 0 for inactive rows; prefix
            tokens that each KV head read, mean over layers and heads; 1 if the row's logits are finite. Behind these,
            where rows may be verified in full, 1 if this one was; of an audited step, what `audit.divergence` finds.
        logits: [rows, depth + 1, shared vocabulary]. Of a target that is split over ranks, only a stepper that samples
            puts them together; otherwise the columns that this rank has, which may be none.
    """

    packed: Tensor
    logits: Tensor

    @property
    def tokens(self) -> Tensor:
        """[rows, depth + 1] int64."""
        return self.packed[:, : self.logits.shape[1]].long()

    @property
    def count(self) -> Tensor:
        """[rows] int64."""
        return self.packed[:, self.logits.shape[1]].long()
