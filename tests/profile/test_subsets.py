"""Sampled subsets: what is drawn, from what attention, and the correlations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from host_reads import HostReads

from dustin_profile.evaluation.fidelity import measure, prepare, recovered
from dustin_profile.evaluation.oracle import GivenLists, Oracle, bound
from dustin_profile.evaluation.subsets import correlations, sampled_lists, summarise, text_attention
from dustin_profile.evaluation.text_run import Prefilled
from dustin_runtime.attention.scoring import last_rows
from dustin_runtime.config import LayerHeads, Selection
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import random_decoder

SHAPE = ModelShape(
    family="llama", layers=3, hidden=48, ffn=64, query_heads=6, kv_heads=2, head_size=8, vocab=40, context=512,
    tied=True,
)  # fmt: skip
VOCAB, DEPTH = 37, 3
PROMPT, TEXT = [(7 * at * at) % 37 for at in range(90)], [(5 * at + at * at) % 37 for at in range(18)]
SELECTION = Selection(
    budget=20,
    sink=2,
    window=4,
    m=0,
    history=LayerHeads(layer=1, heads=(1,)),
    lookahead=(LayerHeads(layer=0, heads=(0,)),),
)


@pytest.fixture(scope="module")
def ready() -> Prefilled:
    target = random_decoder(SHAPE, torch.float64, "cpu", seed=1)
    for layer in target.weights.layers:
        layer.qkv.mul_(2)
    return prepare(target, target.first_layers(2), PROMPT, TEXT, VOCAB, DEPTH, window=1)


def test_attention_of_the_text_is_the_mean_of_whole_rows(ready: Prefilled) -> None:
    found = text_attention(ready, DEPTH)
    keys = ready.target_cache.keys[:, :, : len(PROMPT) + len(TEXT) - 1]
    total = torch.zeros(keys.shape[2], dtype=torch.float64)
    for layer, q in enumerate(ready.text_queries):
        total += last_rows(q, keys[layer])[0].double().mean(dim=(0, 1, 2))
    torch.testing.assert_close(found, total / 3, atol=1e-6, rtol=1e-5)
    assert float(found.sum()) == pytest.approx(1, abs=1e-5)


def drawn(ready: Prefilled, attention: torch.Tensor, sharpness: float, seed: int) -> list[list[int]]:
    lists = sampled_lists(attention, ready, DEPTH, SELECTION, sharpness, np.random.default_rng(seed))
    return [one[0, 0, 0].tolist() for one in lists]


def test_a_subset_keeps_its_tokens_while_the_window_moves(ready: Prefilled) -> None:
    lists = drawn(ready, text_attention(ready, DEPTH), 1.0, 3)
    assert len(lists) == 5
    for step, kept in enumerate(lists):
        prefix = 90 + 4 * step
        assert len(set(kept)) == 20 and kept == sorted(kept)
        assert {0, 1, *range(prefix - 4, prefix)} <= set(kept) and max(kept) < prefix
    first, last = (set(kept) - {0, 1} for kept in (lists[0], lists[-1]))
    assert len({position for position in first if position < 86} & last) >= 8
    assert drawn(ready, text_attention(ready, DEPTH), 1.0, 3) == lists
    assert drawn(ready, text_attention(ready, DEPTH), 1.0, 4) != lists


def test_draws_follow_the_power_of_attention(ready: Prefilled) -> None:
    attention = torch.full((len(PROMPT) + len(TEXT) - 1,), 1e-3, dtype=torch.float64)
    attention[50] = 8e-3
    shares = []
    for sharpness in (0.0, 1.0, 2.0):
        hits = [50 in drawn(ready, attention, sharpness, seed)[0] for seed in range(200)]
        shares.append(sum(hits) / 200)
    assert shares[0] == pytest.approx(14 / 84, abs=0.08)  # 14 of the 84 tokens that compete
    assert shares[0] < 0.4 < 0.6 < shares[1] < shares[2]
    assert shares[2] > 0.97


def test_neither_attention_nor_draws_wait_for_the_device_at_each_step(ready: Prefilled) -> None:
    reads = []
    for tokens in (6, 18):
        short = prepare(ready.target, ready.draft, PROMPT, TEXT[:tokens], VOCAB, DEPTH, window=1)
        with HostReads() as seen:
            attention = text_attention(short, DEPTH)
            sampled_lists(attention, short, DEPTH, SELECTION, 1.0, np.random.default_rng(1))
        reads.append(seen.count)
    assert reads[0] == reads[1] > 0


def test_sharper_draws_recover_more_and_the_oracle_bounds_them(ready: Prefilled) -> None:
    attention = text_attention(ready, DEPTH)
    found = [
        measure(
            ready,
            GivenLists(
                SELECTION,
                sampled_lists(attention, ready, DEPTH, SELECTION, sharpness, np.random.default_rng(s)),
                len(ready.prompt),
                DEPTH + 1,
            ),
            DEPTH,
            VOCAB,
        )
        for sharpness in (0.0, 2.0)
        for s in range(3)
    ]
    found.append(measure(ready, bound([Oracle(SELECTION)], ready, DEPTH)[0], DEPTH, VOCAB))
    arr = recovered(ready, found, DEPTH).mean(1)
    assert float(arr[:3].mean()) < float(arr[3:6].mean())
    assert bool((arr[:-1] <= arr[-1] + 1e-9).all())
    assert all(one.read == 20 for one in found)


def test_correlations_of_known_points() -> None:
    points = [(0.5, 4.0), (0.6, 2.0), (0.7, 1.0)]
    found = correlations(points)
    assert found["spearman"] == pytest.approx(-1) and found["pearson_log"] == pytest.approx(-1)
    assert found["pearson"] == pytest.approx(float(np.corrcoef(*np.asarray(points).T)[0, 1]))
    assert set(correlations([(0.5, 1.0), (0.5, 2.0)]).values()) == {None}


def test_documents_are_the_unit_of_intervals() -> None:
    def document(*points: tuple[float, float]) -> dict[str, object]:
        return {"subsets": [{"budget": 8, "arr": arr, "kl": kl} for arr, kl in points]}

    falling, rising = document((0.1, 3.0), (0.2, 2.0), (0.3, 1.0)), document((0.1, 1.0), (0.2, 2.0), (0.3, 3.0))
    found = summarise([falling, falling])["all"]
    assert found["pearson"]["mean"] == found["pearson"]["low"] == pytest.approx(-1)
    assert found["pearson"]["documents"] == 2 and found["subsets"] == 6
    mixed = summarise([falling, rising])["8"]
    assert mixed["pearson"]["mean"] == pytest.approx(0)
    assert (mixed["pearson"]["low"], mixed["pearson"]["high"]) == (-1, 1)
    assert summarise([document((0.1, 1.0), (0.1, 2.0))])["8"]["pearson"] is None
