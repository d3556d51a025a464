"""One step of speculative decoding as a function of device state: draft, score, select, verify, accept.

Nothing in it reads a tensor on the host, its shapes depend on the batch and the settings alone, and state is updated in
place: a CUDA graph can hold it (`graph.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dustin_runtime import acceptance
from dustin_runtime.acceptance import Sampling
from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.scoring import ScoredHeads
from dustin_runtime.attention.sparse import SparseAttention
from dustin_runtime.attention.tap import QueryTap
from dustin_runtime.cache import KVCache, window_ring
from dustin_runtime.config import Selection
from dustin_runtime.models import ops
from dustin_runtime.models.decoder import Attention, Decoder
from dustin_runtime.policies import Policy
from dustin_runtime.policies.streaming import STREAMING_SINK, first_and_last


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
        sampling: how each row draws its tokens.
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
    extent: int

    @property
    def rows(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        tokens: [rows, depth + 1] int64; the first `count` are emitted.
        count: [rows] int64: accepted drafts plus the target's own token; 0 for inactive rows.
        read: [rows] fp32, prefix tokens that each KV head read, mean over layers and heads.
        finite: [rows] bool, whether the row's logits were.
        logits: [rows, depth + 1, shared vocabulary].
    """

    tokens: Tensor
    count: Tensor
    read: Tensor
    finite: Tensor
    logits: Tensor

    def packed(self) -> Tensor:
        """[rows, depth + 4] fp64: tokens, count, read, finite, so that one copy brings all to the host."""
        columns = (self.count, self.read, self.finite)
        return torch.cat((self.tokens.double(), *(x.double().unsqueeze(1) for x in columns)), dim=1)


@dataclass
class StepSignals:
    """Scores of one step, from saved queries and the caches (implements `policies.Signals`)."""

    stepper: Stepper
    state: State
    lengths: Tensor
    lookahead_queries: Tensor | None = None

    def history(self) -> Tensor:
        heads, query = self.stepper.history_heads, self.state.history_query
        assert heads is not None and query is not None
        position = (self.lengths - 1).unsqueeze(1)
        return heads.scores(query, self.state.target_cache.keys, position, self.state.extent)

    def lookahead(self) -> Tensor:
        heads, queries, cache = self.stepper.lookahead_heads, self.lookahead_queries, self.state.draft_cache
        assert heads is not None and queries is not None and cache is not None
        position = self.lengths.unsqueeze(1) + torch.arange(queries.shape[1], device=self.lengths.device)
        keys = cache.keys if cache.scored is None else cache.scored
        return heads.scores(queries, keys, position, self.state.extent)


class Stepper:
    """Steps a batch with one method.

    Args:
        draft: the draft model; None for a method that does not draft.
        selection: layers and heads to score; None for a method that does not score.
        depth: draft tokens per step; 0 for a method that does not draft.
        shared_vocab: only ids below it are proposed or compared.
        draft_budget: tokens of its cache that the draft reads, the first and the last; None for all.
        sampled: whether rows may have a temperature; otherwise all are greedy, which is cheaper.
        nucleus: whether rows may have a top-p below 1.
        forced_rate: accept drafts at this rate whatever the models say, for timing only.
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
        self.history_heads: ScoredHeads | None = None
        self.lookahead_heads: ScoredHeads | None = None
        if selection and policy.uses_history:
            self.history_heads = ScoredHeads([selection.history], target.shape.group, target.device)
        if selection and policy.uses_lookahead and self.draft:
            self.lookahead_heads = ScoredHeads(
                selection.lookahead, self.draft.shape.group, target.device, stacked=draft_budget is not None
            )

    def state(self, rows: int, capacity: int) -> State:
        """Buffers for `rows` sequences of up to `capacity` positions, drafts of a step included; no row is active.

        Raises:
            CapacityError: memory does not suffice.
        """
        device, shape = self.target.device, self.target.shape
        heads = self.history_heads
        target_cache = self.target.cache(rows, capacity)
        return State(
            target_cache,
            *self._draft_caches(rows, capacity),
            lengths=torch.ones(rows, dtype=torch.int64, device=device),
            recent=torch.zeros(rows, 2, dtype=torch.int64, device=device),
            history_query=torch.zeros(
                rows, 1, len(heads), shape.head_size, dtype=self.target.dtype, device=device
            )
            if heads
            else None,
            active=torch.zeros(rows, dtype=torch.bool, device=device),
            sampling=Sampling.allocate(rows, device),
            extent=capacity - self.depth - 1,
        )  # fmt: skip

    def _draft_caches(self, rows: int, capacity: int) -> tuple[KVCache | None, KVCache | None]:
        if self.draft is None or self.draft_budget is None:
            return self.draft.cache(rows, capacity) if self.draft else None, None
        ring = window_ring(self.draft_budget, self.depth, STREAMING_SINK)
        scored = [entry.layer for entry in self.lookahead_heads.chosen] if self.lookahead_heads else []
        return self.draft.windowed_cache(rows, capacity, ring, scored), self.draft.cache(1, capacity)

    def __call__(self, state: State) -> StepResult:
        """Advance every active row by 1 to depth + 1 tokens; updates `state` in place."""
        signals = StepSignals(self, state, state.lengths)
        drafts, draft_probabilities = self.draft_tokens(state, signals)
        kept = self.policy.select(signals)
        verify: Attention = dense_attention if kept is None else SparseAttention(kept)
        tap = QueryTap(verify, self.history_heads.heads if self.history_heads else {})
        ids = torch.cat((state.recent[:, 1:], drafts), dim=1)
        hidden = self.target.forward(ids, state.lengths, state.target_cache, tap, state.extent + self.depth + 1)
        logits = self.target.logits(hidden)
        tokens, finite = ops.argmax_finite(logits, self.shared_vocab)
        logits = logits[..., : self.shared_vocab]
        tokens, accepted = self._accept(state, logits, tokens, drafts, draft_probabilities)
        count = torch.where(state.active, accepted + 1, 0)
        read = state.lengths.float() if kept is None else (kept >= 0).float().sum(dim=3).mean(dim=(0, 2))
        self._advance(state, tap, ids, tokens, accepted)
        return StepResult(tokens, count, read, finite.all(dim=1), logits)

    def draft_tokens(self, state: State, signals: StepSignals) -> tuple[Tensor, Tensor | None]:
        """Propose `depth` tokens: [rows, depth], and what they were drawn from if that was not the arg-max.

        Saves the lookahead queries of the `depth` passes.
        """
        if self.draft is None:
            return state.recent[:, :0], None
        assert state.draft_cache is not None
        scored = self.lookahead_heads
        queries: list[Tensor] = []
        drafts: list[Tensor] = []
        distributions: list[Tensor] = []
        ids, start = state.recent, state.lengths - 1
        attentions = self._draft_attentions(state)
        for turn in range(self.depth):
            tap = QueryTap(attentions[turn], scored.heads if scored else {})
            hidden = self.draft.forward(ids, start, state.draft_cache, tap, state.extent + turn + 1)
            if scored:
                queries.append(scored.gather(tap.queries)[:, -1:])
            logits = self.draft.logits(hidden[:, -1:])
            start = state.lengths + turn + 1
            ids = self._propose(state, logits, start, turn, distributions)
            drafts.append(ids)
        signals.lookahead_queries = torch.cat(queries, dim=1) if queries else None
        return torch.cat(drafts, dim=1), torch.cat(distributions, dim=1) if distributions else None

    def _draft_attentions(self, state: State) -> list[Attention]:
        """What the draft attends with, by turn."""
        if self.draft_budget is None:
            return [dense_attention] * self.depth
        turns = torch.arange(self.depth, device=state.lengths.device).unsqueeze(1)
        starts = state.lengths + torch.where(turns > 0, turns, -1)  # [depth, rows]
        lists = first_and_last(starts.view(-1), self.draft_budget, STREAMING_SINK)
        assert state.draft_cache is not None
        ring = state.draft_cache.ring
        return [SparseAttention(kept[None, :, None], ring) for kept in lists.view(self.depth, state.rows, -1)]

    def _propose(
        self, state: State, logits: Tensor, position: Tensor, turn: int, distributions: list[Tensor]
    ) -> Tensor:
        """The draft's token at `position`: [rows, 1]."""
        if not self.sampled:
            return ops.argmax_finite(logits, self.shared_vocab)[0]
        chosen = self._probabilities(state, logits[..., : self.shared_vocab])
        distributions.append(chosen)
        stream = acceptance.DRAFT + acceptance.STREAMS * turn
        u = acceptance.uniform(state.sampling.seed, position, stream)
        return acceptance.draw(chosen, u.unsqueeze(1))

    def _probabilities(self, state: State, logits: Tensor) -> Tensor:
        sampling = state.sampling
        return acceptance.probabilities(logits, sampling.temperature, sampling.top_p, nucleus=self.nucleus)

    def _accept(
        self, state: State, logits: Tensor, best: Tensor, drafts: Tensor, draft_probabilities: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Tokens [rows, depth + 1] and how many of the drafts are accepted [rows]."""
        turns = torch.arange(self.depth, device=drafts.device)
        position = state.lengths.unsqueeze(1) + 1 + turns  # of the drafts
        seed = state.sampling.seed.unsqueeze(1)
        if self.forced_rate is not None:
            u = acceptance.uniform(seed, position, acceptance.ACCEPT)
            return acceptance.accept_forced(drafts, best, self.forced_rate, u)
        if not self.sampled:
            return acceptance.accept_greedy(best, drafts)
        # Other turns draw other numbers at a position that a rejection brings back: with sparse verification the
        # target's distribution depends on drafts that were discarded.
        u = acceptance.uniform(seed, position, acceptance.ACCEPT + acceptance.STREAMS * turns)
        final = acceptance.uniform(state.sampling.seed, state.lengths + 1, acceptance.FINAL)
        wanted = self._probabilities(state, logits)
        proposed = wanted[:, :0] if draft_probabilities is None else draft_probabilities
        return acceptance.accept_sampled(wanted, proposed, drafts, u, final)

    def _advance(self, state: State, tap: QueryTap, ids: Tensor, tokens: Tensor, accepted: Tensor) -> None:
        """Roll forward by what was accepted. Rejected tokens are left behind by length alone."""
        pick = accepted.unsqueeze(1)
        recent = torch.cat((ids.gather(1, pick), tokens.gather(1, pick)), dim=1)
        state.recent.copy_(torch.where(state.active.unsqueeze(1), recent, state.recent))
        if state.history_query is not None:
            assert self.history_heads is not None
            queries = self.history_heads.gather(tap.queries)
            query = queries.gather(1, accepted[:, None, None, None].expand_as(queries[:, :1]))
            state.history_query.copy_(torch.where(state.active[:, None, None, None], query, state.history_query))
        state.lengths.copy_(torch.where(state.active, state.lengths + accepted + 1, state.lengths))
