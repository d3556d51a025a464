"""What the draft is trained to minimise: divergences from the target's whole distribution, some tokens at a time.

p is the target's distribution, q the draft's. Forward KL (arXiv 1503.02531) is sum p log(p / q). Total variation is
half of sum |p - q|; one minus it is sum min(p, q), the probability that lossless rejection sampling accepts the draft's
token (arXiv 2211.17192, Cor. 3.6), so it is what speculative decoding wants (arXiv 2310.08461).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Weights(NamedTuple):
    """Weight of each divergence in the loss."""

    kl: float = 1.0
    tv: float = 0.0


class Divergence(NamedTuple):
    """Per token, fp32 (float64 of float64 logits)."""

    kl: Tensor
    tv: Tensor


def divergence(target_logits: Tensor, logits: Tensor) -> Divergence:
    """Both divergences of q from p, by their definitions: for measuring, and the reference of `slopes`.

    Args:
        target_logits, logits: [..., vocab] finite, of any floating type; the arithmetic is fp32 or float64.

    Returns:
        [...] each; gradients flow to `logits`.
    """
    log_p, log_q = _log_softmax(target_logits), _log_softmax(logits)
    kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    return Divergence(kl, (log_p.exp() - log_q.exp()).abs().sum(-1) / 2)


def slopes(target_logits: Tensor, logits: Tensor, weights: Weights) -> tuple[Divergence, Tensor]:
    """Both divergences, and the gradient of their weighted sum with respect to `logits`, without autograd.

    d KL / d logits = q - p; d TV / d logits = q (s - sum q s) with s = sign(q - p) / 2. With a vocabulary of 49,152 the
    loss is a matter of memory traffic, and autograd would pass over it twice as often.

    Returns:
        [...] each; [..., vocab] fp32 (float64 of float64 logits).
    """
    log_p, log_q = _log_softmax(target_logits), _log_softmax(logits)
    kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    q = log_q.exp_()
    gap = q - log_p.exp_()
    tv = torch.linalg.vector_norm(gap, 1, dim=-1) / 2
    if not weights.tv:
        return Divergence(kl, tv), gap.mul_(weights.kl)
    signed = gap.sign().mul_(q)
    slope = signed.addcmul_(q, signed.sum(-1, keepdim=True), value=-1).mul_(weights.tv / 2)
    if weights.kl:
        slope.add_(gap, alpha=weights.kl)
    return Divergence(kl, tv), slope


def _log_softmax(logits: Tensor) -> Tensor:
    return F.log_softmax(logits, dim=-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


class Distilled(NamedTuple):
    """Loss of a batch, and the means of its parts without gradient."""

    loss: Tensor
    kl: Tensor
    tv: Tensor


Slopes = Callable[[Tensor, Tensor, Weights], tuple[Divergence, Tensor]]
"""`slopes`, or the same compiled."""


def distil(
    hidden: Tensor, target_hidden: Tensor, head: Tensor, weights: Weights, chunk: int, measure: Slopes = slopes
) -> Distilled:
    """The mean loss over tokens, holding the logits of `chunk` tokens at a time.

    Logits of both models over a vocabulary of 49,152 take 400 KB a token in fp32. The gradient with respect to `hidden`
    is therefore taken chunk by chunk in the forward pass, and kept: 2 KB a token, and nothing is computed twice.

    Args:
        hidden: [tokens, width] the draft's normalised final states; gradients flow to it.
        target_hidden: [tokens, width] the target's.
        head: [vocab, width] of both, in the type that logits are computed in. It is frozen.
    """
    loss, kl, tv = _Chunked.apply(hidden, target_hidden, head, weights, chunk, measure)  # type: ignore[no-untyped-call]
    return Distilled(loss, kl, tv)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, target_hidden: Tensor, head: Tensor, weights: Weights, chunk: int, measure: Slopes
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens = len(hidden)
        gradient = torch.empty_like(hidden)
        kl_sum, tv_sum = (torch.zeros((), dtype=torch.float64, device=hidden.device) for _ in range(2))
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, tokens, chunk):
                ours, theirs = (x[begin : begin + chunk].to(head.dtype) for x in (hidden, target_hidden))
                (kl, tv), slope = measure(F.linear(theirs, head), F.linear(ours, head), weights)
                gradient[begin : begin + chunk] = slope.div_(tokens).to(head.dtype) @ head
                kl_sum += kl.sum(dtype=torch.float64)
                tv_sum += tv.sum(dtype=torch.float64)
        ctx.save_for_backward(gradient)
        kl_mean, tv_mean = kl_sum / tokens, tv_sum / tokens
        mean = (weights.kl * kl_mean + weights.tv * tv_mean).to(hidden.dtype)
        ctx.mark_non_differentiable(kl_mean, tv_mean)
        return mean, kl_mean, tv_mean

    @staticmethod
    def backward(ctx: Any, loss: Tensor, *means: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * loss, None, None, None, None, None
