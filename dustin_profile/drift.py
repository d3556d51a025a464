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
from dustin_runtime.engine import Engine
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.prefill import CHUNK, prefill
from dustin_runtime.step import Stepper, StepResult


class Drift(NamedTuple):
    """One generated text; entry j is its token j. The first token comes from the prefill and is exact."""

    kl: Tensor
    """[tokens] fp64, KL(full || method) in nats over the shared vocabulary."""
    agrees: Tensor
    """[tokens] bool, whether full verification would have chosen the same token."""


@torch.inference_mode()
def measure(stepper: Stepper, prompt: Sequence[int], tokens: int) -> Drift:
    """Generate `tokens` tokens (end-of-text is ignored) and compare with full verification.

    Raises:
        CapacityError: prompt and output exceed the model's context.
    """
    logits: list[Tensor] = []

    def keep(result: StepResult, emitted: list[int]) -> None:
        logits.append(result.logits[0, : int(result.count[0])].float().cpu())

    (generation,), statistics = Engine(stepper).generate([prompt], tokens, on_step=keep)
    if statistics.interrupted:
        raise KeyboardInterrupt
    sparse = torch.cat(logits)[: tokens - 1]
    full = full_logits(stepper.target, prompt, generation.tokens, stepper.shared_vocab)
    chosen = torch.tensor(generation.tokens)
    agrees = full.argmax(dim=-1) == chosen
    want, have = full[1:].double().log_softmax(-1), sparse.double().log_softmax(-1)
    kl = (want.exp() * (want - have)).sum(-1)
    return Drift(torch.cat((kl.new_zeros(1), kl.clamp(min=0))), agrees)


def full_logits(model: Decoder, prompt: Sequence[int], text: Sequence[int], vocab: int) -> Tensor:
    """Logits of full verification for every token of `text` after `prompt`: [len(text), vocab] fp32, on the CPU."""
    cache = model.cache(1, len(prompt) + len(text))
    if len(prompt) > 1:
        prefill(model, cache, prompt[:-1])
    ids = [prompt[-1], *text[:-1]]
    parts = []
    for begin in range(0, len(ids), CHUNK):
        chunk = torch.tensor([ids[begin : begin + CHUNK]], device=model.device)
        start = torch.tensor([len(prompt) - 1 + begin], device=model.device)
        hidden = model.forward(chunk, start, cache, dense_attention)
        parts.append(model.logits(hidden[0])[:, :vocab].float().cpu())
    return torch.cat(parts)


def by_tokens(drifts: Sequence[Drift], bucket: int) -> list[tuple[int, float, float]]:
    """Mean over texts in buckets of generated tokens: (tokens generated at the bucket's end, KL, agreement)."""
    kl = torch.stack([drift.kl for drift in drifts]).mean(0)
    agrees = torch.stack([drift.agrees for drift in drifts]).double().mean(0)
    rows = []
    for begin in range(0, len(kl), bucket):
        part = slice(begin, begin + bucket)
        rows.append((min(begin + bucket, len(kl)), float(kl[part].mean()), float(agrees[part].mean())))
    return rows
