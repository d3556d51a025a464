"""The search on small made-up traces: the curve against selection itself, and the phases against planted answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dustin_profile.search.arr import arr, first_best, mass, prefix_arr
from dustin_profile.search.budget import Budget, Split, trial_splits
from dustin_profile.search.curve import HistoryList, arr_curve, lookahead_sum
from dustin_profile.search.evaluate import POLICIES, Policy, evaluate
from dustin_profile.search.phases import (
    SearchOptions,
    find_draft_layers,
    find_split,
    find_target_layer,
    search,
)
from dustin_profile.search.study import Sampler, write_study
from dustin_profile.traces.windows import Windows
from dustin_runtime.errors import ConfigError, NothingMeasuredError, UsageError
from dustin_runtime.selection import select

BUDGET = Budget(24, sink=2, window=4)


def document(
    seed: int,
    prefix: Sequence[int] = (60, 48, 24, 17),
    columns: int = 60,
    target_layers: int = 3,
    draft_layers: int = 4,
    levels: int | None = None,
) -> Windows:
    """Random traces; `levels` rounds the scores to that many values, for ties."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(prefix)
    inside = torch.arange(columns) < lengths[:, None]

    def scores(layers: int) -> torch.Tensor:
        rows = torch.rand(layers, len(prefix), columns, generator=generator) ** 4
        if levels is not None:
            rows = (rows * levels).floor() / levels
        return (rows * inside).half()

    logits = 2 * torch.randn(len(prefix), columns, generator=generator)
    truth = 0.8 * logits.masked_fill(~inside, -torch.inf).softmax(-1)
    tail = 1 - truth.sum(-1)
    return Windows(f"document {seed}", lengths, truth, tail, scores(target_layers), scores(draft_layers))


def selected_arr(
    windows: Windows, target_layer: int, draft_layers: Sequence[int], budget: Budget, m: int
) -> torch.Tensor:
    """ARR [W] by selecting anew."""
    kept = select(
        lookahead_sum(windows, draft_layers),
        windows.history[target_layer].float(),
        windows.prefix,
        budget=budget.k,
        m=m,
        sink=budget.sink,
        window=budget.window,
    )
    return arr(windows, mass(windows.truth, kept).sum(-1))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    sink=st.integers(0, 3),
    window=st.integers(0, 5),
    free=st.integers(1, 36),
    levels=st.sampled_from([None, 2, 5]),
)
def test_curve_equals_selection_at_every_m(
    seed: int, lengths: list[int], sink: int, window: int, free: int, levels: int | None
) -> None:
    windows = document(seed, lengths, columns=40, levels=levels)
    budget = Budget(sink + window + free, sink, window)
    curve = arr_curve(windows, 1, [2, 0], budget)
    assert curve.shape == (len(lengths), free + 1)
    for m in range(free + 1):
        expected = selected_arr(windows, 1, [2, 0], budget, m)
        torch.testing.assert_close(curve[:, m], expected, rtol=0, atol=1e-12)
    assert curve.min() >= 0
    assert curve.max() <= 1 + 1e-6
    short = windows.prefix <= budget.k
    torch.testing.assert_close(curve[short], torch.ones_like(curve[short]), rtol=0, atol=1e-6)


def test_smaller_totals_come_from_the_same_lists() -> None:
    windows = document(5, levels=5)
    splits = [Split(free, m) for free in (1, 7, 18) for m in range(0, free + 1, 3)]
    recovered = HistoryList.of(windows, windows.history[0].float(), BUDGET).recovered(
        lookahead_sum(windows, [1]), splits
    )
    for column, (free, m) in enumerate(splits):
        smaller = BUDGET._replace(k=free + BUDGET.sink + BUDGET.window)
        expected = selected_arr(windows, 0, [1], smaller, m)
        torch.testing.assert_close(arr(windows, recovered[:, column]), expected, rtol=0, atol=1e-12)


def test_draft_signals_may_be_batched() -> None:
    windows = document(6)
    history = HistoryList.of(windows, windows.history[0].float(), BUDGET)
    splits = trial_splits(BUDGET, "m")
    batched = history.recovered(windows.lookahead.float(), splits)
    for layer in range(4):
        assert torch.equal(batched[layer], history.recovered(windows.lookahead[layer].float(), splits))


def test_parts_hold_all_layers_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [document(7)]
    whole = search(documents, SearchOptions(BUDGET, draft_layers=2))
    monkeypatch.setattr("dustin_profile.search.curve._PART", 1)
    apart = search(documents, SearchOptions(BUDGET, draft_layers=2))
    assert torch.equal(apart.target.per_document, whole.target.per_document)
    for one, other in zip(apart.draft.rounds, whole.draft.rounds, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_prefix_arr_is_a_share_of_the_prefix() -> None:
    windows = document(1)
    everything = torch.arange(60).where(torch.arange(60) < windows.prefix[:, None], -1)
    recovered = mass(windows.truth, everything).sum(-1)
    torch.testing.assert_close(prefix_arr(windows, recovered), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(arr(windows, recovered), torch.ones(4, dtype=torch.float64))
    assert (prefix_arr(windows, recovered / 2) < arr(windows, recovered / 2)).all()


def test_trial_splits_read_as_m_and_as_k() -> None:
    paper = Budget(512, 4, 16)
    assert trial_splits(paper, "m") == [(492, 128), (492, 192), (492, 256)]
    assert trial_splits(paper, "k") == [(108, 54), (172, 86), (236, 118)]
    assert trial_splits(Budget(32, 4, 16), "m") == [(12, 8), (12, 12)]
    assert trial_splits(Budget(32, 4, 16), "k") == [(1, 1)]
    with pytest.raises(ConfigError, match="budget"):
        trial_splits(Budget(20, 4, 16), "m")


def test_first_best_takes_the_first_of_equals() -> None:
    assert first_best(torch.tensor([torch.nan, 0.5, 0.7, 0.7 + 1e-14, 0.1], dtype=torch.float64)) == 2


def planted(seed: int, target_layer: int, draft_layers: Sequence[int]) -> Windows:
    """As many important tokens as are free. History of one layer knows 9 of them, the first draft layer given 6
    others, the second the last 3; every other layer knows none."""
    windows = document(seed, prefix=(60, 60), target_layers=4, draft_layers=5)
    generator = torch.Generator().manual_seed(seed)
    truth = torch.full((2, 60), 0.001)
    for window in range(2):
        important = BUDGET.sink + torch.randperm(54, generator=generator)[: BUDGET.free]
        truth[window, important] = 0.04
        windows.history[:, window, important] = 0
        windows.lookahead[:, window, important] = 0
        windows.history[target_layer, window, important[:9]] = 4
        for layer, part in zip(draft_layers, (slice(9, 15), slice(15, 18)), strict=False):
            windows.lookahead[layer, window, important[part]] = 4
    return replace(windows, truth=truth, tail=1 - truth.sum(-1))


def test_phases_find_planted_layers() -> None:
    documents = [planted(seed, 2, [3, 1]) for seed in range(3)]
    result = search(documents, SearchOptions(BUDGET, draft_layers=2))
    assert result.target.layer == 2
    assert result.target.per_document.shape == (3, 4)
    assert result.draft.layers == (3, 1)
    assert [tuple(values.shape) for values in result.draft.rounds] == [(3, 5), (3, 5)]
    assert result.draft.rounds[1][:, 3].isnan().all()
    assert result.draft.rounds[1].isnan().sum() == 3
    assert result.curve.per_document.shape == (3, BUDGET.free + 1)
    assert result.curve.m == int(result.curve.per_document.mean(0).argmax())
    assert result.curve.m == 9


def test_phase_values_are_those_of_selection() -> None:
    documents = [document(0), document(1, prefix=(50,))]
    target = find_target_layer(documents, BUDGET)
    draft = find_draft_layers(documents, 1, SearchOptions(BUDGET, draft_layers=2))
    curve = find_split(documents, 1, draft.layers, BUDGET)
    for row, windows in enumerate(documents):
        for layer in range(3):
            expected = selected_arr(windows, layer, [], BUDGET, 0).mean()
            torch.testing.assert_close(target.per_document[row, layer], expected, rtol=0, atol=1e-12)
        for layer in set(range(4)) - {draft.layers[0]}:
            layers = [draft.layers[0], layer]
            values = [selected_arr(windows, 1, layers, BUDGET, m).mean() for m in (6, 9, 12)]
            expected = torch.stack(values).mean()
            torch.testing.assert_close(draft.rounds[1][row, layer], expected, rtol=0, atol=1e-12)
        expected = selected_arr(windows, 1, draft.layers, BUDGET, 5).mean()
        torch.testing.assert_close(curve.per_document[row, 5], expected, rtol=0, atol=1e-12)


def test_every_document_counts_once() -> None:
    """Ten windows that prefer one layer must not outvote two documents that prefer another."""
    one = planted(0, 3, [0])
    many = replace(
        one,
        prefix=one.prefix.repeat(5),
        truth=one.truth.repeat(5, 1),
        tail=one.tail.repeat(5),
        history=one.history.repeat(1, 5, 1),
        lookahead=one.lookahead.repeat(1, 5, 1),
    )
    others = [planted(seed, 1, [0]) for seed in (1, 2)]
    windows_alone = torch.cat([find_target_layer([each], BUDGET).per_document for each in (many, *others)])
    by_window = (windows_alone * torch.tensor([10, 2, 2])[:, None]).sum(0)
    assert first_best(by_window) == 3
    assert find_target_layer([many, *others], BUDGET).layer == 1


def test_equal_layers_go_to_the_lower() -> None:
    windows = document(4, target_layers=1, draft_layers=1)
    same = replace(windows, history=windows.history.repeat(3, 1, 1), lookahead=windows.lookahead.repeat(4, 1, 1))
    result = search([same], SearchOptions(BUDGET, draft_layers=3))
    assert result.target.layer == 0
    assert result.draft.layers == (0, 1, 2)


def test_stop_when_flat_ends_the_rounds() -> None:
    """Copies of a layer add nothing to it. Without the option all rounds are run."""
    windows = document(4, draft_layers=1)
    copies = replace(windows, lookahead=windows.lookahead.repeat(4, 1, 1))
    flat = find_draft_layers([copies], 0, SearchOptions(BUDGET, draft_layers=3, stop_when_flat=True))
    assert flat.layers == (0,)
    assert len(flat.rounds) == 2
    assert find_draft_layers([copies], 0, SearchOptions(BUDGET, draft_layers=3)).layers == (0, 1, 2)


@pytest.mark.parametrize(("rounds", "message"), [(0, "1 or more"), (5, "the draft's 4 layers")])
def test_rounds_out_of_range_are_refused(rounds: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_draft_layers([document(0)], 0, SearchOptions(BUDGET, draft_layers=rounds))


def test_unusable_traces_are_named() -> None:
    with pytest.raises(NothingMeasuredError, match="no document"):
        find_target_layer([], BUDGET)
    with pytest.raises(NothingMeasuredError, match="document 3: no window"):
        find_target_layer([document(3, prefix=())], BUDGET)
    broken = document(3)
    broken.history[0, 0, 0] = torch.nan
    with pytest.raises(NothingMeasuredError, match="document 3: history"):
        find_target_layer([broken], BUDGET)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 18))
def test_policies_lie_between_nothing_and_the_oracle(seed: int, m: int) -> None:
    documents = [document(seed), document(seed + 1, prefix=(41, 33))]
    result = evaluate(documents, target_layer=1, draft_layers=[3, 0], m=m, budget=BUDGET)
    assert set(result) == set(POLICIES)
    oracle = result["oracle"]
    for recovery in result.values():
        assert recovery.arr.shape == recovery.prefix_arr.shape == (2,)
        assert (recovery.prefix_arr >= 0).all()
        assert (recovery.arr <= 1 + 1e-6).all()
        assert (recovery.arr <= oracle.arr + 1e-12).all()
        assert (recovery.prefix_arr <= oracle.prefix_arr + 1e-12).all()
    curve = find_split(documents, 1, [3, 0], BUDGET).per_document
    shares: dict[Policy, int] = {"hybrid": m, "dustin_t": 0, "dustin_d": BUDGET.free}
    for policy, share in shares.items():
        torch.testing.assert_close(result[policy].arr, curve[:, share], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("k", "first"), [(24, 4), (5, 4), (3, 2)])
def test_streaming_keeps_the_first_and_the_last(k: int, first: int) -> None:
    windows = document(2, prefix=(60,))
    result = evaluate([windows], target_layer=0, draft_layers=[0], m=0, budget=Budget(k, 0, 0))
    row = windows.truth[0].double()
    expected = row[:first].sum() + row[60 - (k - first) :].sum()
    torch.testing.assert_close(result["streaming"].prefix_arr[0], expected / row.sum())


CURVE = [0.9 - ((m - 11) / 60) ** 2 for m in range(31)]


@pytest.mark.parametrize(("sampler", "trials"), [("exact", 1), ("tpe", 14), ("gp", 5), ("brute", 60)])
def test_each_sampler_leaves_a_study(tmp_path: Path, sampler: Sampler, trials: int) -> None:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = tmp_path / "search" / "study.log"
    results = [
        write_study(path, CURVE, name="curve", sampler=sampler, seed=5, trials=trials, attributes={"k": 24})
        for _ in range(2)
    ]
    assert results[0] == results[1]
    assert [file.name for file in path.parent.iterdir()] == ["study.log"]
    study = optuna.load_study(study_name="curve", storage=JournalStorage(JournalFileBackend(str(path))))
    assert study.user_attrs == {"sampler": sampler, "seed": 5, "k": 24}
    tried = {trial.params["m"]: trial.value for trial in study.trials}
    assert all(value == CURVE[m] for m, value in tried.items())
    assert {0, 15, 30} <= set(tried)
    assert results[0].value == max(tried.values())
    assert CURVE[results[0].m] == results[0].value
    assert len(study.trials) == results[0].trials
    if sampler in ("exact", "brute"):
        assert len(tried) == len(study.trials) == 31
        assert results[0].m == 11
    else:
        assert len(study.trials) == trials


def test_equal_values_go_to_the_smaller_m(tmp_path: Path) -> None:
    assert write_study(tmp_path / "study.log", [0.1, 0.7, 0.7, 0.2], name="ties").m == 1


def test_a_study_of_one_value(tmp_path: Path) -> None:
    assert write_study(tmp_path / "study.log", [0.5], name="one", sampler="tpe", trials=3).m == 0


def test_a_failed_study_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study.log"
    write_study(path, CURVE, name="first")
    before = path.read_bytes()
    monkeypatch.setattr("dustin_profile.search.study._record", lambda study, curve: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_study(path, CURVE, name="second")
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["study.log"]


def test_trials_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="trials"):
        write_study(tmp_path / "study.log", CURVE, name="none", sampler="tpe", trials=0)
