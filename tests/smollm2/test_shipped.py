"""The weights that ship: they guess what their target says next, on text they were not trained on."""

from __future__ import annotations

import pytest
import torch

from dustin_profile.texts import topics
from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.loading import Pair, open_pair
from dustin_runtime.models import ops
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.prefill import prefill
from dustin_runtime.scaled import E4M3, HEADROOM, scale_for

TOKENS = 512


@pytest.fixture(scope="module")
def pair() -> Pair:
    return open_pair("smollm2", "recipe:smollm2-135m-draft", offline=True)


@pytest.fixture(scope="module")
def target(pair: Pair) -> Decoder:
    return pair.load_target(torch.float32, "cpu")


@pytest.fixture(scope="module")
def choices(pair: Pair, target: Decoder) -> torch.Tensor:
    return chosen(target, pair)


@torch.inference_mode()
def chosen(model: Decoder, pair: Pair) -> torch.Tensor:
    """[TOKENS], the token that a model puts first behind each of the topics' tokens."""
    ids = torch.tensor([pair.tokenizer.encode(topics()[100_000:110_000])[:TOKENS]])
    hidden = model.forward(ids, torch.zeros(1, dtype=torch.int64), model.cache(1, TOKENS), dense_attention, TOKENS)
    return model.logits(hidden[0]).argmax(-1)


def test_the_draft_agrees_with_its_target(pair: Pair, target: Decoder, choices: torch.Tensor) -> None:
    assert pair.draft_stores == "layers"
    agreed = float((chosen(pair.load_draft(target), pair) == choices).double().mean())
    assert agreed > 0.5


def test_the_targets_first_layers_do_not(pair: Pair, target: Decoder, choices: torch.Tensor) -> None:
    """So the test above can fail."""
    agreed = float((chosen(target.first_layers(6), pair) == choices).double().mean())
    assert agreed < 0.2


@torch.inference_mode()
def what_follows(target: Decoder, ids: list[int], prompt: int, dtype: torch.dtype | None) -> torch.Tensor:
    """Log probabilities [len(ids) - prompt, vocabulary] behind a prompt, full verification over a cache of `dtype`."""
    cache = target.cache(1, len(ids), dtype)
    prefill(target, cache, ids[:prompt])
    hidden = target.forward(torch.tensor([ids[prompt:]]), torch.tensor([prompt]), cache, dense_attention, len(ids))
    return target.logits(hidden[0]).log_softmax(-1)


@pytest.mark.parametrize("prompt", [1, 400])
def test_an_8_bit_cache_stays_near_the_models(
    pair: Pair, target: Decoder, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one token sets the scales. Measured: 0.007 to 0.022 nats; scales that leave no room cost more."""
    ids = pair.tokenizer.encode(topics()[100_000:110_000])[:TOKENS]
    own = what_follows(target, ids, prompt, None)

    def kl_of_8_bits() -> float:
        return float((own.exp() * (own - what_follows(target, ids, prompt, E4M3))).sum(-1).mean())

    assert kl_of_8_bits() < 0.04
    monkeypatch.setattr(ops, "scale_for", lambda largest: scale_for(largest) / (4 * HEADROOM))
    assert kl_of_8_bits() > 0.04
