"""What stands in for unread tokens, by brute force: the tangent, the turns, prompts, rejected drafts, exactness."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention, dense_reference
from dustin_runtime.attention.rest import RestTokens, update_rest
from dustin_runtime.attention.sparse import sparse_reference
from dustin_runtime.attention.tap import QueryTap
from dustin_runtime.config import LayerHeads, Rest, Selection
from dustin_runtime.engine import Engine
from dustin_runtime.generation import Draw
from dustin_runtime.guard import Rule
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.parallel.collectives import Collectives
from dustin_runtime.parallel.pipeline import Pipeline
from dustin_runtime.parallel.stages import Stage
from dustin_runtime.policies import make_policy
from dustin_runtime.policies.base import Prompted
from dustin_runtime.policies.dustin_rest import RestMemory
from dustin_runtime.prefill import prefill
from dustin_runtime.prompt_store import mark_of
from dustin_runtime.state import StepResult
from dustin_runtime.step import Stepper

SHAPE = ModelShape(
    family="llama", layers=4, hidden=48, ffn=64, query_heads=6, kv_heads=2, head_size=8, vocab=40, context=512,
    tied=True,
)  # fmt: skip
SINK, WINDOW, VOCAB = 2, 4, 37
PROMPTS = [[(step * at) % VOCAB for at in range(length)] for step, length in ((5, 70), (7, 33), (3, 90), (11, 8))]


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder(SHAPE, torch.float64, "cpu", seed=1)


def selection(budget: int, rest: Rest | None = None) -> Selection:
    return Selection(
        budget=budget,
        sink=SINK,
        window=WINDOW,
        m=(budget - SINK - WINDOW) // 2,
        history=LayerHeads(layer=2, heads=(1, 5)),
        lookahead=(LayerHeads(layer=1, heads=(0, 4)),),
        rest=rest,
    )


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(q: Tensor, k: Tensor, v: Tensor, position: Tensor, unread: Tensor) -> RestTokens:
    """Of one layer, in fp64: q [batch, queries, ...], k and v [batch, columns, ...]."""
    size = (1, len(q), q.shape[2])
    out = RestTokens(*(torch.zeros(*size, q.shape[3], dtype=torch.float64) for _ in range(2)), torch.zeros(size))
    update_rest(out, q[None], k[None], v[None], torch.zeros(1, len(q), dtype=torch.int64), position, unread)
    return out.of(0)


# --- the tangent


def test_the_query_that_a_token_is_made_from_attends_as_if_it_had_read_everything() -> None:
    """For it the tangent is exact, whatever was left unread."""
    k, v, q = random(2, 50, 2, 8), random(2, 50, 2, 8, seed=1), random(2, 1, 6, 8, seed=2)
    start = torch.tensor([49, 30])
    kept = torch.stack((torch.arange(0, 48, 4), torch.arange(0, 24, 2))).unsqueeze(1)
    unread = torch.arange(50) < start.unsqueeze(1)
    unread.scatter_(1, kept[:, 0], False)
    rest = made(q, k, v, start.unsqueeze(1), unread)
    found = sparse_reference(q, k, v, start, kept, rest=rest)
    torch.testing.assert_close(found, dense_reference(q, k, v, start), rtol=1e-6, atol=1e-6)  # bias is kept in fp32
    assert not torch.allclose(sparse_reference(q, k, v, start, kept), found, atol=0.05)


def test_near_it_the_error_falls_with_the_square_of_the_distance() -> None:
    """Of the unread tokens' mass: with the key that is its gradient, and no other, it is a tangent."""
    k, v, q, away = random(1, 40, 2, 8), random(1, 40, 2, 8, seed=1), random(1, 1, 6, 8, seed=2), random(6, 8, seed=3)
    unread = torch.ones(1, 40, dtype=torch.bool)
    rest = made(q, k, v, torch.tensor([[39]]), unread)

    def error(step: float) -> float:
        at = q[0, 0] + step * away
        mass = torch.stack([(k[0, :, head // 3] @ at[head] / math.sqrt(8)).logsumexp(0) for head in range(6)])
        tangent = (rest.keys[0] * at).sum(1) / math.sqrt(8) + rest.bias[0]
        assert (tangent <= mass + 1e-6).all()  # mass is convex in the query
        return float((mass - tangent).max())

    assert error(0.5) > 3.5 * error(0.25) > 12 * error(0.125) > 0


def test_a_token_is_the_mean_over_its_queries_and_sees_nothing_behind_them() -> None:
    k, v, q = random(1, 30, 2, 8), random(1, 30, 2, 8, seed=1), random(1, 3, 6, 8, seed=2)
    position = torch.tensor([[10, 20, 29]])
    unread = torch.arange(30).unsqueeze(0) % 3 > 0
    found = made(q, k, v, position, unread)
    for head in range(6):
        keys, values, masses = [], [], []
        for place, at in enumerate(position[0].tolist()):
            seen = [p for p in range(at + 1) if p % 3]
            logits = k[0, seen, head // 3] @ q[0, place, head] / math.sqrt(8)
            keys.append(logits.softmax(0) @ k[0, seen, head // 3])
            values.append(logits.softmax(0) @ v[0, seen, head // 3])
            masses.append(logits.logsumexp(0))
        key = torch.stack(keys).mean(0)
        torch.testing.assert_close(found.keys[0, head], key)
        torch.testing.assert_close(found.values[0, head], torch.stack(values).mean(0))
        bias = torch.stack(masses).mean() - q[0, :, head].mean(0) @ key / math.sqrt(8)
        assert float(found.bias[0, head]) == pytest.approx(float(bias), abs=1e-6)


def test_a_weight_is_the_share_of_its_mass_that_a_token_gets() -> None:
    k, v, q = random(1, 30, 2, 8), random(1, 30, 2, 8, seed=1), random(1, 1, 6, 8, seed=2)
    whole, part = (RestTokens(*(torch.zeros(1, 1, 6, *size) for size in ((8,), (8,), ()))) for _ in range(2))
    position, unread = torch.tensor([[29]]), torch.ones(1, 30, dtype=torch.bool)
    for out, weight in ((whole, 1.0), (part, 0.25)):
        update_rest(out, q[None], k[None], v[None], torch.zeros(1, 1, dtype=torch.int64), position, unread, weight)
    torch.testing.assert_close(part.bias.exp(), whole.bias.exp() / 4)
    assert torch.equal(part.keys, whole.keys) and torch.equal(part.values, whole.values)


def test_where_nothing_is_unread_there_is_no_token() -> None:
    k, v, q = random(1, 30, 2, 8), random(1, 30, 2, 8, seed=1), random(1, 2, 6, 8, seed=2)
    k[0, 20:] = v[0, 20:] = float("nan")  # of no token
    rest = made(q, k, v, torch.tensor([[18, 19]]), torch.zeros(1, 30, dtype=torch.bool))
    assert (rest.bias == float("-inf")).all()
    kept, start = torch.arange(20).view(1, 1, 20), torch.tensor([19])
    k, v = k[:, :20], v[:, :20]
    torch.testing.assert_close(
        sparse_reference(q[:, 1:], k, v, start, kept[..., :19], rest=rest), dense_reference(q[:, 1:], k, v, start)
    )


# --- the turns


@pytest.mark.parametrize("period", [1, 2, 3, 4, 5, 9])
def test_in_a_period_every_layer_is_asked_once(target: Decoder, period: int) -> None:
    policy = make_policy("dustin-rest", selection(20, Rest(queries=2, period=period)))
    memory = policy.memory(target, 3, 2, 200)
    assert isinstance(memory, RestMemory)
    memory.queries.normal_(generator=torch.Generator().manual_seed(0))
    memory.listed.copy_(torch.arange(20).expand(2, -1))
    memory.steps.copy_(torch.tensor([5, 8]))
    cache = target.cache(2, 90)
    cache.keys.normal_(generator=torch.Generator().manual_seed(1))
    asked: list[list[list[int]]] = []
    for _ in range(2 * period):
        memory.tokens.bias.fill_(7)
        memory.refresh(torch.tensor([60, 80]), cache.keys, cache.values, None)
        asked.append([(memory.tokens.bias[:, row] != 7).all(dim=1).nonzero().flatten().tolist() for row in range(2)])
    for row in range(2):
        counts = [len(step[row]) for step in asked]
        for begin in range(period + 1):
            assert sorted(layer for step in asked[begin : begin + period] for layer in step[row]) == [0, 1, 2, 3]
        assert max(counts) - min(counts) <= 1
    assert memory.steps.tolist() == [5 + 2 * period, 8 + 2 * period]


@pytest.mark.parametrize("period", [1, 2, 3, 7, 9])
def test_stages_of_a_pipeline_have_the_turns_of_one_process(target: Decoder, period: int) -> None:
    deep = SHAPE.model_copy(update={"layers": 7})

    def turns(world: int, rank: int) -> list[list[list[int]]]:
        """By step and row, the layers of a stage, counted as in the whole model."""
        stage = Stage.of(deep, rank, world)
        here = Decoder(stage.shape, target.weights, Pipeline(stage, Collectives(rank, world)))
        memory = RestMemory(selection(20, Rest(period=period)), 20, here, 3, 2)
        found = []
        for step in range(2 * period):
            memory.steps.copy_(torch.tensor([step, step + 4]))
            found.append([[stage.layers.start + x for x in row if x >= 0] for row in memory._whose_turn().T.tolist()])
        return found

    alone = turns(1, 0)
    assert [sorted(layer for step in alone[:period] for layer in step[row]) for row in range(2)] == [[*range(7)]] * 2
    for world in range(2, 8):
        stages = [turns(world, rank) for rank in range(world)]
        for step, wanted in enumerate(alone):
            for row in range(2):
                assert sorted(layer for stage in stages for layer in stage[step][row]) == sorted(wanted[row])


@pytest.mark.parametrize("length", [1, 5, 24, 90])
def test_a_prompt_fills_every_layer(target: Decoder, length: int) -> None:
    """As if it had read what its last queries attend to most, all heads of all layers together."""
    policy = make_policy("dustin-rest", selection(20, Rest(queries=3)))
    memory = policy.memory(target, 3, 2, 200)
    assert isinstance(memory, RestMemory)
    cache = target.cache(1, 200)
    tap = QueryTap(dense_attention, range(4), last=16)
    prefill(target, cache, [(7 * at) % VOCAB for at in range(length)], attend=tap, tail=16)
    memory.admit(1, Prompted(length, cache, tap.queries, mark=1000), None)
    assert memory.steps.tolist() == [0, 1000 % memory.period]
    mass = torch.zeros(length, dtype=torch.float64)
    last = range(max(length - 3, 0), length)
    rows: dict[tuple[int, int, int], Tensor] = {}
    for layer in range(4):
        for head in range(6):
            for at in last:
                q = tap.queries[layer][0, at - length, head]
                rows[layer, head, at] = cache.keys[layer, 0, : at + 1, head // 3] @ q / math.sqrt(8)
                mass[: at + 1] += rows[layer, head, at].softmax(0)
    free = sorted(range(SINK, max(length - WINDOW, SINK)), key=lambda p: -float(mass[p]))[: 20 - SINK - WINDOW]
    listed = sorted({*range(min(SINK, length)), *range(max(length - WINDOW, 0), length), *free})
    assert [p for p in memory.listed[1].tolist() if p >= 0] == listed
    unread = [p for p in range(length) if p not in listed]
    assert bool(unread) == (length > 20)
    for layer in range(4):
        for head in range(6):
            if not unread:
                assert memory.tokens.bias[layer, 1, head] == float("-inf")
                continue
            weights = [rows[layer, head, at][unread].softmax(0) for at in last]
            want = torch.stack([one @ cache.values[layer, 0, unread, head // 3] for one in weights]).mean(0)
            torch.testing.assert_close(memory.tokens.values[layer, 1, head], want, rtol=1e-5, atol=1e-6)
    assert not memory.tokens.values[:, 0].any() and (memory.tokens.bias[:, 0] == float("-inf")).all()


def test_a_list_that_is_padded_leaves_the_first_position_unread(target: Decoder) -> None:
    """With no sink it may be the heaviest of all."""
    chosen = selection(20, Rest(queries=1)).model_copy(update={"sink": 0, "window": 0})
    memory = RestMemory(chosen, 20, target, 3, 1)
    memory.listed[0, :2] = torch.tensor([1, 2])
    keys = random(4, 1, 4, 2, 8)
    lengths, every = torch.tensor([4]), slice(None)
    unread = memory._unread(lengths, 4, every)
    memory._make(memory.tokens, torch.zeros(1, 1).long(), lengths, keys, keys, unread, every, None)
    wanted = made(
        torch.zeros(1, 1, 6, 8).double(), keys[0], keys[0], torch.tensor([[3]]), torch.tensor([[1, 0, 0, 1]]) > 0
    )
    torch.testing.assert_close(memory.tokens.values[0, 0], wanted.values[0])


def test_with_several_budgets_a_prompt_s_tokens_stand_for_all_but_the_smallest(target: Decoder) -> None:
    rule = Rule(sizes=(8, 20), target_arr=0.5)
    policy = replace(make_policy("dustin-rest", selection(20, Rest(queries=2))), rule=rule)  # type: ignore[call-arg]
    memory = policy.memory(target, 3, 1, 200)
    assert isinstance(memory, RestMemory)
    cache = target.cache(1, 200)
    tap = QueryTap(dense_attention, range(4), last=16)
    prefill(target, cache, PROMPTS[1][:18], attend=tap, tail=16)
    memory.admit(0, Prompted(18, cache, tap.queries), None)
    assert int((memory.listed >= 0).sum()) == 8 and memory.tokens.bias.isfinite().all()


# --- in steps


def engine(
    target: Decoder, draft: Decoder, budget: int, rest: Rest, rows: int = 3, method: str = "dustin-rest"
) -> Engine:
    chosen = selection(budget, rest)
    return Engine(Stepper(target, draft, make_policy(method, chosen), chosen, 3, VOCAB), frozenset(), rows=rows)


def texts(served: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [one.tokens for one in served.generate(prompts, 30)[0]]


def test_a_prefix_that_the_budget_covers_is_verified_exactly(target: Decoder) -> None:
    draft = random_decoder(SHAPE, torch.float64, "cpu", seed=2)
    want = texts(engine(target, draft, 400, Rest(), method="vanilla"), PROMPTS)
    assert texts(engine(target, draft, 400, Rest(period=3)), PROMPTS) == want
    assert texts(engine(target, draft, 20, Rest(period=3)), PROMPTS) != want


def test_the_text_of_a_row_does_not_depend_on_the_others(target: Decoder) -> None:
    served = [engine(target, target, 20, Rest(queries=2, period=3), rows=rows) for rows in (1, 4)]
    assert texts(served[0], PROMPTS) == texts(served[1], PROMPTS)


def test_tokens_read_counts_one_for_each_query_head(target: Decoder) -> None:
    """As soon as there is one: a prompt shorter than its list has none, until its text outgrows that."""
    served = engine(target, target, 20, Rest(queries=2, period=4), rows=1)
    read: list[tuple[int, float]] = []

    def note(result: StepResult, _: object) -> None:
        state = served._state
        assert state is not None and isinstance(state.memory, RestMemory)
        count, found = result.packed[0, 4:6].tolist()
        length = int(state.lengths[0]) - int(count)  # before the step
        heads = int(state.memory.tokens.bias[:, 0].isfinite().sum())
        assert found == min(length, 20) + heads / (4 * 2)
        read.append((length, found))

    served.generate([PROMPTS[3]], 60, on_step=note)
    assert read[0] == (8, 8)
    assert read[-1][1] == 20 + 6 / 2  # a KV head reads those of its three query heads


def test_prompts_have_their_turns_at_steps_of_their_own(target: Decoder) -> None:
    """By their tokens and by the seed they are continued with."""
    period = 16
    served = engine(target, target, 20, Rest(queries=2, period=period), rows=4)
    begun: list[list[int]] = []
    prompts = [PROMPTS[0], [*PROMPTS[0][:-1], 36], PROMPTS[0]]
    for seeds in ((0, 0, 0), (0, 0, 5)):
        state = served.fill(prompts, 120, [Draw(seed=seed) for seed in seeds])
        assert isinstance(state.memory, RestMemory)
        begun.append(state.memory.steps[:3].tolist())
    marks = [mark_of(prompt) for prompt in prompts]
    assert begun[0] == [mark % period for mark in marks] and begun[0][0] == begun[0][2] != begun[0][1]
    assert begun[1] == [*begun[0][:2], (marks[2] ^ 5) % period] and begun[1][2] != begun[1][0]


def test_kept_queries_are_those_of_accepted_tokens(target: Decoder) -> None:
    """With a poor draft most slots are written by drafts that are rejected; what is read is what a prefill has."""
    poor = random_decoder(SHAPE, torch.float64, "cpu", seed=5)
    served = engine(target, poor, 400, Rest(queries=3), rows=1)
    held: list[tuple[int, Tensor]] = []

    def keep(*_: object) -> None:
        state = served._state
        assert state is not None and isinstance(state.memory, RestMemory)
        held.append((int(state.lengths[0]), state.memory.queries[:, 0].clone()))

    generations, statistics = served.generate([PROMPTS[2]], 40, on_step=keep)
    assert 1 < statistics.tau < 3
    tap = QueryTap(dense_attention, range(4), last=64)
    prefill(target, target.cache(1, 200), PROMPTS[2] + generations[0].tokens, attend=tap, tail=64)
    first = len(PROMPTS[2]) + 40 - 64
    for length, queries in held[:-1]:
        slots = [at % queries.shape[1] for at in range(length - 3, length)]
        for layer in range(4):
            want = tap.queries[layer][0, length - 3 - first : length - first]
            torch.testing.assert_close(queries[layer, slots], want)
