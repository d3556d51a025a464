"""Fidelity: how far a policy's predictions lie from full verification's, on the same text (arXiv 2606.24957, App. B).

A text is verified window by window as if every draft were right. The target's keys of the window come from the policy's
own passes, as when it serves. All policies of a document share one prefill: what they write lies behind the prompt, and
is overwritten by the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.tap import QueryTap
from dustin_runtime.cache import KVCache
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.policies import Policy
from dustin_runtime.prefill import CHUNK, chunk_for, prefill
from dustin_runtime.signals import StepSignals
from dustin_runtime.step import State, Stepper


class Fidelity(NamedTuple):
    """One text under one policy; entry j of a tensor is its token j."""

    kl: Tensor
    """[tokens] fp64, KL(full || policy) in nats over the shared vocabulary."""
    agrees: Tensor
    """[tokens] bool, whether both would choose the same token."""
    loss: Tensor
    """[tokens] fp64, -log p of the text's token, in nats."""
    read: float
    """Prefix tokens that a KV head read per step, mean over layers, heads and steps."""


@dataclass(frozen=True)
class Prefilled:
    """A prompt in the caches of both models, for any number of policies, with what full verification makes of the text.

    Attributes:
        queries: of the prompt's last tokens, by layer of the target.
        full: [tokens, vocab] fp32 log-probabilities of full verification.
    """

    target: Decoder
    draft: Decoder
    target_cache: KVCache
    draft_cache: KVCache
    prompt: Sequence[int]
    text: Sequence[int]
    queries: dict[int, Tensor]
    full: Tensor

    @property
    def loss(self) -> Tensor:
        """[tokens] fp64, -log p of the text's tokens under full verification."""
        return _loss(self.full, self.text)


class TextStepper(Stepper):
    """Steps through a given text: the drafts are its tokens, and all of them are accepted.

    Attributes:
        text: [1, depth + 1] int64, the tokens that the next step verifies and the one behind.
    """

    text: Tensor

    def draft_tokens(self, state: State, signals: StepSignals) -> tuple[Tensor, None]:
        """The text's tokens; the draft reads them where its queries are scored."""
        if self.draft is not None and self.lookahead_heads is not None:
            assert state.draft_cache is not None
            ids = state.recent
            starts = [state.lengths - 1, *(state.lengths + turn for turn in range(1, self.depth))]
            attend = self._draft_attention(state.draft_cache.ring)
            for turn, start in enumerate(starts):
                tap = signals.tap(attend, last=turn == self.depth - 1)
                self.draft.forward(ids, start, state.draft_cache, tap, state.extent + turn + 1)
                ids = self.text[:, turn : turn + 1]
        return self.text[:, : self.depth], None

    def _accept(
        self, state: State, logits: Tensor, best: Tensor, drafts: Tensor, draft_probabilities: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self.text, torch.full_like(state.lengths, self.depth)


@torch.inference_mode()
def prepare(
    target: Decoder, draft: Decoder, prompt: Sequence[int], text: Sequence[int], vocab: int, depth: int, window: int
) -> Prefilled:
    """Prefill both models and verify the text in full.

    Args:
        text: what follows the prompt.
        vocab: ids below it are compared.
        window: most last queries of the prompt that a policy asks for (`Policy.prompt_queries`).

    Raises:
        CapacityError: memory does not suffice.
    """
    capacity = len(prompt) + len(text) + 2 * (depth + 1)
    target_cache, draft_cache = target.cache(1, capacity), draft.cache(1, capacity)
    chunk = chunk_for(target.device)
    tap = QueryTap(dense_attention, range(target.shape.layers), last=max(window, 1))
    last = prefill(target, target_cache, prompt, attend=tap, chunk=chunk, tail=window)
    prefill(draft, draft_cache, prompt, chunk=chunk)
    rows = [target.logits(last)[None, :vocab].float().log_softmax(-1)]
    for begin in range(0, len(text) - 1, CHUNK):
        ids = torch.tensor([text[begin : min(begin + CHUNK, len(text) - 1)]], device=target.device)
        start = torch.tensor([len(prompt) + begin], device=target.device)
        hidden = target.forward(ids, start, target_cache, dense_attention)
        rows.append(target.logits(hidden[0])[:, :vocab].float().log_softmax(-1))
    return Prefilled(target, draft, target_cache, draft_cache, prompt, text, dict(tap.queries), torch.cat(rows))


@torch.inference_mode()
def measure(ready: Prefilled, policy: Policy, depth: int, vocab: int) -> Fidelity:
    """Verify the text with one policy. Its first token comes from the prefill, which is the same for all.

    Args:
        depth: tokens that a step verifies beyond the pending one.
    """
    stepper = TextStepper(ready.target, ready.draft, policy, policy.selection, depth, vocab)
    depth = stepper.depth
    device, length, text = ready.target.device, len(ready.prompt), list(ready.text)
    state = _state(ready, stepper)
    padded = torch.tensor([text + text[-1:] * (depth + 1)], device=device)  # the last step looks beyond the end
    kl, agrees, loss, read = [], [], [], []
    for begin in range(0, len(text) - 1, depth + 1):
        stepper.text = padded[:, begin + 1 : begin + depth + 2]
        state.extent = length + begin
        result = stepper(state)
        count = min(depth + 1, len(text) - 1 - begin)
        have = result.logits[0, :count].float().log_softmax(-1)
        want = ready.full[begin + 1 : begin + 1 + count]
        kl.append((want.exp() * (want - have)).double().sum(-1).clamp(min=0))
        agrees.append(want.argmax(-1) == have.argmax(-1))
        loss.append(_loss(have, text[begin + 1 : begin + 1 + count]))
        read.append(result.packed[0, -2])
    first = _loss(ready.full[:1], text[:1])
    return Fidelity(
        torch.cat([first.new_zeros(1), *kl]).cpu(),
        torch.cat([agrees[0].new_ones(1), *agrees]).cpu() if agrees else torch.ones(1, dtype=torch.bool),
        torch.cat([first, *loss]).cpu(),
        float(torch.stack(read).mean()) if read else float(length),
    )


def _state(ready: Prefilled, stepper: Stepper) -> State:
    """A state behind the prompt, over the shared caches."""
    shape, device, length = ready.target.shape, ready.target.device, len(ready.prompt)
    small = stepper.state(1, stepper.depth + 2)  # the caches of this one are not used
    capacity = ready.target_cache.capacity
    memory = stepper.policy.memory(shape, 1, capacity, ready.target.dtype, device)
    if memory:
        last = stepper.policy.prompt_queries
        queries = {layer: q[:, -last:] for layer, q in ready.queries.items()} if last else {}
        memory.admit(0, queries, ready.target_cache, length)
    heads = stepper.history_heads
    return replace(
        small,
        target_cache=ready.target_cache,
        draft_cache=ready.draft_cache,
        lengths=torch.tensor([length], device=device),
        recent=torch.tensor([[ready.prompt[-1], ready.text[0]]], device=device),
        history_query=heads.gather_last([ready.queries]) if heads else None,
        active=torch.ones(1, dtype=torch.bool, device=device),
        memory=memory,
        extent=length,
    )


def _loss(log_probabilities: Tensor, text: Sequence[int]) -> Tensor:
    ids = torch.tensor(list(text), device=log_probabilities.device).unsqueeze(1)
    return -log_probabilities.double().gather(1, ids).squeeze(1)
