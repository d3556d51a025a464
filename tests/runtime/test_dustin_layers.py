"""A list for every layer against brute force: shares, candidates, the merge, the rotation, and rejected drafts."""

from __future__ import annotations

import math
import random as chances
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.scoring import layer_mass
from dustin_runtime.attention.tap import QueryTap
from dustin_runtime.config import LayerHeads, OwnLists, Selection
from dustin_runtime.engine import Engine
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.policies import make_policy
from dustin_runtime.policies.base import Prompted
from dustin_runtime.policies.dustin_layers import DustinLayers, FreshLists, candidates, merge, shares
from dustin_runtime.prefill import prefill
from dustin_runtime.selection import select
from dustin_runtime.step import Stepper

SHAPE = ModelShape(
    family="llama", layers=4, hidden=48, ffn=64, query_heads=6, kv_heads=2, head_size=8, vocab=40, context=512,
    tied=True,
)  # fmt: skip
SINK, WINDOW = 2, 4
VOCAB = 37


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder(SHAPE, torch.float64, "cpu", seed=1)


def selection(budget: int, own: OwnLists | None = None, m: int | None = None) -> Selection:
    return Selection(
        budget=budget,
        sink=SINK,
        window=WINDOW,
        m=(budget - SINK - WINDOW) // 2 if m is None else m,
        history=LayerHeads(layer=2, heads=(1, 5)),
        lookahead=(LayerHeads(layer=1, heads=(0, 4)),),
        own=own,
    )


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def few_values(*size: int, seed: int) -> Tensor:
    """Scores with many ties."""
    return torch.randint(0, 4, size, generator=torch.Generator().manual_seed(seed)).float()


def listed(positions: Tensor) -> list[int]:
    """Positions of a list, which must ascend with -1 at its end."""
    found = [p for p in positions.tolist() if p >= 0]
    assert found == sorted(set(found)) and positions.tolist() == found + [-1] * (len(positions) - len(found))
    return found


def best(scores: list[float], among: list[int], count: int) -> list[int]:
    return sorted(among, key=lambda p: (-scores[p], p))[:count]


# --- shares of the budget


@pytest.mark.parametrize("budget", [7, 8, 9, 24, 256, 511])
@pytest.mark.parametrize("share", [1e-9, 0.25, 0.5, 0.75, 0.999])
def test_shares_fill_the_budget(budget: int, share: float) -> None:
    free = budget - SINK - WINDOW
    for m in {0, free // 3, free}:
        found = shares(selection(budget, OwnLists(share=share), m))
        assert found.shared + found.own == budget
        left = found.shared - SINK - WINDOW
        assert left >= 1 and 0 <= found.m <= left
        assert abs(found.own - share * free) <= 1
        assert (found.m == left) == (m == free) or left == 1
        assert abs(found.m / left - m / free) <= 1 / left


def test_without_a_share_it_is_half() -> None:
    assert shares(selection(26)) == (16, 5, 10)
    assert shares(selection(26)) == shares(selection(26, OwnLists(share=0.5)))


# --- the choice


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("share", [1e-9, 0.25, 0.5, 0.999])
def test_lists_are_what_the_rule_says(seed: int, share: float) -> None:
    """Chosen at one length, merged at a later one, as in a step in which a layer does not have its turn."""
    chance = chances.Random(seed)
    budget, layers, lists, columns = 20, 3, 2, 70
    split = shares(selection(budget, OwnLists(share=share), 6))
    before = [1, 3, 6, 12, 19, 20, 21, 40, 60]
    now = [n + chance.choice((0, 1, 5, 9)) for n in before]
    rows, free = len(before), budget - SINK - WINDOW
    mass = few_values(layers, rows, lists, columns, seed=seed)
    ahead, back = few_values(rows, columns, seed=seed + 100), few_values(rows, columns, seed=seed + 200)
    lengths = torch.tensor(now)
    ranked = torch.stack([candidates(one, torch.tensor(before), free, sink=SINK, window=WINDOW) for one in mass])
    shared = select(ahead, back, lengths, budget=split.shared, m=split.m, sink=SINK, window=WINDOW)
    found = merge(shared, ranked, lengths, split.own, WINDOW)
    assert found.shape == (layers, rows, lists, budget)
    for row, (old, n) in enumerate(zip(before, now, strict=True)):
        protected = {p for p in range(n) if p < SINK or p >= n - WINDOW}
        others = [p for p in range(n) if p not in protected]
        chosen = best(ahead[row].tolist(), others, split.m)
        left = [p for p in others if p not in chosen]
        chosen += best(back[row].tolist(), left, split.shared - SINK - WINDOW - split.m)
        for layer in range(layers):
            for one in range(lists):
                known = list(range(SINK, old - WINDOW))
                order = best(mass[layer, row, one].tolist(), known, free)
                order += [p for p in others if p >= max(old - WINDOW, SINK)]  # only where the prefix was short
                own = [p for p in order if p in others and p not in chosen][: split.own]
                want = sorted({*protected, *chosen, *own})
                assert listed(found[layer, row, one]) == want
                assert len(want) == min(n, budget)


def test_a_share_of_nothing_is_the_paper_s_list() -> None:
    lengths = torch.tensor([4, 30, 60])
    ahead, back = few_values(3, 70, seed=1), few_values(3, 70, seed=2)
    ranked = candidates(few_values(3, 1, 70, seed=3), lengths, 14, sink=SINK, window=WINDOW).unsqueeze(0)
    want = select(ahead, back, lengths, budget=20, m=6, sink=SINK, window=WINDOW)
    split = shares(selection(20, OwnLists(share=1e-9), 6))
    assert split == (20, 6, 0)
    shared = select(ahead, back, lengths, budget=split.shared, m=split.m, sink=SINK, window=WINDOW)
    assert torch.equal(merge(shared, ranked, lengths, split.own, WINDOW)[0, :, 0], want)


# --- the signal


@pytest.mark.parametrize("queries", [1, 3, 70])
def test_mass_is_that_of_whole_rows_in_a_layer_of_each_row_s_own(queries: int) -> None:
    q, keys = random(2, queries, 6, 8), random(3, 2, 80, 2, 8, seed=1)
    position = torch.tensor([79, 40]).unsqueeze(1) + torch.arange(-queries, 0) + 1
    position = position.clamp(min=0)
    layer = torch.tensor([2, 0])
    found = layer_mass(q, keys, layer, position)
    for row in range(2):
        for kv_head in range(2):
            total = torch.zeros(80, dtype=torch.float64)
            for head in range(3 * kv_head, 3 * kv_head + 3):
                for place in range(queries):
                    seen = int(position[row, place]) + 1
                    scores = keys[layer[row], row, :seen, kv_head] @ q[row, place, head] / math.sqrt(8)
                    total[:seen] += scores.softmax(-1)
            torch.testing.assert_close(found[row, kv_head].double(), total, rtol=1e-5, atol=1e-6)


# --- what is kept between steps


def given(target: Decoder, own: OwnLists, rows: int = 1, depth: int = 3) -> tuple[DustinLayers, FreshLists]:
    policy = make_policy("dustin-layers", selection(20, own))
    assert isinstance(policy, DustinLayers)
    return policy, policy.memory(SHAPE, depth, rows, 200, torch.float64, torch.device("cpu"))


@pytest.mark.parametrize(("length", "heads"), [(1, "layer"), (5, "kv_head"), (90, "layer"), (90, "kv_head")])
def test_a_prompt_fills_every_layer_from_its_last_queries(target: Decoder, length: int, heads: str) -> None:
    _, memory = given(target, OwnLists(queries=6, heads=heads), rows=2)  # type: ignore[arg-type]
    cache = target.cache(1, 200)
    tap = QueryTap(dense_attention, range(4), last=64)
    prefill(target, cache, [(7 * at) % VOCAB for at in range(length)], attend=tap, tail=64)
    memory.steps.fill_(3)
    memory.admit(1, Prompted(length, cache, tap.queries), None)
    assert memory.steps.tolist() == [3, 0]
    for layer in range(4):
        last = tap.queries[layer][:, -6:]
        first = length - last.shape[1]
        mass = torch.zeros(2, length, dtype=torch.float64)
        for head in range(6):
            for place in range(last.shape[1]):
                seen = first + place + 1
                row = (cache.keys[layer, 0, :seen, head // 3] @ last[0, place, head] / math.sqrt(8)).softmax(-1)
                mass[head // 3, :seen] += row
        if heads == "layer":
            mass = mass.sum(dim=0, keepdim=True)
        for one, scores in enumerate(mass.float().tolist()):
            order = best([round(x, 5) for x in scores], list(range(SINK, length - WINDOW)), 14)
            order += [p for p in range(SINK, SINK + 14) if p not in order][: 14 - len(order)]
            assert memory.candidates[layer, 1, one].tolist() == order


def test_layers_take_turns_and_rows_have_turns_of_their_own(target: Decoder) -> None:
    _, memory = given(target, OwnLists(per_step=3, queries=2), rows=2)
    memory.queries.normal_(generator=torch.Generator().manual_seed(0))
    keys, lengths = random(4, 2, 60, 2, 8, seed=2), torch.tensor([50, 60])
    memory.steps.copy_(torch.tensor([0, 3]))
    for turns in ([{0, 1, 2}, {1, 2, 3}], [{3, 0, 1}, {0, 1, 2}], [{2, 3, 0}, {3, 0, 1}]):
        memory.candidates.fill_(-7)
        memory.refresh(lengths, keys)
        for row, layers in enumerate(turns):
            chosen = {layer for layer in range(4) if int(memory.candidates[layer, row].max()) >= 0}
            assert chosen == layers


@pytest.mark.parametrize(("queries", "per_step"), [(1, 1), (3, 4), (8, 2), (20, 4)])
def test_queries_are_those_of_accepted_tokens(
    target: Decoder, queries: int, per_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every query that is pooled is the one that the text's own pass has there; a budget that covers everything makes
    that pass the same as one without a list. The draft is another model, so many drafts are rejected."""
    own = OwnLists(queries=queries, per_step=per_step)
    policy = make_policy("dustin-layers", selection(256, own))
    stepper = Stepper(target, target.first_layers(2), policy, policy.selection, 3, VOCAB)
    asked: list[tuple[Tensor, Tensor, Tensor]] = []

    def spy(q: Tensor, keys: Tensor, layer: Tensor, position: Tensor, share: float | None) -> Tensor:
        asked.extend((queries.clone(), one.clone(), position.clone()) for queries, one in zip(q, layer, strict=True))
        return layer_mass(q, keys, layer, position, share)

    monkeypatch.setattr("dustin_runtime.policies.dustin_layers.layer_mass", spy)
    prompt = [5, 9, 30, 2, 11]
    (generation,), statistics = Engine(stepper).generate([prompt], 40)
    assert 1 < statistics.tau < 3.9  # some drafts are accepted and some are not
    text = [*prompt, *generation.tokens]
    tap = QueryTap(dense_attention, range(4))
    target.forward(torch.tensor([text]), torch.zeros(1, dtype=torch.long), target.cache(1, 200), tap)
    served = asked[4:]  # behind those of the prompt, one for each layer
    assert len(served) == per_step * statistics.steps
    ends = [int(position[0, -1]) for _, _, position in served]
    assert ends == sorted(ends) and ends[0] == len(prompt) - 1
    for q, layer, position in served:
        assert position[0].tolist() == [max(int(position[0, -1]) + at, 0) for at in range(1 - queries, 1)]
        torch.testing.assert_close(q[0], tap.queries[int(layer)][0, position[0]])


def test_layers_choose_before_the_drafting_and_queries_are_kept_behind_the_target(
    target: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that on a GPU neither is waited for: the one needs no draft, the other is for the next step."""
    order: list[str] = []

    def noted(of: type, name: str, word: Callable[[Any], str]) -> None:
        inner = getattr(of, name)

        def call(self: Any, *given: Any, **named: Any) -> Any:
            order.append(word(self))
            return inner(self, *given, **named)

        monkeypatch.setattr(of, name, call)

    policy = make_policy("dustin-layers", selection(20))
    stepper = Stepper(target, target.first_layers(2), policy, policy.selection, 3, VOCAB)
    state = stepper.state(2, 200)
    for of, name in ((FreshLists, "refresh"), (FreshLists, "keep"), (DustinLayers, "select")):
        noted(of, name, lambda _, name=name: name)
    noted(Decoder, "forward", lambda model: "target" if model is target else "draft")
    noted(Decoder, "own_logits", lambda model: "logits" if model is target else "")
    before = state.lengths.clone()
    monkeypatch.setattr("dustin_runtime.step._advance", lambda *_: order.append("advance") or torch.zeros(2, 7))
    stepper(state)
    assert [word for word in order if word] == [
        *("refresh", "draft", "draft", "draft", "select", "target", "keep", "logits", "advance"),
    ]  # fmt: skip
    assert torch.equal(state.lengths, before)


@pytest.mark.parametrize("heads", ["layer", "kv_head"])
@pytest.mark.parametrize("budget", [7, 40])
def test_every_head_reads_the_budget(target: Decoder, heads: str, budget: int) -> None:
    own = OwnLists(heads=heads, per_step=2, share=0.6)  # type: ignore[arg-type]
    policy = make_policy("dustin-layers", selection(budget, own))
    stepper = Stepper(target, target.first_layers(2), policy, policy.selection, 3, VOCAB)
    _, statistics = Engine(stepper).generate([[(7 * at) % VOCAB for at in range(60)], [3] * 50], 30)
    assert statistics.kept == budget
