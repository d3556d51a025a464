"""Noise over ranks: each has its own part alone, and what several hold is the same on each."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from rank_pool import RankPool
from split_models import SHAPES, selection

from dustin_runtime.bench.noise import fill, fingerprint
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.parallel.ranks import Ranks, joined
from dustin_runtime.parallel.shards import Share
from dustin_runtime.policies import POLICIES
from dustin_runtime.pricing import held_weights
from dustin_runtime.state import State
from dustin_runtime.step import Stepper

ROWS, CAPACITY, CONTEXT = 2, 40, 24
DRAFT = SHAPES["llama"].model_copy(update={"layers": 2, "vocab": 40})


class Noise(NamedTuple):
    """What one rank has."""

    weights: dict[str, torch.Tensor]
    largest: int
    """Elements of the largest tensor that was made."""
    prints: tuple[int, int]
    state: dict[str, torch.Tensor]


def named(model: Decoder) -> dict[str, torch.Tensor]:
    weights = model.weights
    found = {"embedding": weights.embedding, "norm": weights.norm, "head": weights.head}
    for index, layer in enumerate(weights.layers):
        found |= {f"{index}.{name}": x for name, x in vars(layer).items() if x is not None}
    return found


def noise(model: str, ranks: Ranks) -> Noise:
    sizes = []
    real = torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        made: torch.Tensor = real(*size, **options)
        sizes.append(made.numel())
        return made

    collectives = ranks.collectives("cpu")
    torch.empty = empty  # type: ignore[assignment]
    try:
        target = random_decoder(SHAPES[model], torch.float32, "cpu", ranks=collectives)
    finally:
        torch.empty = real
    draft = random_decoder(DRAFT, torch.float32, "cpu", 1)
    one = selection(14, 4)
    stepper = Stepper(target, draft, POLICIES["dustin"](one), one, 3, 37, draft_budget=9)
    state = stepper.state(ROWS, CAPACITY)
    torch.manual_seed(ranks.rank)  # nothing may depend on what a process drew before
    fill(stepper, state, CONTEXT)
    return Noise(named(target), max(sizes), (fingerprint(target), fingerprint(draft)), tensors(state))


def tensors(state: State) -> dict[str, torch.Tensor]:
    assert state.draft_cache and state.draft_cache.scored is not None and state.history_query is not None
    return {
        "target keys": state.target_cache.keys,
        "target values": state.target_cache.values,
        "draft keys": state.draft_cache.keys,
        "draft values": state.draft_cache.values,
        "draft scored": state.draft_cache.scored,
        "history": state.history_query,
        "recent": state.recent,
        "seeds": state.sampling.seed,
        "lengths": state.lengths,
    }


def on_a_rank(model: str) -> Noise:
    with joined(20) as ranks:
        return noise(model, ranks)


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors have no numbers in common, but for a few by chance: fp32 noise is made of 24 bits."""
    return bool(torch.isin(ours[ours != 0], theirs).double().mean() < 0.02)


@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3"])
def test_weights_of_two_ranks(model: str, two_ranks: RankPool) -> None:
    """`llama` and `qwen3` have a tied head; `qwen2` an own one, and biases."""
    shape = SHAPES[model]
    left, right = two_ranks(on_a_rank, model)
    assert left.weights.keys() == right.weights.keys()
    for name, ours in left.weights.items():
        theirs = right.weights[name]
        assert ours.shape == theirs.shape and ours.isfinite().all(), name
        if "norm" in name or name == "embedding":
            assert torch.equal(ours, theirs), name
        else:  # nowhere the same numbers
            assert apart(ours, theirs), name
            assert ours.std() == pytest.approx(shape.hidden**-0.5, rel=0.2), name
    for rank, one in enumerate((left, right)):
        share = Share.of(shape, rank, 2)
        assert one.weights["head"].shape == (share.vocab_rows, shape.hidden)
        tied = one.weights["head"].data_ptr() == one.weights["embedding"][share.vocab.start :].data_ptr()
        assert tied == shape.tied
        held = sum(x.numel() for name, x in one.weights.items() if name != "head" or not shape.tied)
        assert held == held_weights(share) < shape.parameters
        assert one.largest == max(x.numel() for x in one.weights.values())
    assert left.prints == right.prints


def test_ranks_that_hold_the_same_kv_head_draw_it_alike(two_ranks: RankPool) -> None:
    left, right = (one.weights["1.qkv"] for one in two_ranks(on_a_rank, "llama-one-kv-head"))
    queries = 3 * 8
    assert torch.equal(left[queries:], right[queries:])
    assert apart(left[:queries], right[:queries])


def test_caches_of_two_ranks_are_the_parts_of_one_process(two_ranks: RankPool) -> None:
    whole = noise("llama", Ranks(0, 1, 0)).state
    left, right = (one.state for one in two_ranks(on_a_rank, "llama"))
    for name, ours in left.items():
        theirs = right[name]
        if name.startswith("target"):
            assert torch.equal(torch.cat((ours, theirs), dim=3), whole[name]), name
            assert apart(ours, theirs)
        elif name.startswith("draft"):  # a block of rows each
            assert torch.equal(torch.cat((ours, theirs), dim=1), whole[name]), name
        elif name == "history":  # a head each
            assert ours.shape == theirs.shape and apart(ours, theirs)
        else:
            assert torch.equal(ours, theirs) and torch.equal(ours, whole[name]), name
    assert left["target keys"].std() == pytest.approx(1, abs=0.05)
    keys = whole["draft keys"].flatten()
    assert len(keys.unique()) > 0.99 * len(keys)  # no head has another's


def test_a_fingerprint_sees_one_bit() -> None:
    model = random_decoder(DRAFT, torch.bfloat16, "cpu", 1)
    before = fingerprint(model)
    assert before == fingerprint(random_decoder(DRAFT, torch.bfloat16, "cpu", 1))
    model.weights.layers[1].down.view(torch.int16)[3, 5] ^= 1
    assert fingerprint(model) != before
