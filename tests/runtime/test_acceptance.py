"""Acceptance: what is emitted is distributed as the target's, and a greedy row is exactly the greedy rule."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from dustin_runtime.acceptance import (
    ACCEPT,
    DRAFT,
    FINAL,
    Sampling,
    accept_forced,
    accept_greedy,
    accept_sampled,
    draw,
    forced_passes,
    probabilities,
    rate_for,
    uniform,
)
from dustin_runtime.errors import UsageError

V, DEPTH, ROWS = 8, 2, 40_000
BELOW_ONE = 1 - 2.0**-24
P_VALUE = 1e-3  # every seed is fixed: a test passes always or never


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def full(batch: int, value: float) -> Tensor:
    return torch.full((batch,), value)


def check_distribution(ids: Tensor, expected: Tensor) -> None:
    """Chi-square of ids against probabilities; ids of probability 0 must be absent."""
    counts = torch.bincount(ids, minlength=expected.numel())
    assert counts.numel() == expected.numel()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    share = expected[possible].double()
    assert chisquare(counts[possible].numpy(), (share / share.sum() * len(ids)).numpy()).pvalue > P_VALUE


# --- uniform


def splitmix(state: int) -> int:
    """The published function on unbounded integers."""
    mask = (1 << 64) - 1
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 20260101])
def test_uniform_is_splitmix64(seed: int) -> None:
    gamma, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    for stream in (DRAFT, ACCEPT, FINAL):
        for position in (0, 1, 131_072):
            sequence = splitmix((seed * gamma + stream) & mask)
            bits = splitmix((sequence + (position + 1) * gamma) & mask)
            found = uniform(torch.tensor(seed), torch.tensor(position), stream)
            assert found.dtype == torch.float32 and found.item() == (bits >> 40) / 2**24


@pytest.mark.parametrize("stream", [DRAFT, ACCEPT, FINAL])
def test_uniform_is_uniform_along_positions_and_seeds(stream: int) -> None:
    along = torch.arange(1 << 16)
    for u in (uniform(torch.tensor(3), along, stream), uniform(along, torch.tensor(1000), stream)):
        assert u.min() >= 0 and u.max() < 1
        check_distribution((u * 64).long(), torch.full((64,), 1 / 64))
        check_distribution((u * 2**24).long() % 64, torch.full((64,), 1 / 64))  # the lowest bits too


def test_neighbours_are_not_correlated() -> None:
    seeds, positions = torch.arange(300)[:, None, None], torch.arange(300)[None, :, None]
    u = uniform(seeds, positions, torch.arange(3)).double() - 0.5
    assert u.shape == (300, 300, 3)
    pairs = [(u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[..., 1:], u[..., :-1]), (u[1:, 1:], u[:-1, :-1])]
    pairs += [(u[1:, :-1], u[:-1, 1:]), (u[:, :, 0], u[:, :, 2])]
    for one, other in pairs:
        correlation = (one * other).mean() * 12
        assert abs(correlation) < 4 / math.sqrt(one.numel())
        joint = ((one + 0.5) * 8).long() * 8 + ((other + 0.5) * 8).long()
        check_distribution(joint.flatten(), torch.full((64,), 1 / 64))
    assert u.flatten().unique().numel() > 0.98 * u.numel()  # no sequence repeats another


# --- probabilities


def test_temperature_is_that_of_softmax() -> None:
    logits = normal(3, 2, V).to(torch.bfloat16)
    temperature = torch.tensor([0.5, 1.0, 1.7])
    found = probabilities(logits, temperature, full(3, 1.0), nucleus=False)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, (logits.float() / temperature[:, None, None]).softmax(-1))


@pytest.mark.parametrize("nucleus", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_temperature_zero_is_one_hot_at_the_first_maximum(nucleus: bool, dtype: torch.dtype) -> None:
    logits = torch.tensor([[[1, 5, 5, -math.inf]], [[6e4, -6e4, 6e4, 0]], [[0, 0, 0, 0]]], dtype=dtype)
    found = probabilities(logits, full(3, 0.0), torch.tensor([1.0, 0.3, 0.3]), nucleus=nucleus)
    assert found[:, 0].tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-4, 1e30])
def test_no_temperature_makes_a_nan(temperature: float) -> None:
    logits = torch.tensor([[[3e38, -3e38, 3e38, 1, -math.inf]]])
    found = probabilities(logits, full(1, temperature), full(1, 0.9), nucleus=True)
    assert found.isfinite().all() and abs(found.sum().item() - 1) < 1e-6
    if temperature < 1:
        assert found[0, 0].tolist() == [0.5, 0, 0.5, 0, 0]


@pytest.mark.parametrize(
    ("weights", "top_p", "kept"),
    [
        ([1, 4, 2, 1], 0.49, [1]),
        ([1, 4, 2, 1], 0.5, [1]),  # reaching is enough
        ([1, 4, 2, 1], 0.51, [1, 2]),
        ([1, 4, 2, 1], 0.76, [0, 1, 2]),  # 0 and 3 tie
        ([1, 4, 2, 1], 0.9, [0, 1, 2, 3]),
        ([1, 1, 1, 1], 1e-9, [0]),
        ([1, 1, 1, 1], 0.0, [0]),
        ([1, 1, 1, 1], 0.3, [0, 1]),
        ([0, 1, 0, 1], 0.99, [1, 3]),
        ([1, 4, 2, 1], 1.0, [0, 1, 2, 3]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_p_keeps_the_smallest_set(weights: list[float], top_p: float, kept: list[int], dtype: torch.dtype) -> None:
    weight = torch.tensor(weights, dtype=dtype)
    found = probabilities(weight.log()[None, None], full(1, 1.0), full(1, top_p), nucleus=True)[0, 0]
    expected = torch.zeros(4, dtype=dtype)
    expected[kept] = weight[kept] / weight[kept].sum()
    assert found.dtype == dtype and found.nonzero().flatten().tolist() == kept
    torch.testing.assert_close(found, expected)


def test_ties_in_a_large_vocabulary_go_to_smaller_ids() -> None:
    found = probabilities(torch.zeros(1, 1, 1024), full(1, 1.0), full(1, 0.25), nucleus=True)[0, 0]
    assert found.nonzero().flatten().tolist() == list(range(256))


# --- draw


@pytest.mark.parametrize("u", [0.0, 2.0**-24, 0.5, BELOW_ONE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draw_never_returns_an_id_without_mass(u: float, dtype: torch.dtype) -> None:
    rows = torch.eye(V, dtype=dtype)
    assert draw(rows, full(V, u)).tolist() == list(range(V))
    inner = torch.tensor([0, 0, 0.3, 0, 0.7, 0, 0], dtype=dtype) * torch.tensor([[1.0], [1e-30], [7.0]], dtype=dtype)
    assert draw(inner, full(3, u)).tolist() == [2 if u < 0.3 else 4] * 3
    many = torch.nn.functional.pad(normal(64, 5000).exp().to(dtype), (3, 3))
    found = draw(many, full(64, u))
    assert found.dtype == torch.int64 and (many.gather(1, found[:, None]) > 0).all()
    if u == 0:
        assert (found == 3).all()
    subnormal = torch.tensor([[0, 1e-45, 0]], dtype=torch.float32)
    assert draw(subnormal, full(1, u)).tolist() == [1]


def test_an_id_owns_its_lower_boundary() -> None:
    assert draw(torch.ones(4, 4), torch.tensor([0.0, 0.25, 0.5, 0.75])).tolist() == [0, 1, 2, 3]


def test_draw_survives_a_sum_that_steps_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's parallel sum may; the CPU's does not, so it is made to."""
    sums = torch.tensor([[0.1, 0.6, 0.5999, 0.6001, 1.0]])
    monkeypatch.setattr(Tensor, "cumsum", lambda self, dim: sums)
    assert draw(torch.tensor([[0.1, 0.5, 0.0, 0.0, 0.4]]), torch.tensor([0.60005])).item() == 4
    sums = torch.tensor([[0.1, 0.6, 0.6, 0.9999, 1.0]])
    assert draw(torch.tensor([[0.1, 0.5, 0.0, 0.4, 0.0]]), full(1, BELOW_ONE)).item() == 1  # none passed: most probable


def test_draw_follows_the_distribution() -> None:
    p = normal(V).softmax(-1)
    u = uniform(torch.arange(ROWS), torch.tensor(5), FINAL)
    check_distribution(draw(p.expand(ROWS, V), u), p)
    check_distribution(draw((p * 1e-6).expand(4, ROWS // 4, V), u.view(4, -1)).flatten(), p)


# --- rejection sampling


class Chain(NamedTuple):
    """First-order models: logits of the next token by the last one, [V, V]."""

    target: Tensor
    draft: Tensor


def chains() -> dict[str, Chain]:
    apart = torch.where(torch.arange(V) < V // 2, 5.0, -5.0)
    return {
        "random": Chain(normal(V, V, seed=1) * 1.5, normal(V, V, seed=2) * 1.5),
        "near": Chain(normal(V, V, seed=1), normal(V, V, seed=1) + 0.3 * normal(V, V, seed=2)),
        "apart": Chain(normal(V, V, seed=1) + apart, normal(V, V, seed=2) - apart),
        "equal": Chain(normal(V, V, seed=1), normal(V, V, seed=1)),
    }


def sampled_step(p: Tensor, q: Tensor, last: Tensor, seed: Tensor, start: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """One step from the tokens `last`, first token at `start` ([B]): draft by q, accept by p ([B or 1, V, V])."""
    rows, given, q_rows, position = torch.arange(len(last)), [last], [], start
    p, q = (table.expand(len(last), V, V) for table in (p, q))
    for _ in range(depth):
        q_rows.append(q[rows, given[-1]])
        given.append(draw(q_rows[-1], uniform(seed, position, DRAFT)))
        position = position + 1
    p_rows = torch.stack([p[rows, token] for token in given], dim=1)
    drafts = torch.stack(given, dim=1)[:, 1:]
    u = uniform(seed[:, None], start[:, None] + torch.arange(depth), ACCEPT)
    q_stack = torch.stack(q_rows, dim=1) if depth else p_rows[:, :0]
    return accept_sampled(p_rows, q_stack, drafts, u, uniform(seed, start, FINAL))


@pytest.mark.parametrize("depth", [0, 1, DEPTH])
@pytest.mark.parametrize(
    ("name", "temperature", "top_p"),
    [
        ("random", 1.0, 1.0),
        ("random", 0.7, 0.8),
        ("near", 1.3, 0.95),
        ("apart", 1.0, 1.0),
        ("apart", 1.5, 0.9),
        ("equal", 1.0, 0.6),
    ],
)
def test_tokens_and_pairs_are_distributed_as_the_targets(
    name: str, temperature: float, top_p: float, depth: int
) -> None:
    p, q = (
        probabilities(table[None], full(1, temperature), full(1, top_p), nucleus=top_p < 1) for table in chains()[name]
    )
    seed, zero = torch.arange(ROWS) + 7, torch.zeros(ROWS, dtype=torch.int64)
    tokens, accepted = sampled_step(p, q, zero, seed, zero, depth)
    first = tokens[:, 0]
    check_distribution(first, p[0, 0])
    # Rows that emitted one token take the second from their next step, as a run does.
    follow, _ = sampled_step(p, q, first, seed, zero + 1, depth)
    second = torch.where(accepted > 0, tokens[:, min(1, depth)], follow[:, 0])
    check_distribution(first * V + second, (p[0, 0][:, None] * p[0]).flatten())
    if depth:
        # The chance that the first draft stands is the overlap of p and q: more would be wrong, less a waste.
        overlap = torch.minimum(p[0, 0], q[0, 0]).sum().item()
        assert abs((accepted > 0).float().mean().item() - overlap) < 4 * math.sqrt(0.25 / ROWS)


def test_nothing_left_by_rounding_falls_back_to_the_target() -> None:
    """p and q differ by rounding alone, so that their difference has no mass, and u rejects."""
    p, q = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]]), torch.tensor([[[0.25 + 2**-25, 0.75]]])
    drafts, u_accept = torch.tensor([[0]]), torch.tensor([[1 - 2.0**-24]], dtype=torch.float64)
    for u, token in ((0.0, 0), (0.9, 1)):
        tokens, accepted = accept_sampled(p, q, drafts, u_accept, full(1, u))
        assert accepted.item() == 0 and tokens[0, 0].item() == token


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_greedy_rows_equal_the_greedy_rule_in_a_mixed_batch(dtype: torch.dtype) -> None:
    batch, depth, few = 600, 3, 3
    logits, drafting = ((normal(batch, depth + 1, few, seed=seed) * 2).round().to(dtype) for seed in (3, 4))  # ties
    temperature = torch.where(torch.arange(batch) % 2 == 0, 0.0, 0.8)
    top_p = torch.where(torch.arange(batch) % 3 == 0, 0.7, 1.0)
    p, q = (probabilities(x, temperature, top_p, nucleus=True) for x in (logits, drafting[:, :-1]))
    seed, position = torch.arange(batch)[:, None], torch.arange(depth)
    drafts = draw(q, uniform(seed, position, DRAFT))
    u_accept, u_final = uniform(seed, position, ACCEPT), uniform(seed[:, 0], position[0], FINAL)
    u_accept[:60], u_accept[60:120], u_final[:30], u_final[30:60] = BELOW_ONE, 0.0, 0.0, BELOW_ONE
    found = accept_sampled(p, q, drafts, u_accept, u_final)
    expected = accept_greedy(logits.argmax(-1), drafts)
    greedy = temperature == 0
    emitted = torch.arange(depth + 1) <= expected[1][greedy, None]
    assert torch.equal(found[1][greedy], expected[1][greedy])
    assert torch.equal(found[0][greedy][emitted], expected[0][greedy][emitted])
    assert expected[1][greedy].unique().tolist() == [0, 1, 2, 3]
    assert not torch.equal(found[1], expected[1])  # the other rows do sample


def test_accept_greedy_takes_the_longest_matching_prefix() -> None:
    best = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    drafts = torch.tensor([[1, 2], [1, 0], [0, 2], [0, 0]])
    tokens, accepted = accept_greedy(best, drafts)
    assert torch.equal(tokens, best) and accepted.tolist() == [2, 1, 0, 0]
    tokens, accepted = accept_greedy(best[:1, :1], drafts[:1, :0])
    assert tokens.tolist() == [[1]] and accepted.tolist() == [0]


def everything(
    logits: Tensor, drafting: Tensor, temperature: Tensor, top_p: Tensor, seed: Tensor, start: Tensor
) -> list[Tensor]:
    """Every device function once, as a step calls them."""
    position = start[:, None] + torch.arange(drafting.shape[1], device=logits.device)
    plain = probabilities(logits, temperature, top_p, nucleus=False)
    p, q = (probabilities(x, temperature, top_p, nucleus=True) for x in (logits, drafting))
    drafts = draw(q, uniform(seed[:, None], position, DRAFT))
    u, u_final = uniform(seed[:, None], position, ACCEPT), uniform(seed, start, FINAL)
    own = accept_greedy(logits.argmax(-1), drafts)
    sampled, forced = accept_sampled(p, q, drafts, u, u_final), accept_forced(drafts, own[0], u < 0.7)
    return [plain, p, drafts, *own, *sampled, *forced]


def example(batch: int, vocabulary: int) -> tuple[Tensor, ...]:
    logits = normal(batch, 4, vocabulary, seed=8)
    drafting = logits[:, :3] + 0.5 * normal(batch, 3, vocabulary, seed=9)
    temperature = torch.tensor([0.0, 0.8, 1.2]).repeat(batch)[:batch]
    top_p = torch.tensor([1.0, 0.9]).repeat(batch)[:batch]
    return logits, drafting, temperature, top_p, torch.arange(batch) // 2, torch.arange(batch) * 100


def test_a_row_does_not_depend_on_its_batch() -> None:
    inputs = example(12, 50)
    together = everything(*inputs)
    for row in range(12):
        alone = everything(*(tensor[row : row + 1] for tensor in inputs))
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one[0], other[row])
    off = inputs[3] == 1
    assert torch.equal(together[0][off], together[1][off])  # another row's top-p changes no bit of a row without


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_give_valid_ids(temperature: float) -> None:
    logits, drafting, _, top_p, seed, start = example(4, V)
    logits[0] = drafting[0] = math.nan
    logits[1, 1, 3] = math.nan
    logits[2, 2], logits[3, 0, 5] = -math.inf, math.inf
    outputs = everything(logits, drafting, full(4, temperature), top_p, seed, start)
    for ids in outputs[2:]:
        assert ids.dtype == torch.int64 and ids.min() >= 0 and ids.max() < V


def test_shapes_are_static_and_nothing_is_read_on_the_host() -> None:
    """A meta tensor has no values, so whatever reads one raises."""
    inputs = example(6, V)
    outputs = everything(*(tensor.to("meta") for tensor in inputs))
    for found, expected in zip(outputs, everything(*inputs), strict=True):
        assert found.is_meta and found.shape == expected.shape and found.dtype == expected.dtype


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_new_values() -> None:
    inputs = example(6, 20_000)
    held = [torch.zeros_like(tensor, device="cuda") for tensor in inputs]
    everything(*held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = everything(*held)
    for buffer, tensor in zip(held, inputs, strict=True):
        buffer.copy_(tensor)
    graph.replay()
    for found, expected in zip(outputs, everything(*held), strict=True):
        assert torch.equal(found, expected)
    torch.testing.assert_close(outputs[0].cpu(), everything(*inputs)[0], atol=1e-7, rtol=1e-4)
    assert torch.equal(uniform(*held[-2:], ACCEPT).cpu(), uniform(*inputs[-2:], ACCEPT))


# --- forced acceptance


@pytest.mark.parametrize(
    ("tau", "depth"), [(1.0, 4), (1.4, 1), (2.5, 4), (3.6, 4), (5.0, 4), (6.2, 8), (1.0, 0), (2.0, 1)]
)
def test_forced_acceptance_emits_tau_tokens_on_average(tau: float, depth: int) -> None:
    rate = rate_for(tau, depth)
    assert 0 <= rate <= 1
    passes = forced_passes(ROWS, depth, rate, "cpu")
    drafts, own = torch.arange(depth).expand(ROWS, -1), torch.arange(100, 101 + depth).expand(ROWS, -1)
    tokens, accepted = accept_forced(drafts, own, passes)
    mean = accepted.double().mean().item() + 1
    assert mean == tau if tau in (1, depth + 1) else abs(mean / tau - 1) < 0.01
    column = torch.arange(depth + 1)
    assert torch.equal(tokens, torch.where(column < accepted[:, None], column, own))


@pytest.mark.parametrize(("rate", "passing"), [(0.0, {0}), (1.0, {16}), (0.61, {9, 10})])
def test_at_every_position_as_many_rows_accept_as_the_rate_says(rate: float, passing: set[int]) -> None:
    passes = forced_passes(16, 2000, rate, "cpu")
    assert set(passes.sum(dim=0).tolist()) == passing
    assert (passes.double().mean(dim=1) - rate).abs().max() < 0.05  # no row is favoured
    together = (passes[:, 1:] & passes[:, :-1]).double().mean().item()
    assert abs(together - rate**2) < 0.01  # nor does one position tell the next


@pytest.mark.parametrize(("tau", "depth"), [(0.99, 4), (5.01, 4), (1.5, 0), (math.nan, 4)])
def test_a_rate_that_no_depth_gives_is_refused(tau: float, depth: int) -> None:
    with pytest.raises(UsageError, match=rf"^--force-acceptance {tau:g}: .*give 1 to depth\+1 = {depth + 1}$"):
        rate_for(tau, depth)


# --- buffers


def test_rows_start_greedy_and_are_written_in_place() -> None:
    sampling = Sampling.allocate(3, "cpu")
    places = [tensor.data_ptr() for tensor in (sampling.temperature, sampling.top_p, sampling.seed)]
    assert sampling.temperature.tolist() == [0, 0, 0] and sampling.top_p.tolist() == [1, 1, 1]
    sampling.write(1, 0.5, 0.25, 2**63 - 1)
    assert sampling.temperature.tolist() == [0, 0.5, 0] and sampling.top_p.tolist() == [1, 0.25, 1]
    assert sampling.seed.tolist() == [0, 2**63 - 1, 0]
    assert [x.dtype for x in (sampling.temperature, sampling.top_p, sampling.seed)] == [
        torch.float32,
        torch.float32,
        torch.int64,
    ]
    assert places == [tensor.data_ptr() for tensor in (sampling.temperature, sampling.top_p, sampling.seed)]
