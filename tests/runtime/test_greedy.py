"""Greedy continuations of several rows against passes over everything before each token."""

from __future__ import annotations

import pytest
import torch

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.greedy import GreedyDecoder
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.prefill import prefill

VOCAB = 190
SHAPE = ModelShape(
    family="qwen2",
    hidden=64,
    layers=3,
    query_heads=4,
    kv_heads=2,
    head_size=16,
    ffn=96,
    vocab=200,
    context=256,
    norm_eps=1e-6,
    tied=True,
)
PROMPTS = [
    torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (31, 7)
]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_decoder(SHAPE, torch.float32, "cpu", 3)


def naive(model: Decoder, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        hidden = model.forward(
            torch.tensor([ids]), torch.zeros(1, dtype=torch.int64), model.cache(1, 64), dense_attention
        )
        ids.append(int(model.logits(hidden)[0, -1, :VOCAB].argmax()))
    return ids[len(prompt) :]


def continued(model: Decoder, rows: int, prompts: list[list[int]], most: int, stop: int = -1) -> list[list[int]]:
    cache = model.cache(rows, 64)
    decoder = GreedyDecoder(model, cache, VOCAB, most)
    hidden = torch.stack([prefill(model, cache.row(row), prompt) for row, prompt in enumerate(prompts)])
    return decoder(hidden, [len(prompt) for prompt in prompts], lambda tokens: tokens[-1] == stop)


@pytest.mark.parametrize("most", [1, 2, 12])
@pytest.mark.parametrize("rows", [2, 3])
def test_every_row_is_continued_as_if_alone(model: Decoder, rows: int, most: int) -> None:
    assert continued(model, rows, PROMPTS, most) == [naive(model, prompt, most) for prompt in PROMPTS]


def test_a_row_ends_at_its_stop_and_the_others_go_on(model: Decoder) -> None:
    expected = [naive(model, prompt, 12) for prompt in PROMPTS]
    stop = next(token for token in expected[0][1:] if token not in expected[1])
    first = expected[0][: expected[0].index(stop) + 1]
    assert 1 < len(first) < 12
    assert continued(model, 2, PROMPTS, 12, stop) == [first, expected[1]]


def test_one_decoder_serves_one_group_after_the_other(model: Decoder) -> None:
    cache = model.cache(2, 64)
    decoder = GreedyDecoder(model, cache, VOCAB, 9)
    for group in (PROMPTS, PROMPTS[1:], PROMPTS[::-1]):
        hidden = torch.stack([prefill(model, cache.row(row), prompt) for row, prompt in enumerate(group)])
        found = decoder(hidden, [len(prompt) for prompt in group], lambda tokens: False)
        assert found == [naive(model, prompt, 9) for prompt in group]
