"""H2O against brute force: whole attention matrices of a prompt, then token by token, ties and ragged rows included."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.sparse import sparse_reference
from dustin_runtime.attention.tap import MassTap
from dustin_runtime.cache import KVCache
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.policies.base import Prompted
from dustin_runtime.policies.h2o import HeavyHitters, ObservedAttention, heaviest

LAYERS, KV_HEADS, GROUP, SIZE = 2, 2, 3, 8
DEPTH, CAPACITY = 3, 160
SHAPE = ModelShape(
    family="llama", layers=LAYERS, hidden=48, ffn=64, query_heads=KV_HEADS * GROUP, kv_heads=KV_HEADS, head_size=SIZE,
    vocab=40, context=512,
)  # fmt: skip

Scores = dict[int, float]
"""By listed position, what it has received."""


def random(*size: int, seed: int, steps: int | None = None) -> Tensor:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return x if steps is None else (x * steps).round() / steps


def row_of(q: Tensor, k: Tensor, seen: list[int]) -> Tensor:
    """One query's attention: q [head_size], k [positions, head_size]."""
    return (k[seen] @ q / math.sqrt(SIZE)).softmax(-1)


def drop(scores: Scores, length: int, budget: int) -> Scores:
    """The published rule: the last half stays, of the others the largest."""
    older = [p for p in scores if p < length - budget // 2]
    room = budget - (len(scores) - len(older))
    stays = sorted(older, key=lambda p: (-scores[p], p))[:room] + [p for p in scores if p not in older]
    return {p: scores[p] for p in sorted(stays)}


@pytest.mark.parametrize(("lengths", "budget"), [([50, 9], 12), ([30, 31], 31), ([1, 100], 17)])
@pytest.mark.parametrize("steps", [None, 1])
def test_h2o_lists_what_a_loop_over_tokens_lists(lengths: list[int], budget: int, steps: int | None) -> None:
    """Two rows, of whose drafts different numbers are accepted."""
    k = random(LAYERS, 2, CAPACITY, KV_HEADS, SIZE, seed=1, steps=steps)
    q = random(LAYERS, 2, CAPACITY, KV_HEADS * GROUP, SIZE, seed=2, steps=steps)
    memory = HeavyHitters(SHAPE, DEPTH, 2, budget, torch.device("cpu"))
    want: dict[tuple[int, int, int], Scores] = {}
    for row, length in enumerate(lengths):
        tap = MassTap(dense_attention)
        for begin in range(0, length, 16):  # chunk by chunk, as a prefill
            end = min(begin + 16, length)
            for layer in range(LAYERS):
                chunk, keys = q[layer, row : row + 1, begin:end], k[layer, row : row + 1, :end]
                tap(layer, chunk, keys, keys, torch.tensor([begin]))
        one = k[:, row : row + 1]
        memory.admit(row, Prompted(length, KVCache(one, one), received=tap.received), None)
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                scores = dict.fromkeys(range(length), 0.0)
                for at in range(length):
                    pay(scores, q[layer, row, at], k[layer, row], head, list(range(at + 1)))
                want[layer, row, head] = drop(scores, length, budget)

    for accepted in ([0, 3], [3, 1], [2, 2], [3, 3], [0, 0], *[[3, 3]] * 6):
        lists = memory.lists(torch.tensor(lengths))
        assert torch.equal(lists, memory.lists(torch.tensor(lengths)))
        attend = ObservedAttention(memory, lists)
        for (layer, row, head), scores in want.items():
            found = lists[layer, row, head]
            assert found.tolist() == list(scores) + [-1] * (budget - len(scores))
            mass = memory.mass[layer, row, head, : len(scores)]
            torch.testing.assert_close(mass, torch.tensor(list(scores.values())), rtol=1e-4, atol=1e-4)
        start = torch.tensor(lengths)
        at = start.unsqueeze(1) + torch.arange(DEPTH + 1)
        for layer in range(LAYERS):
            queries = q[layer, torch.arange(2).unsqueeze(1), at]
            out = attend(layer, queries, k[layer], k[layer], start)
            torch.testing.assert_close(out, sparse_reference(queries, k[layer], k[layer], start, lists[layer]))
        torch.testing.assert_close(attend.tokens_read(start), (lists >= 0).sum((0, 2, 3)).float() / (LAYERS * KV_HEADS))
        for (layer, row, head), scores in want.items():
            listed, length = list(scores), lengths[row]
            for place in range(length, length + accepted[row] + 1):
                scores[place] = 0.0
                seen = [*listed, *range(length, place + 1)]
                pay(scores, q[layer, row, place], k[layer, row], head, seen)
            want[layer, row, head] = drop(scores, length + accepted[row] + 1, budget)
        lengths = [length + count + 1 for length, count in zip(lengths, accepted, strict=True)]


def pay(scores: Scores, q: Tensor, k: Tensor, kv_head: int, seen: list[int]) -> None:
    """Add one token's attention, of all query heads of a KV head."""
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        for position, share in zip(seen, row_of(q[head], k[:, kv_head], seen).tolist(), strict=True):
            scores[position] += share


def test_of_equal_tokens_the_first_are_kept() -> None:
    positions, mass = heaviest(torch.arange(20)[None], torch.ones(1, 20), torch.tensor(20), 7)
    assert positions.tolist() == [[0, 1, 2, 3, 17, 18, 19]]
    assert mass.tolist() == [[1.0] * 7]


def test_a_row_that_has_ended_lists_nothing_new() -> None:
    memory = HeavyHitters(SHAPE, DEPTH, 1, 8, torch.device("cpu"))
    one = torch.zeros(LAYERS, 1, 40, KV_HEADS, SIZE)
    received = {layer: torch.ones(1, KV_HEADS, 30) for layer in range(LAYERS)}
    memory.admit(0, Prompted(30, KVCache(one, one), received=received), None)
    for _ in range(3):
        assert memory.lists(torch.tensor([1])).max() < 1
