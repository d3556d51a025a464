"""TriForce's draft against brute force: the chunks that it retrieves, and what its passes read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.sparse import sparse_reference
from dustin_runtime.attention.tap import QueryTap
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.policies import make_policy
from dustin_runtime.policies.base import Prompted
from dustin_runtime.policies.triforce import CHUNK, retrieve
from dustin_runtime.prefill import prefill
from dustin_runtime.signals import StepSignals
from dustin_runtime.step import Stepper

KV_HEADS, GROUP, SIZE = 2, 3, 8
SHAPE = ModelShape(
    family="llama", layers=4, hidden=48, ffn=64, query_heads=6, kv_heads=2, head_size=8, vocab=40, context=512,
    tied=True,
)  # fmt: skip


def normal(*size: int, seed: int, steps: int | None) -> Tensor:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return x if steps is None else (x * steps).round() / steps


@pytest.mark.parametrize("steps", [None, 1])
@pytest.mark.parametrize(("length", "budget"), [(61, 24), (64, 20), (7, 8), (1, 16), (16, 64)])
def test_chunks_whose_mean_keys_score_highest_are_read(length: int, budget: int, steps: int | None) -> None:
    q, k = normal(1, 1, 6, SIZE, seed=1, steps=steps), normal(1, length, KV_HEADS, SIZE, seed=2, steps=steps)
    found = retrieve(0, q, k, budget)
    assert found.shape == (1, KV_HEADS, budget)
    for kv_head in range(KV_HEADS):
        scores = []
        for begin in range(0, length, CHUNK):
            mean = k[0, begin : begin + CHUNK, kv_head].double().mean(0)
            queries = q[0, 0, kv_head * GROUP : (kv_head + 1) * GROUP].double()
            scores.append(round(float((queries @ mean).sum()), 4))
        order = sorted(range(1, len(scores)), key=lambda chunk: (-scores[chunk], chunk))
        chunks = sorted([0, *order][: budget // CHUNK])
        want = [p for chunk in chunks for p in range(chunk * CHUNK, min((chunk + 1) * CHUNK, length))]
        assert found[0, kv_head].tolist() == want + [-1] * (budget - len(want))


@torch.inference_mode()
def test_every_pass_reads_the_chunks_and_what_was_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt of 60 tokens behind which 7 were accepted, and of the drafts before."""
    target = random_decoder(SHAPE, torch.float64, "cpu", seed=1)
    draft = target.first_layers(2)
    stepper = Stepper(target, draft, make_policy("triforce", None), None, 3, 37, draft_budget=24)
    state = stepper.state(1, 200)
    assert state.draft_cache is not None and state.draft_lists is not None
    ids = [(7 * at) % 37 for at in range(67)]
    tap = QueryTap(dense_attention, range(2), last=1)
    prefill(draft, state.draft_cache, ids[:60], attend=tap)
    state.draft_lists.take(0, Prompted(60, state.draft_cache, tap.queries))
    prefill(draft, state.draft_cache, ids[60:], start=60)
    state.lengths[0], state.extent = 67, 67
    state.recent[0] = torch.tensor([ids[-1], 5])
    read: list[list[int]] = []

    def see(q: Tensor, k: Tensor, v: Tensor, start: Tensor, kept: Tensor, *ring: object) -> Tensor:
        read.append([p for p in kept[0, 1].tolist() if p >= 0])
        return sparse_reference(q, k, v, start, kept)

    monkeypatch.setattr("dustin_runtime.attention.sparse.sparse_reference", see)
    stepper.draft_tokens(state, StepSignals(stepper, state))
    for layer in range(2):
        chunks = retrieve(layer, tap.queries[layer], state.draft_cache.keys[layer, :, :60], 24)[0, 1].tolist()
        chosen = [p for p in chunks if p >= 0]
        for turn, start in enumerate((66, 68, 69)):
            assert read[2 * turn + layer] == chosen + list(range(60, start))
