"""The search for throughput: what is enumerated, the walk over a continuation, the rules, and the model of time."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search import document, selected_arr

from dustin_profile.latency import measure
from dustin_profile.latency.model import Range, Step, features, fit, predict, steps_left_out, steps_to_fit
from dustin_profile.latency.stage import VERSION, Latency
from dustin_profile.search.budget import Budget
from dustin_profile.search.choosing import choose, front
from dustin_profile.search.phases import SearchOptions, search
from dustin_profile.search.splits import split_choices
from dustin_profile.search.tau import agreement, tokens_per_step, walk
from dustin_profile.search.throughput import search_throughput
from dustin_profile.settings import ObjectiveSettings
from dustin_runtime.errors import MissingError, NothingMeasuredError, UsageError

AMONG = Range((24, 32), (1, 2, 4))
COEFFICIENTS = {
    **{
        "full": 9.0,
        "windowed": 8.0,
        "full 2": 2.0,
        "full 4": 1.0,
        "windowed 2": 1.5,
        "windowed 4": 2.5,
        "read 32": 3.0,
    },
    **{
        "read_drafted": 0.01,
        "windowed_read_drafted": 0.005,
        "history": 0.4,
        "lookahead": 0.3,
        "lookahead_drafted": 0.05,
    },
}
THROUGHPUT = ObjectiveSettings(objective="throughput")


def latency(batch: int = 2) -> Latency:
    """As a device that the model fits exactly would give it."""
    inputs = {"version": VERSION, "batch": batch, "context": 60, "budgets": [24, 32], "depths": [1, 2, 4]}
    return Latency(
        {
            "inputs": inputs,
            "device": "made up",
            "dtype": "float32",
            "coefficients": COEFFICIENTS,
            "max_relative_error": 0.01,
        }
    )


def documents(seeds: range, tokens: int = 30):
    """Random traces with random agreement."""
    found = []
    for seed in seeds:
        agrees = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) < 0.6
        found.append(replace(document(seed), agrees=agrees))
    return found


def options(k: int, layers: int = 3) -> SearchOptions:
    return SearchOptions(Budget(k, sink=2, window=4), draft_layers=layers)


def test_no_split_of_the_greedy_layers_is_better_than_those_enumerated() -> None:
    searched, reported = documents(range(3)), documents(range(3, 5))
    for k in AMONG.budgets:
        budget = options(k).budget
        found = list(split_choices(searched, reported, options(k)))
        whole = search(searched, options(k))
        by_kind = {(one.layers, one.history): one for one in found}
        assert len(by_kind) == len(found) == 7
        seen: dict[tuple[int, bool], float] = {}
        for count, m in product(range(1, 4), range(budget.free + 1)):
            layers = whole.draft.layers[:count]
            each = [float(selected_arr(one, whole.target.layer, layers, budget, m).mean()) for one in searched]
            kind = (count if m else 0, m < budget.free)
            seen[kind] = max(seen.get(kind, 0.0), float(np.mean(each)))
        assert seen.keys() == by_kind.keys()
        for kind, best in seen.items():
            assert float(by_kind[kind].searched.mean()) == pytest.approx(best, abs=1e-12)
        for one in found:
            layers, m = one.found.draft.layers, one.m
            for side, values in ((searched, one.searched), (reported, one.reported)):
                expected = [float(selected_arr(x, whole.target.layer, layers, budget, m).mean()) for x in side]
                assert values.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("cache", ["full", "sink+window", "both"])
def test_the_choice_is_the_best_of_all_combinations(cache: str) -> None:
    searched, reported, device = documents(range(4)), documents(range(4, 6)), latency()
    asked = replace(THROUGHPUT, choose="least-arr", least_arr=0.5, draft_cache=cache)
    windowed = {
        one.document: {k: one.agrees & (torch.arange(30) % (k - 17) > 0) for k in AMONG.budgets}
        for one in (*searched, *reported)
    }
    found = search_throughput(searched, reported, [options(24), options(32)], AMONG.depths, device, asked, 0, windowed)

    def tau(side, windowed_by: int | None, depth: int) -> float:
        agrees = [one.agrees if windowed_by is None else windowed[one.document][windowed_by] for one in side]
        return float(tokens_per_step(agrees, (depth,)).mean())

    best = 0.0
    for k in AMONG.budgets:
        budget, whole = options(k).budget, search(searched, options(k))
        for count, m, depth in product(range(1, 4), range(budget.free + 1), AMONG.depths):
            layers = whole.draft.layers[:count]
            each = [float(selected_arr(one, whole.target.layer, layers, budget, m).mean()) for one in searched]
            if np.mean(each) < 0.5:
                continue
            for windowed_ in {"full": [False], "sink+window": [True], "both": [False, True]}[cache]:
                step = Step(depth, k, windowed_, count if m else 0, m < budget.free)
                best = max(
                    best, 2e3 * tau(searched, k if windowed_ else None, depth) / predict(COEFFICIENTS, step, AMONG)
                )
    assert found.candidate.tokens_per_s == pytest.approx(best)
    record = found.record
    assert len(record["candidates"]) == 2 * 7 * 3 * (2 if cache == "both" else 1)
    chosen = record["candidates"][record["chosen"]]
    assert chosen["search"]["tokens_per_s"] == found.candidate.tokens_per_s
    own = chosen["draft_cache"] == "sink+window"
    assert chosen["assumed_arr"] == (own and chosen["m"] > 0)
    behind = tau(reported, chosen["budget"] if own else None, chosen["depth"])
    assert chosen["tau"]["mean"] == pytest.approx(behind)
    assert chosen["tokens_per_s"]["mean"] == pytest.approx(2e3 * behind / chosen["step_ms"])
    window = record["windowed_draft"]
    assert window["least_share_of_tau"] == pytest.approx(window["step_ms"] / window["full_step_ms"])


def naive(agrees: list[bool], depth: int) -> tuple[int, int]:
    """Token by token: a step ends at the first disagreement, or with the target's token behind `depth` drafts."""
    emitted = steps = drafted = 0
    done = 0
    for place in range(1, len(agrees)):
        emitted += 1
        if drafted == depth or not agrees[place]:
            steps, drafted, done = steps + 1, 0, emitted
        else:
            drafted += 1
    if drafted == depth:  # the target's token lies behind the end
        steps, done = steps + 1, emitted + 1
    return done, steps


@settings(max_examples=300, deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 9))
def test_a_walk_counts_as_a_decoder_does(agrees: list[bool], depth: int) -> None:
    assert walk(torch.tensor(agrees, dtype=torch.bool), depth) == naive(agrees, depth)


def test_a_draft_that_is_always_or_never_right() -> None:
    whole = replace(document(0), agrees=torch.ones(41, dtype=torch.bool))
    never = replace(document(1), agrees=torch.zeros(41, dtype=torch.bool))
    assert tokens_per_step([whole.agrees, never.agrees], (1, 4, 7)).tolist() == [[2, 5, 8], [1, 1, 1]]


def test_a_continuation_without_a_whole_step_is_left_out() -> None:
    short = replace(document(0), agrees=torch.ones(3, dtype=torch.bool))
    long = replace(document(1), agrees=torch.ones(9, dtype=torch.bool))
    found = tokens_per_step([short.agrees, long.agrees], (2, 4))
    assert found[0, 1].isnan() and found[1].tolist() == [3, 5]
    with pytest.raises(NothingMeasuredError, match=r"no continuation holds a step of depth 4; raise --continuation"):
        tokens_per_step([short.agrees], (2, 4))


def test_traces_without_agreement_are_named() -> None:
    with pytest.raises(MissingError, match=r"document 1: its traces do not say .*; delete the folder of traces"):
        agreement([*documents(range(1)), document(1)], 1)


def table(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_a_rule_with_one_candidate_takes_it() -> None:
    for documents_ in ([0.4], [0.4, 0.6]):
        assert choose("within-1se", 0.9, [3.0], table(documents_)) == 0
    assert choose("least-arr", 0.4, [3.0], table([0.4])) == 0


def test_within_one_standard_error_is_paired_over_documents() -> None:
    best = [0.9, 0.5, 0.7]
    steady = [value - 0.01 for value in best]  # a little worse on every document: no chance explains that
    uneven = [0.80, 0.56, 0.69]  # a worse mean, but better on one document
    values = table(best, steady, uneven)
    assert choose("within-1se", 0.9, [1.0, 2.0, 3.0], values) == 2
    assert choose("within-1se", 0.9, [1.0, 2.0, 0.5], values) == 0
    # One document has no standard error: only what equals the best.
    assert choose("within-1se", 0.9, [1.0, 2.0, 3.0], table([0.9], [0.9], [0.89])) == 1


def test_ties_go_to_the_higher_arr_then_to_the_first() -> None:
    values = table([0.90, 0.92], [0.95, 0.95], [0.95, 0.95 + 1e-15], [0.8, 0.8])
    assert choose("least-arr", 0.9, [5.0, 5.0, 5.0, 9.0], values) == 1
    assert choose("least-arr", 0.95, [5.0, 5.0, 5.0, 9.0], values) == 1
    assert choose("least-arr", 0.8, [5.0, 5.0, 5.0, 9.0], values) == 3


def test_what_nothing_reaches_says_what_is_reachable() -> None:
    with pytest.raises(
        UsageError, match=r"--least-arr 0.99: the best candidate has 0.9500 on the search documents; ask"
    ):
        choose("least-arr", 0.99, [1.0, 2.0], table([0.95, 0.95], [0.2, 0.2]))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    speed, arr = [float(x) for x, _ in points], [y / 4 for _, y in points]
    found = front(speed, arr)

    def beaten(index: int) -> bool:
        x, y = points[index]
        return any(a >= x and b >= y and (a, b) != (x, y) for a, b in points)

    assert {points[index] for index in found} == {points[i] for i in range(len(points)) if not beaten(i)}
    assert len({points[index] for index in found}) == len(found)
    assert speed == sorted(speed) or [speed[i] for i in found] == sorted((speed[i] for i in found), reverse=True)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("among", [AMONG, Range((128, 256, 512, 1024), range(2, 9))])
def test_a_fit_recovers_the_coefficients_of_synthetic_times(among: Range, layers: int) -> None:
    steps = steps_to_fit(among, layers)
    names = list(features(steps[0], among))
    truth = {name: 1.0 + 0.1 * place for place, name in enumerate(names)}
    truth |= {"read_drafted": 0.002, "windowed_read_drafted": 0.001}
    found = fit(steps, [predict(truth, step, among) for step in steps], among)
    assert found == pytest.approx(truth, rel=1e-6)
    for step in steps_left_out(among, layers):
        assert predict(found, step, among) == pytest.approx(predict(truth, step, among), rel=1e-6)


def test_what_other_programs_take_of_a_cpu_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take as long as the model says, on a device that other programs slow down for a while."""
    steps = steps_to_fit(AMONG, 2)
    runs = 0

    class Running:
        on_gpu = False
        first = 1.0

        def __init__(self, target: object, draft: object, vocab: int, step: Step, *sizes: int) -> None:
            self.ms = predict(COEFFICIENTS, step, AMONG)

        def run(self, count: int) -> float:
            nonlocal runs
            runs += 1
            return self.ms * (3.0 if runs // 40 % 3 == 1 else 1.0)

    monkeypatch.setattr(measure, "_Running", Running)
    target = SimpleNamespace(device=torch.device("cpu"))
    done: list[float] = []
    timed = measure.time_steps(target, None, 0, steps, 1, 60, done.append)  # type: ignore[arg-type]
    assert len(done) == len(steps) and runs > 80
    wanted = [predict(COEFFICIENTS, step, AMONG) for step in steps]
    assert [one.ms for one in timed] == pytest.approx(wanted)
    assert max(one.most for one in timed) > 2 * max(wanted)


def test_a_fit_of_one_depth_and_budget_predicts_what_was_measured() -> None:
    among = Range((64,), (3,))
    truth = {"full": 5.0, "windowed": 4.0, "history": 0.5, "lookahead": 0.25, "lookahead_drafted": 0.0}
    truth |= {"read_drafted": 0.0, "windowed_read_drafted": 0.0}
    steps = steps_to_fit(among, 2)
    found = fit(steps, [predict(truth, step, among) for step in steps], among)
    for step in (*steps, *steps_left_out(among, 2)):
        assert predict(found, step, among) == pytest.approx(predict(truth, step, among), rel=1e-9)


def test_noise_never_makes_more_work_faster() -> None:
    among = Range((128, 256, 512), (2, 3, 4))
    noise = np.random.default_rng(0)
    steps = steps_to_fit(among, 3)
    found = fit(
        steps,
        [predict(dict.fromkeys(features(s, among), 1.0), s, among) * noise.uniform(0.5, 2) for s in steps],
        among,
    )
    for depth, k, windowed, layers in product((2, 3), (128, 256), (False, True), (0, 1, 2)):
        one = predict(found, Step(depth, k, windowed, layers, True), among)
        for more in (
            Step(depth + 1, k, windowed, layers, True),
            Step(depth, 2 * k, windowed, layers, True),
            Step(depth, k, windowed, layers + 1, True),
        ):
            assert predict(found, more, among) >= one - 1e-9


@pytest.mark.parametrize("depths", [(2,), (2, 3), tuple(range(2, 9))])
@pytest.mark.parametrize("budgets", [(64,), (128, 256), (128, 256, 512, 1024)])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_model_is_tested_on_steps_that_it_was_not_fitted_to(
    depths: tuple[int, ...], budgets: tuple[int, ...], layers: int
) -> None:
    among = Range(budgets, depths)
    fitted, left_out = steps_to_fit(among, layers), steps_left_out(among, layers)
    assert left_out and not set(left_out) & set(fitted)
    assert (
        (len(left_out) == len(set(left_out)) and len(left_out) == 4)
        or len(depths) < 3
        or len(budgets) < 2
        or layers < 2
    )
