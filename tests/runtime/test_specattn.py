"""SpecAttn against brute force: all monotone maps, a nucleus in plain Python, lists from whole attention matrices."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.tap import QueryTap
from dustin_runtime.config import LayerHeads, Selection
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.policies import make_policy
from dustin_runtime.policies.base import Prompted
from dustin_runtime.policies.layer_map import monotone_map, similarities
from dustin_runtime.policies.specattn import DENSE, HALVINGS, NUCLEUS, LayerMap, nucleus, nucleus_lists
from dustin_runtime.prefill import prefill
from dustin_runtime.signals import StepSignals
from dustin_runtime.step import Stepper

HEAD = LayerHeads(layer=0, heads=(0,))


def shape(layers: int, query_heads: int, kv_heads: int) -> ModelShape:
    return ModelShape(
        family="llama", layers=layers, hidden=48, ffn=64, query_heads=query_heads, kv_heads=kv_heads, head_size=8,
        vocab=40, context=512, tied=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def models() -> tuple[Decoder, Decoder]:
    sizes = (shape(5, 6, 2), shape(3, 4, 1))
    target, draft = (random_decoder(size, torch.float64, "cpu", seed) for seed, size in enumerate(sizes))
    return target, draft


def attention(model: Decoder, ids: list[int]) -> list[Tensor]:
    """Whole matrices by layer, mean over heads: [tokens, tokens]."""
    found = []
    count, group = len(ids), model.shape.group

    def keep(layer: int, q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Tensor:
        scores = torch.einsum("thd,nhd->htn", q[0], k[0].repeat_interleave(group, 1)) * 8**-0.5
        found.append(scores.masked_fill(torch.ones(count, count).triu(1).bool(), -math.inf).softmax(-1).mean(0))
        return dense_attention(layer, q, k, v, start)

    model.forward(torch.tensor([ids]), torch.zeros(1, dtype=torch.long), model.cache(1, count), keep)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_map_is_the_best_of_all_monotone_ones(seed: int) -> None:
    chance = random.Random(seed)
    layers, width = chance.randint(1, 5), chance.randint(1, 4)
    similarity = [[float(chance.randint(-3, 0)) for _ in range(width)] for _ in range(layers)]  # many are equal
    maps = itertools.combinations_with_replacement(range(width), layers)
    best = min(maps, key=lambda found: (-sum(similarity[j][i] for j, i in enumerate(found)), found[::-1]))
    assert monotone_map(similarity) == list(best)


def test_similarities_differ_as_the_divergences_do(models: tuple[Decoder, Decoder]) -> None:
    ids = [(7 * at) % 37 for at in range(50)]
    prompted = []
    for model in models:
        cache, tap = model.cache(1, 60), QueryTap(dense_attention, range(model.shape.layers), last=8)
        prefill(model, cache, ids, attend=tap)
        prompted.append(Prompted(len(ids), cache, tap.queries))
    found = similarities(*prompted)
    of_target, of_draft = (attention(model, ids) for model in models)
    want = torch.zeros(5, 3, dtype=torch.float64)
    for j, i in itertools.product(range(5), range(3)):
        for query in range(42, 50):
            p, q = of_target[j][query, : query + 1], of_draft[i][query, : query + 1]
            want[j, i] -= float((p * (p / q).log()).sum()) / 8
    torch.testing.assert_close(found.double() - found[:, :1], want - want[:, :1], rtol=1e-4, atol=1e-4)


def threshold(row: list[float], share: float) -> float:
    low, high = 0.0, max(row)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if sum(x for x in row if x >= middle) >= share * sum(row):
            low = middle
        else:
            high = middle
    return low


@pytest.mark.parametrize("seed", range(10))
def test_a_nucleus_holds_its_share(seed: int) -> None:
    """On multiples of 1/64, whose sums are exact and which are often equal."""
    chance = random.Random(seed)
    row = [chance.choice((0, 1, 1, 2, 8, 30)) / 64 for _ in range(chance.randint(1, 60))]
    found = nucleus(torch.tensor(row), 0.75).tolist()
    assert found == [x >= threshold(row, 0.75) for x in row]
    assert sum(x for x, kept in zip(row, found, strict=True) if kept) >= 0.75 * sum(row)


@pytest.mark.parametrize("seed", range(10))
def test_lists_are_unions_of_nuclei_up_to_the_budget(seed: int) -> None:
    chance = random.Random(seed)
    lengths, budget = [chance.randint(1, 60), 60], chance.randint(1, 30)
    rows = [[[chance.choice((0, 1, 2, 16, 64)) / 64 for _ in range(63)] for _ in range(3)] for _ in lengths]
    found = nucleus_lists(torch.tensor(rows), torch.tensor(lengths), budget)
    assert found.shape == (2, budget)
    for row, length in enumerate(lengths):
        prefixes = [query[:length] for query in rows[row]]
        union = {p for one in prefixes for p in range(length) if one[p] >= threshold(one, NUCLEUS)}
        if length <= budget:
            union = set(range(length))
        best = sorted(union, key=lambda p: (-sum(one[p] for one in prefixes), p))[:budget]
        assert found[row].tolist() == sorted(best) + [-1] * (budget - len(best))


@torch.inference_mode()
def test_each_layer_reads_what_its_draft_layer_attends_to(models: tuple[Decoder, Decoder]) -> None:
    """A whole step, from whole matrices."""
    target, draft = models
    chosen = Selection(budget=16, sink=2, window=4, m=5, history=HEAD, lookahead=(HEAD,))
    policy = make_policy("specattn", chosen)
    stepper = Stepper(target, draft, policy, policy.selection, 3, 37)
    state = stepper.state(1, 200)
    ids = [(7 * at) % 37 for at in range(60)]
    prompted = []
    for model, cache in ((target, state.target_cache), (draft, state.draft_cache)):
        assert cache is not None
        tap = QueryTap(dense_attention, range(model.shape.layers), last=32)
        prefill(model, cache, ids, attend=tap)
        prompted.append(Prompted(60, cache, tap.queries))
    assert isinstance(state.memory, LayerMap)
    state.memory.admit(0, *prompted)
    mapped = monotone_map(similarities(*prompted).tolist())
    assert state.memory.layers[:, 0].tolist() == mapped[DENSE:]
    state.lengths[0], state.extent = 60, 60
    state.recent[0] = torch.tensor([ids[-1], 5])
    signals = StepSignals(stepper, state)
    drafts, _ = stepper.draft_tokens(state, signals)
    verify = policy.verification(signals)
    rows = [layer[60:, :60] for layer in attention(draft, [*ids, 5, *drafts[0, :2].tolist()])]
    read = 2.0 * 60
    for layer in range(5):
        found = verify.kept(layer)
        if layer < DENSE:
            assert found is None
            continue
        want = nucleus_lists(rows[mapped[layer]][None].float(), torch.tensor([60]), 16)
        assert found is not None and torch.equal(found, want.unsqueeze(1))
        read += int((want >= 0).sum())
    assert float(verify.tokens_read(state.lengths)) == pytest.approx(read / 5)
    for summed, rows_by_head in zip(stepper.lookahead_layers.values(), signals.lookahead_rows(), strict=True):
        scores = summed.scores(summed.gather_last(signals._passes), *signals._draft_keys())
        torch.testing.assert_close(rows_by_head.sum(dim=(1, 2)), scores)
