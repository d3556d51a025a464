"""Drift: what is kept of a batch's steps is each text's own, and the target's reading of it is a pass over all."""

from __future__ import annotations

import pytest
import torch

from dustin_profile.evaluation import drift
from dustin_profile.evaluation.drift import FullVerification, StepLogits
from dustin_profile.evaluation.repetition import repeated
from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.config import LayerHeads, Selection
from dustin_runtime.engine import Engine
from dustin_runtime.generation import Draw
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.policies import make_policy
from dustin_runtime.prompt_store import PromptStore
from dustin_runtime.step import Stepper

SHAPE = ModelShape(
    family="llama", layers=3, hidden=48, ffn=64, query_heads=6, kv_heads=2, head_size=8, vocab=40, context=512,
    tied=True,
)  # fmt: skip
VOCAB, TOKENS = 37, 21
PROMPTS = [[(7 * at * at + by) % 37 for at in range(60 + 9 * by)] for by in range(5)]
SELECTION = Selection(
    budget=24, sink=2, window=4, m=8, history=LayerHeads(layer=1, heads=(1, 5)),
    lookahead=(LayerHeads(layer=1, heads=(0, 4)),),
)  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder(SHAPE, torch.float64, "cpu", seed=1)


def generate(
    target: Decoder, method: str, rows: int, temperature: float = 0.0
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Texts of all prompts, and what the method's steps predicted of each."""
    policy = make_policy(method, SELECTION)
    stepper = Stepper(target, target.first_layers(2), policy, policy.selection, 3, VOCAB, sampled=temperature > 0)
    logits, kept = StepLogits(TOKENS), {}
    draws = [Draw(temperature, seed=number) for number in range(len(PROMPTS))]
    texts, _ = Engine(stepper, rows=rows).generate(
        PROMPTS,
        TOKENS,
        on_step=logits,
        draws=draws,
        on_end=lambda index, text: kept.update({index: logits.of(index).clone()}),
    )
    return [text.tokens for text in texts], [kept[index] for index in range(len(PROMPTS))]


@torch.inference_mode()
def one_pass(target: Decoder, ids: list[int]) -> torch.Tensor:
    """[tokens, vocab] logits of a dense pass over a whole text."""
    hidden = target.forward(
        torch.tensor([ids]), torch.zeros(1, dtype=torch.int64), target.cache(1, len(ids)), dense_attention
    )
    return target.logits(hidden[0])[:, :VOCAB]


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("method", ["vanilla", "sd"])
def test_full_verification_predicts_what_one_pass_does(
    target: Decoder, method: str, temperature: float, rows: int
) -> None:
    texts, kept = generate(target, method, rows, temperature)
    for prompt, text, logits in zip(PROMPTS, texts, kept, strict=True):
        whole = one_pass(target, [*prompt, *text])[len(prompt) : len(prompt) + TOKENS - 1]
        torch.testing.assert_close(logits, whole, atol=1e-9, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_rows_of_a_batch_are_not_mixed(target: Decoder, temperature: float) -> None:
    alone, batched = (generate(target, "dustin", rows, temperature) for rows in (1, 3))
    assert batched[0] == alone[0]
    for one, other in zip(batched[1], alone[1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("chunk", "piece"), [(512, 128), (7, 4)])
@pytest.mark.parametrize("store", [PromptStore(8), None])
def test_divergence_is_that_of_one_pass(
    target: Decoder, store: PromptStore | None, chunk: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift, "PIECE", piece)
    monkeypatch.setattr(drift, "chunk_for", lambda device: chunk)
    texts, kept = generate(target, "dustin", 2)
    verifier = FullVerification(target, max(map(len, PROMPTS)) + TOKENS, VOCAB)
    for index in (3, 0, 4, 0):
        found = verifier.drift(PROMPTS[index], texts[index], kept[index], store)
        whole = one_pass(target, [*PROMPTS[index], *texts[index]])[len(PROMPTS[index]) :][: TOKENS - 1]
        want = torch.distributions.Categorical(logits=whole)
        kl = torch.distributions.kl_divergence(want, torch.distributions.Categorical(logits=kept[index]))
        assert float(found.kl[0]) == 0 and bool(found.agrees[0])
        torch.testing.assert_close(found.kl[1:], kl, atol=1e-6, rtol=1e-4)  # Categorical cuts small probabilities
        assert torch.equal(found.agrees[1:], whole.argmax(-1) == kept[index].argmax(-1))
        assert float(found.kl.max()) > 1e-3
        assert found.by_tokens(8)[2] == pytest.approx(
            (float(found.kl[16:].mean()), float(found.agrees[16:].double().mean()))
        )
        assert len(found.by_tokens(8)) == 3


def test_what_a_text_had_before_is_repeated() -> None:
    assert repeated([1, 2, 3, 4, 5, 6]) == 0
    assert repeated([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repeated([7] * 10) == pytest.approx(6 / 7)
    assert repeated([7, 7]) == 0
