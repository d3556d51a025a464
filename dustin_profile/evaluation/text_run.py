"""Steps through a given text: what a policy's verification predicts, were every draft right.

On a GPU the steps are replays of one graph, as when the policy serves. Its capture costs about three steps, which is
less than launching the operations of all steps one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dustin_runtime.cache import KVCache
from dustin_runtime.graph import StepGraph, capturable
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.policies import Policy
from dustin_runtime.policies.base import Prompted, Verification
from dustin_runtime.signals import StepSignals
from dustin_runtime.state import State, StepResult
from dustin_runtime.step import Stepper


@dataclass(frozen=True)
class Prefilled:
    """A prompt in the caches of both models, for any number of policies, with what full verification makes of the text.

    Attributes:
        prompted, drafted: the prompt as target and draft have processed it.
        full: [tokens, vocab] fp32 log-probabilities of full verification.
        text_queries: by layer, [1, tokens - 1, query_heads, head_size] of the text under full verification.
        text_keys: [layers, tokens - 1, kv_heads, head_size] likewise.
        draft_queries: by layer of the draft, [1, tokens + depth - 1, query_heads, head_size] of the text and what the
            last step looks at beyond it; `draft_cache` holds their keys.
        served_cache: the target's that policies read and write; `target_cache` if that is not of another dtype.
    """

    target: Decoder
    draft: Decoder
    target_cache: KVCache
    draft_cache: KVCache
    prompt: Sequence[int]
    text: Sequence[int]
    prompted: Prompted
    drafted: Prompted
    full: Tensor
    text_queries: list[Tensor]
    text_keys: Tensor
    draft_queries: list[Tensor]
    served_cache: KVCache

    @property
    def loss(self) -> Tensor:
        """[tokens] fp64, -log p of the text's tokens under full verification."""
        return log_loss(self.full, torch.tensor(self.text, device=self.full.device))


class TextStepper(Stepper):
    """A stepper whose drafts are the tokens of a text, all of which are accepted."""

    verified: Verification
    """What the last step verified with."""

    def __init__(self, ready: Prefilled, policy: Policy, depth: int, vocab: int) -> None:
        super().__init__(ready.target, ready.draft, policy, policy.selection, depth, vocab)
        self.prompt = len(ready.prompt)
        self.queries = ready.draft_queries
        self.text = torch.tensor(padded(ready.text, self.depth), device=ready.target.device)
        self.ahead = torch.arange(1, self.depth + 2, device=ready.target.device)

    def following(self, state: State) -> Tensor:
        """[1, depth + 1], the text's tokens behind the pending one."""
        return self.text[self._begin(state) + self.ahead].unsqueeze(0)

    def _begin(self, state: State) -> Tensor:
        """[1], tokens of the text before the pending one. On the device, as a graph has to read it at every replay."""
        return state.lengths - self.prompt

    def _verification(self, signals: StepSignals) -> Verification:
        self.verified = super()._verification(signals)
        return self.verified

    def draft_tokens(self, state: State, signals: StepSignals) -> tuple[Tensor, None]:
        """The text's tokens. A pass of the draft ends at the pending one, and others at these (`Stepper.passes`)."""
        if self.lookahead_heads is not None:
            assert self.draft_budget is None  # or its queries would depend on what it read
            begin = self._begin(state)
            for turn in range(self.passes):
                passed = {
                    layer: self.queries[layer].index_select(1, begin + turn) for layer in self.lookahead_heads.layers
                }
                signals.given(passed)
        return self.following(state)[:, : self.depth], None

    def _accept(
        self, state: State, logits: Tensor, best: Tensor, drafts: Tensor, draft_probabilities: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self.following(state), torch.full_like(state.lengths, self.depth)


class TextRun:
    """One policy on its way through the text of a prepared prompt, whose caches it shares with others.

    Args:
        depth: tokens that a step verifies beyond the pending one.
        vocab: ids below it are compared.
        graph: whether steps are replays of a graph where there can be one.
    """

    def __init__(self, ready: Prefilled, policy: Policy, depth: int, vocab: int, graph: bool = True) -> None:
        self.stepper = TextStepper(ready, policy, depth, vocab)
        self.state = _state(ready, self.stepper)
        self._prompt = len(ready.prompt)
        graph = graph and len(ready.text) > 1 and capturable(self.stepper.target, self.stepper.draft)
        self._captured = StepGraph(self.stepper, self.state) if graph else None
        # Only now, for what a policy keeps would grow in the steps before a capture.
        if self.state.memory:
            last = policy.prompt_queries
            drafted = _with_last(ready.drafted, last) if self.stepper.draft else None
            self.state.memory.admit(0, _with_last(ready.prompted, last), drafted)
        self.state.active.fill_(True)

    def step(self, begin: int) -> StepResult:
        """Verify the tokens behind the pending one.

        Args:
            begin: tokens of the text before that; each step leaves it `depth + 1` further on.

        Returns:
            What the next step may overwrite.
        """
        if self._captured:
            return self._captured()
        self.state.extent = self._prompt + begin
        return self.stepper(self.state)


def padded(text: Sequence[int], depth: int) -> list[int]:
    """The text and as much as its last step may look beyond it."""
    return [*text] + [text[-1]] * (depth + 1)


def log_loss(log_probabilities: Tensor, ids: Tensor) -> Tensor:
    """[tokens] fp64, -log p of each token, of [tokens, vocab]."""
    return -log_probabilities.gather(1, ids.unsqueeze(1)).squeeze(1).double()


def _state(ready: Prefilled, stepper: Stepper) -> State:
    """A state behind the prompt, over the shared caches; its row is not active."""
    device = ready.target.device
    small = stepper.state(1, stepper.depth + 2)  # the caches of this one are not used
    capacity = ready.served_cache.capacity
    heads = stepper.history_heads
    return replace(
        small,
        target_cache=ready.served_cache,
        draft_cache=ready.draft_cache,
        lengths=torch.tensor([len(ready.prompt)], device=device),
        recent=torch.tensor([[ready.prompt[-1], ready.text[0]]], device=device),
        history_query=heads.gather_last([ready.prompted.queries]) if heads else None,
        memory=stepper.policy.memory(ready.target, stepper.depth, 1, capacity),
        extent=capacity - stepper.depth - 1,
    )


def _with_last(prompted: Prompted, tokens: int) -> Prompted:
    """With the queries of so many last tokens."""
    queries = {layer: q[:, -tokens:] for layer, q in prompted.queries.items()} if tokens else {}
    return replace(prompted, queries=queries)
