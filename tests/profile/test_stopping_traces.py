"""An end of tracing before all documents: their order, what is decided, and what is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dustin_profile.data import Calibration
from dustin_profile.search.budget import Budget
from dustin_profile.search.phases import SearchOptions, SearchResult, search
from dustin_profile.search.stopping import BATCH, Decision, could_gain, in_order
from dustin_profile.settings import DataSettings
from dustin_profile.statistics import interval, split, upper_ends
from dustin_profile.traces import stage
from dustin_profile.traces.collect import Heads
from dustin_profile.traces.stage import calibration, collect_traces
from dustin_profile.traces.store import TraceStore
from dustin_profile.traces.windows import Windows
from dustin_runtime.files import read_json
from dustin_runtime.loading import Pair, open_pair
from dustin_runtime.models.decoder import Decoder

COLUMNS = 64


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(1, 7), st.sampled_from([0.1, 0.3, 0.5, 0.75]), st.integers(0, 99))
def test_every_beginning_has_its_share_of_sources_and_of_held_out_documents(
    books: int, pieces: int, held_out: float, name: int
) -> None:
    documents = [(f"{name}/{book}#{piece}", f"{name}/{book}") for book in range(books) for piece in range(pieces)]
    ids, sources = (list(column) for column in zip(*documents, strict=True))
    order = in_order(ids, sources, held_out)
    assert sorted(order) == list(range(len(ids)))
    backwards = in_order(ids[::-1], sources[::-1], held_out)
    assert [ids[index] for index in order] == [ids[::-1][index] for index in backwards]
    held = split(ids, sources, held_out)
    for end in range(4 if books >= 4 else 1, len(order) + 1):
        first = order[:end]
        now = split([ids[index] for index in first], [sources[index] for index in first], held_out)
        if len(ids) > 1 and end > 1:
            assert now == held & {ids[index] for index in first}
        if books >= 4:
            counts = Counter(sources[index] for index in first)
            assert len(counts) == min(end, books)
            for side in (True, False):
                each = [count for source, count in counts.items() if (f"{source}#0" in held) is side]
                assert not each or max(each) - min(each) <= 1


@pytest.mark.parametrize("documents", [5, 30])
def test_upper_ends_are_those_of_single_intervals(documents: int) -> None:
    values = np.random.default_rng(1).normal(0, 1, (documents, 3))
    single = [interval(values[:, column], seed=0).high for column in range(3)]
    np.testing.assert_allclose(upper_ends(values, 0), single, atol=1e-9 if documents < 16 else 0.05)


def traces(seed: int, gains: Sequence[float], noise: float) -> Windows:
    """Target layers whose history finds so much of the truth, which varies by document and layer."""
    random = torch.Generator().manual_seed(seed)
    truth = torch.zeros(1, COLUMNS)
    found = torch.rand(len(gains), generator=random) * noise + torch.tensor(gains)
    history = torch.rand(len(gains), 1, COLUMNS, generator=random) * 0.1
    for layer, value in enumerate(found):
        truth[0, layer] = value
        history[layer, 0, layer] = 1
    lookahead = torch.zeros(2, 1, COLUMNS)
    lookahead[:, 0, 40] = 1
    truth[0, 40] = 0.2
    prefix = torch.tensor([COLUMNS])
    return Windows(str(seed), prefix, truth, 1 - truth.sum(1), history.half(), lookahead.half())


OPTIONS = SearchOptions(Budget(2, 0, 0), draft_layers=1)
"""Two tokens: with one of each model the hybrid has the draft's and the layer's own."""


def rule(within: float = 0.01, least: int = 8, options: SearchOptions = OPTIONS) -> Decision:
    return Decision(options, held_out=0.3, within=within, least=least)


def stored(folder: Path, count: int, gains: Sequence[float], noise: float) -> TraceStore:
    entries = [{"id": str(n), "source": "s", "sha256": str(n)} for n in range(count)]
    store = TraceStore.open(folder, {}, entries)
    for index in range(count):
        store.add(index, traces(index, gains, noise))
    return store


def test_a_clear_winner_is_decided_and_a_doubtful_one_is_not(tmp_path: Path) -> None:
    clear = stored(tmp_path / "clear", 12, (0.4, 0.2, 0.1), 0.001)
    found = rule().reached(clear)
    assert found and found["documents"] == 8
    assert found["could_gain"]["target_layer"] == found["could_gain"]["m"] == 0
    assert rule().decided(clear)
    doubtful = stored(tmp_path / "doubtful", 12, (0.1, 0.1, 0.1), 0.3)
    found = rule().reached(doubtful)
    assert found and found["could_gain"]["target_layer"] > 0.05
    assert not rule().decided(doubtful)
    assert rule(within=0.3).decided(doubtful)


def test_what_hybrid_is_worth_has_to_be_known_too(tmp_path: Path) -> None:
    """A winner that is better by far, but by how much differs."""
    store = stored(tmp_path, 12, (0.6, 0.0, 0.0), 0.0)
    searched = rule()
    found = searched.reached(store)
    assert found and max(found["could_gain"].values()) == 0
    curve = torch.rand(8, 1, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.0, 0.3])
    noisy = SearchResult(*search(store, OPTIONS)[:2], mock.Mock(m=1, per_document=curve.double()))
    with mock.patch("dustin_profile.search.stopping.search", return_value=noisy):
        found = rule().reached(store)
    assert found and found["could_gain"]["m"] == 0
    difference = found["hybrid_minus_dustin_t"]
    assert found["within"] == pytest.approx((difference["high"] - difference["low"]) / 2, abs=1e-6)
    assert found["within"] > 0.03


def test_held_out_documents_decide_nothing(tmp_path: Path) -> None:
    store = stored(tmp_path / "one", 12, (0.3, 0.25, 0.1), 0.1)
    before = rule().reached(store)
    held = split([entry["id"] for entry in store.entries], ["s"] * 12)
    for entry in store.entries:
        if entry["id"] in held:
            store.add(int(entry["id"]), traces(1000, (0.0, 0.1, 0.5), 0.3))
    store = TraceStore.read(tmp_path / "one")
    assert rule().reached(store) == before


def test_a_look_measures_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored(tmp_path, 12, (0.4, 0.2, 0.1), 0.001)
    read: list[int] = []
    load = TraceStore.__getitem__
    monkeypatch.setattr(TraceStore, "__getitem__", lambda self, index: read.append(index) or load(self, index))
    decision = rule()
    first = decision.reached(store)
    assert len(read) == 3 * 8  # a phase reads each document once
    assert decision.reached(store) == first and len(read) == 3 * 8
    assert rule().reached(store) == first


def test_a_round_of_draft_layers_that_gained_nothing_is_compared_with_none(tmp_path: Path) -> None:
    store = stored(tmp_path, 12, (0.4, 0.2, 0.1), 0.1)
    found = search(store, replace(OPTIONS, draft_layers=2, stop_when_flat=True))
    assert len(found.draft.rounds) == 2 and len(found.draft.layers) == 1
    assert could_gain(found)["draft_layers"] == 0


def test_too_few_documents_decide_nothing(tmp_path: Path) -> None:
    store = stored(tmp_path, 2, (0.4, 0.2, 0.1), 0.0)
    assert rule().reached(store) is None
    assert not rule(within=0.99, least=1).decided(store)


@pytest.fixture(scope="module")
def pair(tiny_pair: Any) -> Pair:
    return open_pair(str(tiny_pair.target), str(tiny_pair.draft), offline=True)


FULL = DataSettings(context=256, documents=16, continuation=24, windows=4)
EASY = rule(within=0.9, options=SearchOptions(Budget(64, 4, 16), draft_layers=2))
"""That any traces reach."""


@pytest.fixture(scope="module")
def prompts(pair: Pair) -> Calibration:
    return calibration(pair, FULL, offline=True)


def heads_of(pair: Pair) -> dict[str, Heads]:
    target = {layer: [0, 1, 2, 3] for layer in range(pair.target_shape.layers)}
    draft = {layer: [0, 1, 2, 3] for layer in range(pair.draft_shape.layers)}
    return {"history": target, "evaluation": target, "lookahead": draft}


Collect = Callable[..., TraceStore]


@pytest.fixture(scope="module")
def collect(pair: Pair) -> Collect:
    target = pair.load_target(torch.float32, "cpu")
    loaded = target, pair.load_draft(target)

    def run(folder: Path, prompts: Calibration, decision: Decision | None = None, models: Any = None) -> TraceStore:
        given = models or (lambda: loaded)
        data = replace(FULL, documents=len(prompts.prompts))
        return collect_traces(
            folder, pair, given, torch.float32, 1, data, 4, prompts, heads_of(pair), decision=decision
        )

    return run


def never() -> tuple[Decoder, Decoder]:
    raise AssertionError("there is nothing to trace")


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def easy() -> Decision:
    """With nothing remembered."""
    return rule(EASY.within, EASY.least, EASY.options)


def test_stopping_is_a_run_over_its_first_documents_and_goes_on_from_there(
    tmp_path: Path, prompts: Calibration, collect: Collect, capsys: pytest.CaptureFixture[str]
) -> None:
    full = collect(tmp_path / "full", prompts)
    assert full.stopping is None
    early = collect(tmp_path / "early", prompts, easy())
    order = in_order([p.id for p in prompts.prompts], [p.source for p in prompts.prompts], 0.3)
    assert {entry["id"] for entry in early.entries} == {prompts.prompts[index].id for index in order[:8]}
    record = early.stopping
    assert record == read_json(tmp_path / "early" / "stopping.json")
    asked = ("asked_documents", "used_documents", "least_documents", "decided_within", "budget")
    assert [record[name] for name in asked] == [16, 8, 8, 0.9, 64]
    assert record["reached"]["documents"] == 6 and record["reached"]["within"] < 0.9
    assert "traces: 8 of 16 documents used; other layers or m could gain 0." in capsys.readouterr().err
    # A run that is asked for just these documents traces and searches the same.
    chosen = [prompts.prompts[index] for index in order[:8]]
    exact = collect(tmp_path / "exact", prompts._replace(prompts=chosen))
    traced = {entry["id"]: early[index] for index, entry in enumerate(early.entries)}
    for index, entry in enumerate(exact.entries):
        for name in ("prefix", "truth", "tail", "history", "lookahead"):
            assert torch.equal(getattr(exact[index], name), getattr(traced[entry["id"]], name))
    ids = [prompt.id for prompt in chosen]
    assert split(ids, [prompt.source for prompt in chosen]) == split(
        [prompt.id for prompt in prompts.prompts], [prompt.source for prompt in prompts.prompts]
    ) & set(ids)
    # More documents that happen to be there change nothing, and nothing is traced for them.
    again = collect(tmp_path / "full", prompts, easy(), never)
    assert (again.entries, again.stopping) == (early.entries, record)
    # Without the option the rest follows.
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "early").glob("*.safetensors")}
    assert len(kept) == 8
    assert len(collect(tmp_path / "early", prompts)) == len(collect(tmp_path / "full", prompts, None, never)) == 16
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert shards(tmp_path / "early") == shards(tmp_path / "full")


def test_a_resumed_run_stops_where_it_would_have(tmp_path: Path, prompts: Calibration, collect: Collect) -> None:
    collect(tmp_path / "whole", prompts, easy())
    windows, seen = stage.Collector._windows, []

    def cut(self: Any, *arguments: Any) -> Windows:
        seen.append(arguments)
        if len(seen) == 6:
            raise KeyboardInterrupt
        return windows(self, *arguments)

    with mock.patch.object(stage.Collector, "_windows", cut), pytest.raises(KeyboardInterrupt):
        collect(tmp_path / "cut", prompts, easy())
    assert len(TraceStore.read(tmp_path / "cut")) == 5
    assert TraceStore.read(tmp_path / "cut").stopping is None
    collect(tmp_path / "cut", prompts, easy())
    assert shards(tmp_path / "cut") == shards(tmp_path / "whole")


def test_what_is_not_decided_goes_on_to_the_end(tmp_path: Path, prompts: Calibration, collect: Collect) -> None:
    strict = rule(1e-9, 8, EASY.options)
    with mock.patch.object(Decision, "decided", autospec=True, side_effect=Decision.decided) as asked:
        store = collect(tmp_path, prompts, strict)
    assert len(store) == 16
    assert asked.call_count == (16 - 8) // BATCH + 1
    assert store.stopping and store.stopping["used_documents"] == 16
    assert store.stopping["reached"]["within"] > 1e-9
