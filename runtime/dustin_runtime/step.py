"""One step of speculative decoding as a function of device state: draft, score, select, verify, accept.

Nothing in it reads a tensor on the host, its shapes depend on the batch and the settings alone, and state is updated in
place: a CUDA graph can hold it (`graph.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dustin_runtime import acceptance
from dustin_runtime.acceptance import Sampling
from dustin_runtime.advance import advance
from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.scoring import ScoredHeads
from dustin_runtime.attention.sparse import SparseAttention
from dustin_runtime.attention.tap import QueryTap
from dustin_runtime.attention.window import WindowAttention
from dustin_runtime.audit import divergence
from dustin_runtime.cache import KVCache, window_ring
from dustin_runtime.config import LayerHeads, Selection
from dustin_runtime.models.decoder import Attention, Decoder
from dustin_runtime.parallel.rows import RowBlocks
from dustin_runtime.policies import Policy, require_over_ranks
from dustin_runtime.policies.base import Verification
from dustin_runtime.policies.streaming import STREAMING_SINK
from dustin_runtime.signals import StepSignals
from dustin_runtime.state import State, StepResult


class Stepper:
    """Steps a batch with one method.

    Args:
        draft: the draft model; None for a method that does not draft.
        selection: layers and heads to score; None for a method that does not score.
        depth: draft tokens per step; 0 for a method that does not draft.
        shared_vocab: only ids below it are proposed or compared.
        draft_budget: tokens of its cache that the draft reads, the first and the last or what the policy chooses;
            None for all.
        sampled: whether rows may have a temperature; otherwise all are greedy, which is cheaper.
        nucleus: whether rows may have a top-p below 1.
        forced_rate: accept drafts at this rate whatever the models say, for timing only.
        kv_dtype: what the target's keys and values are stored in, see `scaled`; None for the model's dtype, which the
            draft's always are.
    """

    def __init__(
        self,
        target: Decoder,
        draft: Decoder | None,
        policy: Policy,
        selection: Selection | None,
        depth: int,
        shared_vocab: int,
        *,
        draft_budget: int | None = None,
        sampled: bool = False,
        nucleus: bool = False,
        forced_rate: float | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.target = target
        self.draft = draft if policy.drafts else None
        self.policy = policy
        self.selection = selection
        self.depth = depth if policy.drafts else 0
        self.shared_vocab = shared_vocab
        self.draft_budget = draft_budget
        self.sampled = sampled
        self.nucleus = nucleus
        self.forced_rate = forced_rate
        self.kv_dtype = kv_dtype
        self.history_heads: ScoredHeads | None = None
        self.lookahead_heads: ScoredHeads | None = None
        self.lookahead_layers: dict[int, ScoredHeads] = {}
        self.passes = policy.passes(self.depth)
        """Of the draft: one for each token that it proposes, and one at the last of these if the policy asks there."""
        self.beside = torch.cuda.Stream(target.device) if selection and target.device.type == "cuda" else None
        """Where scores are computed while the draft runs."""
        require_over_ranks(policy, target.split.ranks.world if target.split else 1)
        self.draft_ranks = target.split.ranks if target.split and self.draft and not self.draft.split else None
        """Those that share drafting by rows: where the target is split and the draft is whole on each rank."""
        if selection and policy.uses_history:
            self.history_heads = _scored_heads(target, [selection.history])
        if selection and policy.uses_lookahead and self.draft:
            chosen = policy.lookahead_heads(self.draft.shape)
            self.lookahead_heads = _scored_heads(self.draft, chosen, apart=draft_budget is not None)
            self.lookahead_layers = self.lookahead_heads.by_layer() if self.lookahead_heads else {}

    def state(self, rows: int, capacity: int) -> State:
        """Buffers for `rows` sequences of up to `capacity` positions, drafts of a step included; no row is active.

        Raises:
            CapacityError: memory does not suffice.
        """
        device, shape = self.target.device, self.target.shape
        heads = self.history_heads
        target_cache = self.target.cache(rows, capacity, self.kv_dtype)
        blocks = RowBlocks(rows, self.draft_ranks) if self.draft_ranks else None
        return State(
            target_cache,
            *self._draft_caches(blocks.each if blocks else rows, capacity),
            lengths=torch.ones(rows, dtype=torch.int64, device=device),
            recent=torch.zeros(rows, 2, dtype=torch.int64, device=device),
            history_query=torch.zeros(
                rows, 1, len(heads), shape.head_size, dtype=self.target.dtype, device=device
            )
            if heads
            else None,
            active=torch.zeros(rows, dtype=torch.bool, device=device),
            sampling=Sampling.allocate(rows, device),
            memory=self.policy.memory(self.target, self.depth, rows, capacity),
            draft_lists=self.policy.draft_lists(self.draft.shape, rows, capacity, self.draft_budget, device)
            if self.draft and self.draft_budget
            else None,
            forced=None
            if self.forced_rate is None
            else acceptance.forced_passes(rows, capacity, self.forced_rate, device),
            blocks=blocks,
            extent=capacity - self.depth - 1,
        )  # fmt: skip

    def _draft_caches(self, rows: int, capacity: int) -> tuple[KVCache | None, KVCache | None]:
        kept = self.policy.draft_keeps(self.draft_budget)
        if self.draft is None or kept is None:
            return self.draft.cache(rows, capacity) if self.draft else None, None
        ring = window_ring(kept, self.depth, STREAMING_SINK)
        scored = self.lookahead_heads.layers if self.lookahead_heads else []
        return self.draft.windowed_cache(rows, capacity, ring, scored), self.draft.cache(1, capacity)

    def __call__(self, state: State, audited: bool = False) -> StepResult:
        """Advance every active row by 1 to depth + 1 tokens; updates `state` in place.

        Args:
            audited: verify in full too, and say how far the two lie apart. The step is the same: it comes second, so
                that the keys and values of the new tokens are its own.
        """
        signals = StepSignals(self, state, self.beside)
        signals.begin()
        drafts, draft_probabilities = self.draft_tokens(state, signals)
        signals.join()
        verify = self._verification(signals)
        tap = QueryTap(verify, self.history_heads.layers if self.history_heads else ())
        ids = torch.cat((state.recent[:, 1:], drafts), dim=1)
        extent = state.extent + self.depth + 1
        full = None
        if audited:
            hidden = self.target.forward(ids, state.lengths, state.target_cache, dense_attention, extent)
            full = self.target.own_logits(hidden)[..., : self.shared_vocab]
        hidden = self.target.forward(ids, state.lengths, state.target_cache, tap, extent)
        own = self.target.own_logits(hidden)
        read = verify.tokens_read(state.lengths)
        tokens, finite = self.target.argmax_finite(own, self.shared_vocab)
        logits = (self.target.whole_logits(own) if self.sampled else own)[..., : self.shared_vocab]
        tokens, accepted = self._accept(state, logits, tokens, drafts, draft_probabilities)
        heads = self.history_heads
        queries = (tap.queries[heads.layers[0]], heads.heads) if heads else (None, None)
        packed = advance(state, ids, tokens, accepted, finite, read, *queries)
        if isinstance(verify, SparseAttention) and verify.full is not None:
            packed = torch.cat((packed, verify.full.double().unsqueeze(1)), dim=1)
        if full is not None:
            found = divergence(full, logits, packed[:, ids.shape[1]])
            packed = torch.cat((packed, found.unsqueeze(1)), dim=1)
        return StepResult(packed, logits)

    def _verification(self, signals: StepSignals) -> Verification:
        return self.policy.verification(signals)

    def draft_tokens(self, state: State, signals: StepSignals) -> tuple[Tensor, Tensor | None]:
        """Propose `depth` tokens: [rows, depth], and what they were drawn from if that was not the arg-max.

        `signals` learns the queries of all `passes`. Ranks that share the rows put together what each drafted.
        """
        if self.draft is None:
            return state.recent[:, :0], None
        state = signals.drafted
        assert state.draft_cache is not None
        drafts: list[Tensor] = []
        distributions: list[Tensor] = []
        ids = state.recent
        # Computed here, since between two kernels of ours any other operation would keep the second waiting.
        starts = [state.lengths - 1, *(state.lengths + turn for turn in range(1, self.depth + 1))]
        attends = [self._draft_attention(state, start) for start in starts[: self.passes]]
        for turn in range(self.depth):
            tap = signals.tap(attends[turn], last=turn == self.passes - 1)
            hidden = self.draft.forward(ids, starts[turn], state.draft_cache, tap, state.extent + turn + 1)
            own = self.draft.own_logits(hidden[:, -1:])
            ids = self._propose(self.draft, state, own, starts[turn + 1], turn, distributions)
            drafts.append(ids)
        if self.passes > self.depth:
            until, extent = self._last_scored, state.extent + self.passes
            tap = signals.tap(attends[self.depth], last=True, until=until)
            self.draft.forward(ids, starts[self.depth], state.draft_cache, tap, extent, until=until)
        return signals.of_all_rows(torch.cat(drafts, dim=1), torch.cat(distributions, dim=1) if distributions else None)

    @property
    def _last_scored(self) -> int | None:
        """The draft's layer behind which a pass for the scores alone has nothing to do; None if it must be whole."""
        assert self.draft is not None
        return None if self.draft.split else max(self.lookahead_layers)

    def _draft_attention(self, state: State, start: Tensor) -> Attention:
        """Of a pass whose tokens begin at `start`."""
        assert state.draft_cache is not None
        if state.draft_lists:
            return SparseAttention(state.draft_lists.lists(start))
        if self.draft_budget is None:
            return dense_attention
        return WindowAttention(self.draft_budget, STREAMING_SINK, state.draft_cache.ring)

    def _propose(
        self, draft: Decoder, state: State, own: Tensor, position: Tensor, turn: int, distributions: list[Tensor]
    ) -> Tensor:
        """The draft's token at `position`, from its own logits: [rows, 1]."""
        if not self.sampled:
            return draft.argmax_finite(own, self.shared_vocab)[0]
        chosen = self._probabilities(state, draft.whole_logits(own)[..., : self.shared_vocab])
        distributions.append(chosen)
        stream = acceptance.DRAFT + acceptance.STREAMS * turn
        u = acceptance.uniform(state.sampling.seed, position, stream)
        return acceptance.draw(chosen, u.unsqueeze(1))

    def _probabilities(self, state: State, logits: Tensor) -> Tensor:
        sampling = state.sampling
        return acceptance.probabilities(logits, sampling.temperature, sampling.top_p, nucleus=self.nucleus)

    def _accept(
        self, state: State, logits: Tensor, best: Tensor, drafts: Tensor, draft_probabilities: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens [rows, depth + 1] and how many drafts of a row are accepted, as `advance_reference` takes them."""
        if not self.sampled or state.forced is not None:
            return best, None
        turns = torch.arange(self.depth, device=drafts.device)
        position = state.lengths.unsqueeze(1) + (1 + turns)  # of the drafts
        seed = state.sampling.seed.unsqueeze(1)
        # Other turns draw other numbers at a position that a rejection brings back: with sparse verification the
        # target's distribution depends on drafts that were discarded.
        u = acceptance.uniform(seed, position, acceptance.ACCEPT + acceptance.STREAMS * turns)
        final = acceptance.uniform(state.sampling.seed, state.lengths + 1, acceptance.FINAL)
        wanted = self._probabilities(state, logits)
        proposed = wanted[:, :0] if draft_probabilities is None else draft_probabilities
        return acceptance.accept_sampled(wanted, proposed, drafts, u, final)


def _scored_heads(model: Decoder, chosen: Sequence[LayerHeads], apart: bool = False) -> ScoredHeads | None:
    """Those of the chosen heads that are computed here; None if a rank has none of them.

    Args:
        apart: whether the cache keeps the keys of their layers alone (`KVCache.scored`).
    """
    held = model.split.share.held(chosen) if model.split else chosen
    if not held:
        return None
    shape = model.shape
    return ScoredHeads(held, shape.query_heads, shape.group, model.device, range(len(held)) if apart else None)
