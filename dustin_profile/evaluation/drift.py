"""Drift: what traces cannot see. At run time the keys of accepted tokens come from sparse passes: errors may build up.

A method generates; then the target reads the same text with its full cache. The KL divergence between the two, token by
token, says how far the method has come from full verification and whether it gets worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.prefill import chunk_for, prefill
from dustin_runtime.prompt_store import PromptStore
from dustin_runtime.state import StepResult

PIECE = 128
"""Tokens whose distributions are compared at once: in fp64, 150 MB of a vocabulary of 150,000."""


class Drift(NamedTuple):
    """One generated text; entry j is its token j. The first token comes from the prefill and is exact."""

    kl: Tensor
    """[tokens] fp64, KL(full || method) in nats over the shared vocabulary, at temperature 1."""
    agrees: Tensor
    """[tokens] bool, whether the most likely token is the same."""

    def by_tokens(self, bucket: int) -> list[tuple[float, float]]:
        """Mean KL and agreement of every `bucket` tokens; the last ones may be fewer."""
        parts = zip(self.kl.split(bucket), self.agrees.double().split(bucket), strict=True)
        return [(float(kl.mean()), float(agrees.mean())) for kl, agrees in parts]


class StepLogits:
    """What a method's steps predict, kept on the device until a text is complete; an `engine.OnStep`.

    Args:
        tokens: of every text.

    Attributes:
        kept: [rows, tokens + depth - 1, vocab], token j + 1 of the text in a row at j.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._rows: dict[int, int] = {}
        self.kept: Tensor | None = None

    def __call__(self, result: StepResult, whose: Sequence[tuple[int, int] | None]) -> None:
        rows, width, vocab = result.logits.shape
        if self.kept is None:
            self.kept = result.logits.new_empty(rows, self._tokens + width - 2, vocab)
        for row, one in enumerate(whose):
            if one:
                index, emitted = one
                self._rows[index] = row
                # Behind the tokens that the step emits stand those of rejected drafts, which the next step overwrites.
                self.kept[row, emitted - 1 : emitted - 1 + width] = result.logits[row]

    def of(self, index: int) -> Tensor:
        """[tokens - 1, vocab] of a prompt's text behind its first token; valid until the next step."""
        assert self.kept is not None
        return self.kept[self._rows[index], : self._tokens - 1]


class FullVerification:
    """The target with its full cache, behind one prompt or the other.

    Args:
        capacity: tokens of the longest prompt and the longest text.
        vocab: ids below it are compared.
    """

    def __init__(self, target: Decoder, capacity: int, vocab: int) -> None:
        self.target = target
        self.vocab = vocab
        self._cache = target.cache(1, capacity)

    @torch.inference_mode()
    def drift(self, prompt: Sequence[int], text: Sequence[int], have: Tensor, store: PromptStore | None) -> Drift:
        """Compare with what a method predicted.

        Args:
            text: what the method generated.
            have: [len(text) - 1, vocab] the method's logits of its tokens behind the first.
            store: where the prompt is processed, if it is to be held.

        Raises:
            CapacityError: memory does not suffice.
        """
        device, length, cache = self.target.device, len(prompt), self._cache
        chunk = chunk_for(device)
        if store:
            cache.take(store.target(self.target, prompt).prompted.cache, length)
        else:
            prefill(self.target, cache, prompt, chunk=chunk)
        kl = [torch.zeros(1, dtype=torch.float64, device=device)]
        agrees = [torch.ones(1, dtype=torch.bool, device=device)]
        for begin in range(0, len(text) - 1, chunk):
            ids = torch.tensor([text[begin : min(begin + chunk, len(text) - 1)]], device=device)
            start = torch.tensor([length + begin], device=device)
            hidden = self.target.forward(ids, start, cache, dense_attention, length + begin + ids.shape[1])[0]
            theirs = have[begin : begin + len(hidden)]
            for states, logits in zip(hidden.split(PIECE), theirs.split(PIECE), strict=True):
                full = self.target.logits(states)[:, : self.vocab]
                agrees.append(full.argmax(-1) == logits.argmax(-1))
                kl.append(_divergence(full, logits))
        return Drift(torch.cat(kl).cpu(), torch.cat(agrees).cpu())


def _divergence(full: Tensor, method: Tensor) -> Tensor:
    """[tokens] fp64 KL of [tokens, vocab] logits; what rounding makes negative is 0."""
    want, have = full.double().log_softmax(-1), method.double().log_softmax(-1)
    return (want.exp() * (want - have)).sum(-1).clamp(min=0)
