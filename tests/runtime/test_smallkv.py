"""SmallKV against brute force: matched heads, tiers, and attention with weights that stand in, ties and ragged rows."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from dustin_runtime.cache import KVCache
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.policies import smallkv
from dustin_runtime.policies.base import Prompted
from dustin_runtime.policies.smallkv import HeadMap, SmallKVAttention, tiers

KV_HEADS, GROUP, SIZE = 2, 3, 8
TARGET = ModelShape(
    family="llama", layers=2, hidden=48, ffn=64, query_heads=6, kv_heads=KV_HEADS, head_size=SIZE, vocab=40, context=512
)


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def prompted(layers: int, query_heads: int, kv_heads: int, length: int, seed: int) -> Prompted:
    keys = normal(layers, 1, length + 5, kv_heads, SIZE, seed=seed)
    window = min(20, length)
    queries = {layer: normal(1, window, query_heads, SIZE, seed=seed + 1 + layer) for layer in range(layers)}
    return Prompted(length, KVCache(keys, keys), queries)


def most_attended(of: Prompted, layer: int, head: int, group: int) -> set[int]:
    mass = torch.zeros(of.length)
    window = of.queries[layer].shape[1]
    keys = of.cache.keys[layer, 0, :, head // group]
    for place in range(window):
        seen = of.length - window + place + 1
        mass[:seen] += (keys[:seen] @ of.queries[layer][0, place, head] / math.sqrt(SIZE)).softmax(-1)
    compared = of.length - window if of.length >= 2 * window else of.length
    return set(sorted(range(compared), key=lambda p: (-float(mass[p]), p))[: min(math.ceil(compared / 4), 9)])


@pytest.mark.parametrize("length", [61, 40, 39, 8, 1])
def test_each_head_is_matched_to_the_one_most_like_it(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many are equally like it: the first of them is taken."""
    monkeypatch.setattr(smallkv, "MOST_COMPARED", 9)
    target, draft = prompted(2, 6, KV_HEADS, length, 1), prompted(3, 4, 1, length, 9)
    memory = HeadMap(TARGET, 2, torch.device("cpu"))
    memory.admit(1, target, draft)
    theirs = [most_attended(draft, layer, head, 4) for layer in range(3) for head in range(4)]
    for layer in range(2):
        for head in range(6):
            own = most_attended(target, layer, head, GROUP)
            alike = [len(own & other) / len(own | other) for other in theirs]
            assert int(memory.heads[layer, 1, head]) == alike.index(max(alike))


def expected_tiers(scores: list[float], length: int, budget: int) -> tuple[list[int], list[int]]:
    if length <= budget:
        return list(range(length)), []
    critical, recent = budget // 2, budget // 4
    last = list(range(length - recent, length))
    order = sorted(range(length - recent), key=lambda p: (-scores[p], p))
    return sorted(order[:critical] + last), order[critical : critical + 2 * (budget - critical - recent)]


@pytest.mark.parametrize("seed", range(10))
def test_tiers(seed: int) -> None:
    chance = random.Random(seed)
    lengths, budget = [chance.randint(1, 60), 60], chance.randint(4, 40)
    scores = [[[chance.choice((0, 1, 2, 3)) / 4 for _ in range(62)] for _ in range(KV_HEADS)] for _ in lengths]
    full, marginal = tiers(torch.tensor(scores), torch.tensor(lengths), budget)
    for row, length in enumerate(lengths):
        for head in range(KV_HEADS):
            want = expected_tiers(scores[row][head], length, budget)
            assert full[row, head].tolist() == want[0] + [-1] * (budget - len(want[0]))
            assert [p for p in marginal[row, head].tolist() if p >= 0] == want[1]


@pytest.mark.parametrize("lengths", [[50, 20], [33, 16], [9, 1]])
def test_weights_of_the_draft_stand_in_for_marginal_tokens(lengths: list[int]) -> None:
    """Query by query, head by head, with budget 16 and two drafted tokens."""
    depth, heads, budget, extent = 2, 5, 16, 64
    rows = normal(2, heads, depth, extent, seed=1).softmax(-1)
    memory = HeadMap(TARGET, 2, torch.device("cpu"))
    memory.heads.random_(0, heads, generator=torch.Generator().manual_seed(2))
    start = torch.tensor(lengths)
    attend = SmallKVAttention(memory, rows, start, budget)
    read = torch.zeros(2)
    for layer in range(2):
        q = normal(2, depth + 1, KV_HEADS * GROUP, SIZE, seed=3)
        k, v = normal(2, extent, KV_HEADS, SIZE, seed=4), normal(2, extent, KV_HEADS, SIZE, seed=5)
        out = attend(layer, q, k, v, start)
        for row, length in enumerate(lengths):
            for kv_head in range(KV_HEADS):
                matched = memory.heads[layer, row, kv_head * GROUP : (kv_head + 1) * GROUP].tolist()
                scores = sum(rows[row, head].sum(0) for head in matched).tolist()  # type: ignore[union-attr]
                full, marginal = expected_tiers(scores, length, budget)
                found = attend.kept(layer)[row, kv_head]
                assert found.tolist() == full + [-1] * (budget - len(full))
                read[row] += (len(full) + len(marginal) / 2) / KV_HEADS / 2
                for member, head in enumerate(matched):
                    for token in range(depth + 1):
                        seen = full + list(range(length, length + token + 1))
                        query = q[row, token, kv_head * GROUP + member]
                        near = (k[row, seen, kv_head] @ query / math.sqrt(SIZE)).softmax(-1) @ v[row, seen, kv_head]
                        weights = rows[row, head, min(token, depth - 1), marginal]
                        want = near * (1 - weights.sum()) + weights @ v[row, marginal, kv_head]
                        torch.testing.assert_close(out[row, token, kv_head * GROUP + member], want)
    torch.testing.assert_close(attend.tokens_read(start), read)
    assert float(read.max()) <= budget
