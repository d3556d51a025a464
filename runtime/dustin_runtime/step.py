"""One step of speculative decoding as a function of device state: draft, score, select, verify, accept.

Nothing in it reads a tensor on the host. Shapes depend on the batch, the settings and `State.extent` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.scoring import attention_scores
from dustin_runtime.attention.sparse import SparseAttention
from dustin_runtime.attention.tap import QueryTap
from dustin_runtime.cache import KVCache
from dustin_runtime.config import Selection
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.policies import Policy


@dataclass
class State:
    """What one step leaves to the next. n = `lengths`: tokens processed by the target.

    Attributes:
        lengths: [batch] int64.
        recent: [batch, 2] int64, the last processed token (at n - 1) and the pending one (at n, emitted but not yet
            processed). The draft's first pass always takes both, so that a fully accepted step needs no other shape.
        history_query: [batch, heads, head_size] queries of the history heads at n - 1, saved by the pass before.
        active: [batch] bool; a row that is not stays as it is.
        extent: host bound on max(lengths), so that eager attention is shown no more of the cache than it needs.
    """

    target_cache: KVCache
    draft_cache: KVCache | None
    lengths: Tensor
    recent: Tensor
    history_query: Tensor | None
    active: Tensor
    extent: int


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        tokens: [batch, depth + 1] int64; the first `count` are emitted.
        count: [batch] int64: accepted drafts plus the target's own token; 0 for inactive rows.
        read: [batch] fp32, prefix tokens that each KV head read, mean over layers and heads.
        finite: [batch] bool, whether the row's logits were.
        logits: [batch, depth + 1, shared vocabulary].
    """

    tokens: Tensor
    count: Tensor
    read: Tensor
    finite: Tensor
    logits: Tensor


@dataclass
class _Signals:
    """Scores of one step, from saved queries and the caches (implements `policies.Signals`)."""

    stepper: Stepper
    state: State
    lengths: Tensor
    lookahead_queries: dict[int, Tensor] = field(default_factory=dict)

    def history(self) -> Tensor:
        selection, shape = self.stepper.selection, self.stepper.target.shape
        assert selection is not None and self.state.history_query is not None
        keys = self.state.target_cache.keys[selection.history.layer][:, : self.state.extent]
        query, position = self.state.history_query.unsqueeze(1), (self.lengths - 1).unsqueeze(1)
        return attention_scores(query, keys, selection.history.heads, shape.group, position)

    def lookahead(self) -> Tensor:
        selection, draft = self.stepper.selection, self.stepper.draft
        assert selection is not None and draft is not None and self.state.draft_cache is not None
        depth = self.stepper.depth
        position = self.lengths.unsqueeze(1) + torch.arange(depth, device=self.lengths.device)
        scores = [
            attention_scores(
                self.lookahead_queries[entry.layer],
                self.state.draft_cache.keys[entry.layer][:, : self.state.extent + depth],
                entry.heads,
                draft.shape.group,
                position,
            )
            for entry in selection.lookahead
        ]
        return torch.stack(scores).sum(dim=0)[:, : self.state.extent]


class Stepper:
    """Steps a batch with one method.

    Args:
        draft: the draft model; None for a method that does not draft.
        selection: layers and heads to score; None for a method that does not score.
        depth: draft tokens per step; 0 for a method that does not draft.
        shared_vocab: only ids below it are proposed or compared.
    """

    def __init__(
        self,
        target: Decoder,
        draft: Decoder | None,
        policy: Policy,
        selection: Selection | None,
        depth: int,
        shared_vocab: int,
    ) -> None:
        self.target = target
        self.draft = draft if policy.drafts else None
        self.policy = policy
        self.selection = selection
        self.depth = depth if policy.drafts else 0
        self.shared_vocab = shared_vocab

    def __call__(self, state: State) -> StepResult:
        """Advance every active row by 1 to depth + 1 tokens; updates `state` in place."""
        signals = _Signals(self, state, state.lengths)
        drafts = self._draft(state, signals)
        kept = self.policy.select(signals)
        attend = QueryTap(dense_attention if kept is None else SparseAttention(kept), self.history_heads())
        ids = torch.cat((state.recent[:, 1:], drafts), dim=1)
        extent = state.extent + self.depth + 1
        hidden = self.target.forward(ids, state.lengths, state.target_cache, attend, extent)
        logits = self.target.logits(hidden)[..., : self.shared_vocab]
        tokens = logits.argmax(dim=-1)
        accepted = (tokens[:, :-1] == drafts).long().cumprod(dim=1).sum(dim=1)
        count = torch.where(state.active, accepted + 1, 0)
        read = state.lengths.float() if kept is None else (kept >= 0).float().sum(dim=3).mean(dim=(0, 2))
        self._advance(state, attend, ids, tokens, accepted)
        return StepResult(tokens, count, read, logits.isfinite().all(dim=2).all(dim=1), logits)

    def history_heads(self) -> dict[int, tuple[int, ...]]:
        """Layer and heads of the target whose queries are to be saved."""
        if self.selection is None or not self.policy.uses_history:
            return {}
        return {self.selection.history.layer: self.selection.history.heads}

    def _draft(self, state: State, signals: _Signals) -> Tensor:
        """Propose `depth` tokens greedily: [batch, depth]. Saves the lookahead queries of the `depth` passes."""
        if self.draft is None:
            return state.recent[:, :0]
        assert state.draft_cache is not None
        entries = self.selection.lookahead if self.selection and self.policy.uses_lookahead else ()
        tap = QueryTap(dense_attention, {entry.layer: entry.heads for entry in entries})
        saved: dict[int, list[Tensor]] = {entry.layer: [] for entry in entries}
        drafts: list[Tensor] = []
        ids, start = state.recent, state.lengths - 1
        for turn in range(self.depth):
            hidden = self.draft.forward(ids, start, state.draft_cache, tap, state.extent + turn + 1)
            for layer, queries in saved.items():
                queries.append(tap.queries[layer][:, -1:])
            ids = self.draft.logits(hidden[:, -1:])[..., : self.shared_vocab].argmax(dim=-1)
            drafts.append(ids)
            start = state.lengths + turn + 1
        signals.lookahead_queries = {layer: torch.cat(queries, dim=1) for layer, queries in saved.items()}
        return torch.cat(drafts, dim=1)

    def _advance(self, state: State, tap: QueryTap, ids: Tensor, tokens: Tensor, accepted: Tensor) -> None:
        """Roll forward by what was accepted. Rejected tokens are left behind by length alone."""
        pick = accepted.unsqueeze(1)
        recent = torch.cat((ids.gather(1, pick), tokens.gather(1, pick)), dim=1)
        state.recent = torch.where(state.active.unsqueeze(1), recent, state.recent)
        if state.history_query is not None:
            (queries,) = tap.queries.values()
            query = queries[torch.arange(len(accepted), device=accepted.device), accepted]
            state.history_query = torch.where(state.active[:, None, None], query, state.history_query)
        state.lengths = torch.where(state.active, state.lengths + accepted + 1, state.lengths)
