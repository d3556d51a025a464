"""Divergences against naive float64, and the chunked loss against plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recipes.smollm2_135m.losses import Weights, distil, divergence, slopes

VOCAB, WIDTH, TOKENS = 61, 12, 23


def some_logits(seed: int, kind: torch.dtype = torch.float64) -> Tensor:
    return (4 * torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(kind)


@pytest.mark.parametrize(
    ("kind", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)], ids=str
)
def test_divergences_equal_their_definitions(kind: torch.dtype, close: float) -> None:
    target, draft = some_logits(0, kind), some_logits(1, kind)
    p, q = (logits.double().softmax(-1) for logits in (target, draft))
    found = divergence(target, draft)
    assert torch.allclose(found.kl.double(), (p * (p / q).log()).sum(-1), rtol=close, atol=close)
    assert torch.allclose(found.tv.double(), (p - q).abs().sum(-1) / 2, rtol=close, atol=close)


def test_one_minus_total_variation_is_the_expected_acceptance() -> None:
    """Rejection sampling accepts x, drawn from q, with probability min(1, p(x) / q(x))."""
    target, draft = some_logits(0), some_logits(1)
    p, q = target.softmax(-1), draft.softmax(-1)
    accepted = (q * (p / q).clamp(max=1)).sum(-1)
    assert torch.allclose(1 - divergence(target, draft).tv, accepted, rtol=1e-12)


def test_the_runtime_accepts_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    from dustin_runtime.acceptance import accept_sampled

    count = 4000
    p, q = (some_logits(seed)[:1].float().softmax(-1) for seed in (0, 1))
    generator = torch.Generator().manual_seed(2)
    drafts = torch.multinomial(q.expand(count, -1), 1, generator=generator)
    wanted = p.expand(count, 2, -1)  # of the draft, and of the token after it
    u = torch.rand(count, 1, generator=generator)
    _, accepted = accept_sampled(wanted, q.expand(count, 1, -1), drafts, u, torch.rand(count, generator=generator))
    expected = 1 - float(divergence(p.log(), q.log()).tv)
    assert float((accepted > 0).float().mean()) == pytest.approx(expected, abs=4 * (0.25 / count) ** 0.5)


@pytest.mark.parametrize("weights", [Weights(1, 0), Weights(0, 1), Weights(0.3, 0.7)], ids=str)
def test_slopes_are_those_of_autograd(weights: Weights) -> None:
    target, draft = some_logits(0), some_logits(1).requires_grad_()
    expected = divergence(target, draft)
    (weights.kl * expected.kl + weights.tv * expected.tv).sum().backward()
    found, slope = slopes(target, draft.detach(), weights)
    assert torch.allclose(found.kl, expected.kl, rtol=1e-12) and torch.allclose(found.tv, expected.tv, rtol=1e-12)
    assert draft.grad is not None
    assert torch.allclose(slope, draft.grad, rtol=1e-9, atol=1e-13)


def test_a_model_equal_to_its_target_has_no_loss_and_stays() -> None:
    target = some_logits(0)
    found, slope = slopes(target, target.clone(), Weights(1, 1))
    assert float(found.kl.abs().max()) < 1e-12 and float(found.tv.abs().max()) < 1e-12
    assert float(slope.abs().max()) < 1e-12


@pytest.mark.parametrize("chunk", [1, 7, TOKENS, 100])
@pytest.mark.parametrize("weights", [Weights(1, 0), Weights(0, 1), Weights(0.3, 0.7)], ids=str)
def test_chunks_give_the_loss_and_gradient_of_the_whole(chunk: int, weights: Weights) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, wanted = (torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    head = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    plain = hidden.clone().requires_grad_()
    kl, tv = divergence(wanted @ head.T, plain @ head.T)
    expected = (weights.kl * kl + weights.tv * tv).mean()
    (3 * expected).backward()
    ours = hidden.clone().requires_grad_()
    found = distil(ours, wanted, head, weights, chunk)
    (3 * found.loss).backward()
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert (found.kl.item(), found.tv.item()) == pytest.approx((kl.mean().item(), tv.mean().item()), rel=1e-12)
    assert plain.grad is not None and ours.grad is not None
    assert torch.allclose(ours.grad, plain.grad, rtol=1e-10, atol=1e-14)
