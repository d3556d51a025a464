"""What the draft is trained to minimise: divergences from the target's whole distribution, some tokens at a time.

p is the target's distribution, q the draft's. Forward KL (arXiv 1503.02531) is sum p log(p / q). Total variation is
half of sum |p - q|; one minus it is sum min(p, q), the probability that lossless rejection sampling accepts the draft's
token (arXiv 2211.17192, Cor. 3.6), so it is what speculative decoding wants (arXiv 2310.08461).
"""

from __future__ import annotations

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
    """Both divergences of q from p.

    Args:
        target_logits, logits: [..., vocab], of any floating type; the arithmetic is fp32 or float64.

    Returns:
        [...] each; gradients flow to `logits`.
    """
    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_p = F.log_softmax(target_logits, dim=-1, dtype=kind)
    log_q = F.log_softmax(logits, dim=-1, dtype=kind)
    p = log_p.exp()
    # p = 0 where its logarithm is -inf (a masked logit): such an id adds nothing.
    kl = (p * (log_p - log_q).masked_fill(p == 0, 0)).sum(-1)
    return Divergence(kl, (p - log_q.exp()).abs().sum(-1) / 2)


class Distilled(NamedTuple):
    """Loss of a batch, and the means of its parts without gradient."""

    loss: Tensor
    kl: Tensor
    tv: Tensor


def distil(hidden: Tensor, target_hidden: Tensor, head: Tensor, weights: Weights, chunk: int) -> Distilled:
    """The mean loss over tokens, holding the logits of `chunk` tokens at a time.

    Logits of both models over a vocabulary of 49,152 take 400 KB a token in fp32. The gradient with respect to `hidden`
    is therefore taken chunk by chunk in the forward pass, and kept: 2 KB a token, and nothing is computed twice.

    Args:
        hidden: [tokens, width] the draft's normalised final states; gradients flow to it.
        target_hidden: [tokens, width] the target's.
        head: [vocab, width] of both, in the type that logits are computed in. It is frozen.
    """
    loss, kl, tv = _Chunked.apply(hidden, target_hidden, head, weights, chunk)  # type: ignore[no-untyped-call]
    return Distilled(loss, kl, tv)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, target_hidden: Tensor, head: Tensor, weights: Weights, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens = len(hidden)
        gradient = torch.empty_like(hidden)
        kl_sum, tv_sum = (torch.zeros((), dtype=torch.float64, device=hidden.device) for _ in range(2))
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, tokens, chunk):
                part = hidden[begin : begin + chunk].detach().requires_grad_()
                target_logits = F.linear(target_hidden[begin : begin + chunk].to(head.dtype), head)
                with torch.enable_grad():
                    kl, tv = divergence(target_logits, F.linear(part.to(head.dtype), head))
                    loss = (weights.kl * kl.sum() + weights.tv * tv.sum()) / tokens
                gradient[begin : begin + chunk] = torch.autograd.grad(loss, part)[0]
                kl_sum += kl.detach().sum(dtype=torch.float64)
                tv_sum += tv.detach().sum(dtype=torch.float64)
        ctx.save_for_backward(gradient)
        kl_mean, tv_mean = kl_sum / tokens, tv_sum / tokens
        mean = (weights.kl * kl_mean + weights.tv * tv_mean).to(hidden.dtype)
        ctx.mark_non_differentiable(kl_mean, tv_mean)
        return mean, kl_mean, tv_mean

    @staticmethod
    def backward(ctx: Any, loss: Tensor, *means: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * loss, None, None, None, None
