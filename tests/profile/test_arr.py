"""ARR from traces and from the pass over them, against full attention matrices and brute force."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_reference import DRAFT, TARGET, continuation, dense_pass

from dustin_profile.evaluation.arr import budgets, splits
from dustin_profile.evaluation.arr.forced import ForcedPass, ForcedRows
from dustin_profile.evaluation.arr.layers import distance_arr, layer_arr, summarise_distances, summarise_layers
from dustin_profile.evaluation.arr.policies import computable, kept, rules
from dustin_profile.evaluation.arr.stage import at_budgets
from dustin_profile.search.budget import Budget
from dustin_profile.search.evaluate import evaluate
from dustin_profile.search.signals import TraceSignals
from dustin_profile.traces.collect import Collector, TraceSettings
from dustin_profile.traces.windows import Windows
from dustin_runtime.config import LayerHeads, Selection
from dustin_runtime.errors import ConflictError, UsageError
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.weights import random_decoder

VOCAB = 600
HISTORY = {layer: [5, 0, 3] for layer in range(4)}
EVALUATION = {0: [1, 4], 1: [2, 3, 5], 2: [0, 5], 3: [3, 1]}
LOOKAHEAD = {layer: [3, 0] for layer in range(3)}
SETTINGS = TraceSettings(continuation=14, windows=4, depth=3, width=3)
PROMPT = torch.randint(0, VOCAB, (61,), generator=torch.Generator().manual_seed(5)).tolist()
DISTANCES = (1, 2, 7)
SELECTION = Selection(
    budget=24,
    sink=2,
    window=4,
    m=7,
    history=LayerHeads(layer=2, heads=(5, 0, 3)),
    lookahead=(LayerHeads(layer=1, heads=(3, 0)), LayerHeads(layer=0, heads=(3, 0))),
)


@pytest.fixture(scope="module")
def target() -> Decoder:
    return sharp(random_decoder(TARGET, torch.float32, "cpu", 1))


@pytest.fixture(scope="module")
def windows(target: Decoder) -> Windows:
    draft = sharp(random_decoder(DRAFT, torch.float32, "cpu", 2))
    collector = Collector(
        target,
        draft,
        history=HISTORY,
        evaluation=EVALUATION,
        lookahead=LOOKAHEAD,
        settings=SETTINGS,
        shared_vocab=VOCAB,
        stop_ids=frozenset(),
        capacity=80,
    )
    return collector.trace("d", PROMPT)


@pytest.fixture(scope="module")
def rows(target: Decoder, windows: Windows) -> ForcedRows:
    return forced_pass(target).rows(PROMPT, windows.text.tolist(), windows.prefix)


def sharp(model: Decoder) -> Decoder:
    """Attention far from uniform."""
    for layer in model.weights.layers:
        layer.qkv.mul_(1.7)
    return model


def forced_pass(target: Decoder, **changes: Any) -> ForcedPass:
    arguments: dict[str, Any] = {
        "evaluation": EVALUATION,
        "history_layer": 2,
        "history": [5, 0, 3],
        "distances": DISTANCES,
        "width": 3,
        "capacity": 80,
    }
    return ForcedPass(target, **(arguments | changes))


def brute_top(scores: torch.Tensor, k: int, allowed: range) -> list[int]:
    return sorted(sorted(allowed, key=lambda position: (-float(scores[position]), position))[:k])


def test_the_pass_gives_rows_of_the_full_attention_matrices(
    target: Decoder, windows: Windows, rows: ForcedRows
) -> None:
    text = PROMPT + continuation(target, PROMPT, 14, VOCAB)
    attention, _ = dense_pass(target, text)
    for window, i in enumerate(windows.prefix.tolist()):
        for layer, heads in EVALUATION.items():
            truth = torch.stack([attention[layer, head, q] for head in heads for q in range(i, i + 3)]).mean(0)
            torch.testing.assert_close(rows.truth[layer, window, :i].double(), truth[:i], atol=2e-6, rtol=1e-4)
        for index, distance in enumerate(DISTANCES):
            every = [attention[layer, head, i - distance] for layer, heads in EVALUATION.items() for head in heads]
            past = torch.stack(every).mean(0)
            torch.testing.assert_close(rows.past[index, window, :i].double(), past[:i], atol=2e-6, rtol=1e-4)
            own = torch.stack([attention[2, head, i - distance] for head in (5, 0, 3)]).sum(0)
            torch.testing.assert_close(rows.past_history[index, window, :i].double(), own[:i], atol=2e-6, rtol=1e-4)
        assert not rows.truth[:, window, i:].any()
        assert not rows.past[:, window, i:].any()
    torch.testing.assert_close(rows.mean_truth(EVALUATION), windows.truth, atol=1e-6, rtol=1e-4)


def test_every_policy_keeps_what_brute_force_keeps(windows: Windows) -> None:
    found = kept(TraceSignals(windows, SELECTION), rules())
    history = windows.history[2].float()
    lookahead = windows.lookahead[1].float() + windows.lookahead[0].float()
    every = windows.lookahead.float().sum(0)
    for window, n in enumerate(windows.prefix.tolist()):
        lists = {name: [p for p in positions[window].tolist() if p >= 0] for name, positions in found.items()}
        for name, scores in (("oracle", windows.truth), ("history-top", history), ("lookahead-top", lookahead)):
            assert lists[name] == brute_top(scores[window], 24, range(n))
        assert lists["lookahead-top-all"] == brute_top(every[window], 24, range(n))
        assert lists["streaming"] == [*range(4), *range(n - 20, n)]
        protected = [*range(2), *range(n - 4, n)]
        for name, m in (("dustin", 7), ("dustin-t", 0), ("dustin-d", 18)):
            ahead = brute_top(lookahead[window], m, range(2, n - 4))
            masked = history[window].clone()
            masked[ahead] = -1
            back = brute_top(masked, 18 - m, range(2, n - 4))
            assert lists[name] == sorted({*protected, *ahead, *back})


def test_only_methods_that_traces_suffice_for() -> None:
    found = computable()
    assert {"dustin", "dustin-t", "dustin-d", "streaming"} <= set(found)
    assert not {"vanilla", "sd", "magicdec", "quest", "snapkv", "specattn-all"} & set(found)


def test_figures_by_budget_equal_the_searchs_own(windows: Windows) -> None:
    selections = at_budgets(SELECTION, [24, 12, 48], int(windows.prefix.min()))
    assert [s.m for s in selections] == [7, 3, 14]
    found = budgets.window_rows(windows, selections, rules())
    assert len(found) == 3 * len(rules()) * 4
    entries = {(entry["policy"], entry["budget"]): entry for entry in budgets.summarise(found)}
    for selection in selections:
        want = evaluate(
            [windows], target_layer=2, draft_layers=[1, 0], m=selection.m, budget=Budget(selection.budget, 2, 4)
        )
        for ours, theirs in (("oracle", "oracle"), ("dustin", "hybrid"), ("dustin-t", "dustin_t"), ("streaming",) * 2):
            entry = entries[ours, selection.budget]
            assert entry["arr"]["mean"] == pytest.approx(float(want[theirs].arr[0]), abs=1e-12)  # type: ignore[index]
            assert entry["prefix_arr"]["mean"] == pytest.approx(float(want[theirs].prefix_arr[0]))  # type: ignore[index]
            assert entry["read"] == selection.budget
            if ours != "oracle":
                assert entry["below_oracle"]["mean"] >= 0


def test_bounds_of_a_dynamic_m() -> None:
    def curve(name: str, group: str, *values: list[float]) -> splits.SplitCurve:
        return splits.SplitCurve(name, group, torch.tensor(values, dtype=torch.float64))

    curves = [
        curve("a", "novels", [0.5, 0.6, 0.9, 0.1], [0.7, 0.6, 0.5, 0.1]),
        curve("b", "novels", [0.5, 0.8, 0.5, 0.3]),
        curve("c", "essays", [0.2, 0.3, 0.4, 0.6]),
    ]
    novels, essays, every = splits.summarise(curves, m=1)
    assert (novels["group"], essays["group"], every["group"]) == ("novels", "essays", splits.ALL)
    mean = {name: value["mean"] for name, value in novels["arr"].items()}
    assert novels["curve"] == pytest.approx([0.55, 0.7, 0.6, 0.2])
    assert mean["dustin-t"] == pytest.approx(0.55) and mean["dustin-d"] == pytest.approx(0.2)
    assert mean["dustin"] == mean["best_of_three"] == pytest.approx(0.7)
    assert (novels["best_m"], novels["best_of_three"]) == (1, "dustin")
    assert mean["best_m_per_document"] == pytest.approx((0.7 + 0.8) / 2)
    assert mean["best_of_three_per_window"] == pytest.approx(((0.6 + 0.7) / 2 + 0.8) / 2)
    assert mean["best_m_per_window"] == pytest.approx(((0.9 + 0.7) / 2 + 0.8) / 2)
    assert (essays["best_m"], essays["best_of_three"]) == (3, "dustin-d")
    assert essays["arr"]["dustin"]["low"] is None  # one document says nothing about others
    assert every["documents"] == 3 and every["windows"] == 4
    order = ["dustin", "best_m", "best_m_per_document", "best_m_per_window"]
    found = [every["arr"][name]["mean"] for name in order]
    assert found == sorted(found)
    assert len(splits.summarise(curves[:2], m=1)) == 1


def test_layers_and_distances_equal_brute_force(windows: Windows, rows: ForcedRows) -> None:
    layers = layer_arr(rows, windows, SELECTION)
    lists = kept(TraceSignals(windows, SELECTION), rules())
    prefixes = windows.prefix.tolist()

    def recovered(truth: torch.Tensor, keep: list[list[int]]) -> float:
        shares = [1 - float(row.sum()) + float(row[chosen].sum()) for row, chosen in zip(truth, keep, strict=True)]
        return sum(shares) / len(shares)

    for layer in range(4):
        truth = rows.truth[layer].double()
        best = [brute_top(truth[w], 24, range(n)) for w, n in enumerate(prefixes)]
        assert layers["oracle-by-layer"][layer] == pytest.approx(recovered(truth, best), abs=1e-9)
        own = [brute_top(windows.history[layer, w], 18, range(2, n - 4)) for w, n in enumerate(prefixes)]
        own = [[*chosen, 0, 1, *range(n - 4, n)] for chosen, n in zip(own, prefixes, strict=True)]
        assert layers["history-by-layer"][layer] == pytest.approx(recovered(truth, own), abs=1e-9)
        for name in ("oracle", "dustin", "dustin-t", "dustin-d", "streaming"):
            keep = [[p for p in positions if p >= 0] for positions in lists[name].tolist()]
            assert layers[name][layer] == pytest.approx(recovered(truth, keep), abs=1e-9)
    assert layers["history-by-layer"][2] == pytest.approx(layers["dustin-t"][2], abs=1e-12)

    found = {(e["rule"], e["distance"]): e for e in distance_arr(rows, windows, [SELECTION], DISTANCES)}
    truth = windows.truth.double()
    for index, distance in enumerate(DISTANCES):
        past = [brute_top(rows.past[index, w], 24, range(n)) for w, n in enumerate(prefixes)]
        assert found["all-heads", distance]["arr"] == pytest.approx(recovered(truth, past), abs=1e-9)
    served = [[p for p in positions if p >= 0] for positions in lists["dustin-t"].tolist()]
    assert found["dustin-t", 1]["arr"] == pytest.approx(recovered(truth, served), abs=1e-6)  # traces hold fp16
    summary = summarise_distances([list(found.values()), list(found.values())])
    assert all(entry["below_oracle"]["mean"] >= 0 and entry["arr"]["documents"] == 2 for entry in summary)
    assert summarise_layers([layers])["dustin"][3]["mean"] == layers["dustin"][3]


def test_a_text_that_ends_before_the_windows_is_refused(target: Decoder, windows: Windows) -> None:
    with pytest.raises(ConflictError, match="hold its first 71 tokens, their windows need 75: trace it again"):
        forced_pass(target).rows(PROMPT, windows.text[:10].tolist(), windows.prefix)


@pytest.mark.parametrize(
    ("wanted", "least", "message"),
    [([64], 64, "--budget 64: covers the shortest traced prompt"), (None, 7, "none fits"), ([5], 64, "--budget: ")],
)
def test_budgets_that_say_nothing_are_refused(wanted: list[int] | None, least: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        at_budgets(SELECTION, wanted, least)


def test_default_budgets_leave_something_out() -> None:
    assert [s.budget for s in at_budgets(SELECTION, None, 1024)] == [24, 32, 64, 128, 256, 512]
