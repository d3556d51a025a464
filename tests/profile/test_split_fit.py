"""Settings of the splits that follow the text, fitted on traces whose best ones are known."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dustin_profile.search.arr import arr, mass
from dustin_profile.search.split_fit import arr_of, fit_handicap, fit_laws, fit_split, fit_weight, power_law
from dustin_profile.traces.windows import Windows
from dustin_runtime.config import LayerHeads, Selection, Split
from dustin_runtime.errors import NothingMeasuredError
from dustin_runtime.policies import make_policy
from dustin_runtime.policies.adaptive_split import DustinFeedback
from dustin_runtime.policies.dustin import Dustin
from dustin_runtime.selection import select

ROWS, COLUMNS = 6, 200


def selection(budget: int = 30, m: int = 10, split: Split | None = None) -> Selection:
    return Selection(
        budget=budget,
        sink=2,
        window=4,
        m=m,
        history=LayerHeads(layer=1, heads=(0,)),
        lookahead=(LayerHeads(layer=0, heads=(0,)), LayerHeads(layer=2, heads=(1,))),
        split=split,
    )


def document(
    seed: int, ahead: Tensor | None = None, past: Tensor | None = None, truth: Tensor | None = None
) -> Windows:
    """Random traces, of which signals of the chosen layers and truth may be given, [rows, columns]."""
    chance = torch.Generator().manual_seed(seed)
    skewed = torch.rand(7, ROWS, COLUMNS, generator=chance).pow(6)
    truth = skewed[0] if truth is None else truth
    history, lookahead = skewed[1:3].clone(), skewed[3:6].clone()
    if past is not None:
        history[1] = past
    if ahead is not None:
        lookahead[0], lookahead[2] = ahead / 2, ahead / 2
    truth = 0.9 * truth / truth.sum(-1, keepdim=True)
    return Windows(
        f"document {seed}",
        torch.full((ROWS,), COLUMNS),
        truth,
        1 - truth.sum(-1),
        history.half(),
        lookahead.half(),
    )


def random(seed: int) -> Tensor:
    return torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)).pow(6)


def policy(name: str, **fields: Any) -> Dustin:
    found = make_policy(name, selection(split=Split.model_validate(fields) if fields else None))
    assert isinstance(found, Dustin)
    return found


def test_arr_of_dustin_is_that_of_its_list() -> None:
    windows = document(3)
    lookahead = windows.lookahead[0].float() + windows.lookahead[2].float()
    kept = select(lookahead, windows.history[1].float(), windows.prefix, budget=30, m=10, sink=2, window=4)
    torch.testing.assert_close(arr_of(windows, policy("dustin")), arr(windows, mass(windows.truth, kept).sum(-1)))


def test_feedback_takes_windows_for_steps() -> None:
    """The first is Dustin's; one whose history turns out useless is left for lookahead."""
    truth = random(1)
    windows = document(0, ahead=truth, past=random(2), truth=truth)
    still, moving = (arr_of(windows, policy("dustin-feedback", rate=rate, handicap=64)) for rate in (0.0, 0.2))
    torch.testing.assert_close(still, arr_of(windows, policy("dustin")))
    assert still[0] == moving[0] and float(moving[1:].mean()) > float(still[1:].mean())


def test_what_is_fitted_favours_the_signal_that_knows() -> None:
    truths, others = [random(seed) for seed in range(3)], [random(seed + 50) for seed in range(3)]
    by_draft = [document(i, truth, other, truth) for i, (truth, other) in enumerate(zip(truths, others, strict=True))]
    by_target = [document(i, other, truth, truth) for i, (truth, other) in enumerate(zip(truths, others, strict=True))]
    assert fit_weight(by_target, selection()) < 0.4 < 0.6 < fit_weight(by_draft, selection())
    moving = selection(split=Split(rate=0.2))
    assert fit_handicap(by_target, moving) < fit_handicap(by_draft, moving)


def test_a_power_law_is_found_again() -> None:
    share = 10 ** torch.linspace(-6, -1, 4000, dtype=torch.float64)
    noise = torch.rand(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2  # mean 1
    found = power_law(share, 0.3 * share**0.7 * noise)
    assert found.exponent == pytest.approx(0.7, abs=0.02)
    assert found.factor * 1e-3**found.exponent == pytest.approx(0.3 * 1e-3**0.7, rel=0.1)


def test_a_power_law_of_nothing_or_of_one_value() -> None:
    nothing = torch.zeros(5, dtype=torch.float64)
    assert power_law(nothing, nothing + 1).exponent == power_law(nothing + 0.1, nothing).exponent == 1
    one = power_law(nothing + 0.01, nothing + 0.03)
    assert one.exponent == 1 and one.factor * 0.01 == pytest.approx(0.03)


def test_laws_are_of_each_signal() -> None:
    """Attention is lookahead's root, and has nothing to do with history."""
    documents = []
    for seed in range(3):
        truth = random(seed)
        documents.append(document(seed, ahead=truth**2, past=random(seed + 50), truth=truth))
    ahead, past = fit_laws(documents, selection())
    assert ahead.exponent == pytest.approx(0.5, abs=0.1)
    assert past.exponent < 0.2


def test_everything_is_fitted_and_the_rest_stays() -> None:
    documents = [document(seed) for seed in range(2)]
    asked = selection(split=Split(rate=0.3, scale="rank"))
    found = fit_split(documents, asked)
    assert (found.rate, found.scale) == (0.3, "rank")
    assert found.weight == fit_weight(documents, asked) and found.handicap == fit_handicap(documents, asked)
    assert (found.lookahead_law, found.history_law) == fit_laws(documents, asked)
    fitted = asked.model_copy(update={"split": found})
    assert isinstance(make_policy("dustin-feedback", fitted), DustinFeedback)
    assert Selection.model_validate(fitted.model_dump(mode="json")) == fitted
    with pytest.raises(NothingMeasuredError):
        fit_split([], asked)


# --- the study


@pytest.fixture(scope="module")
def study() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "study_splits.py"
    spec = importlib.util.spec_from_file_location("study_splits", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "study_splits", module)  # where dataclasses look their fields up
        spec.loader.exec_module(module)
    return module


def test_oracles_choose_among_fixed_splits_alone(study: ModuleType) -> None:
    cells = study.cells_at(selection(), [{"method": "dustin-merged"}], None)
    assert [cell.name for cell in cells if cell.fixed] == ["dustin k30", *(f"dustin m {i}/8 k30" for i in range(9))]
    assert [cell.policy.selection.m for cell in cells] == [10, 0, 3, 6, 9, 12, 15, 18, 21, 24, 10]
    merged = cells[-1].name
    kl = {cell.name: [4.0, 4.0, 4.0] for cell in cells} | {merged: [1.0, 0.0, 3.0]}
    kl["dustin m 2/8 k30"], kl["dustin m 5/8 k30"] = [1.0, 5.0, 9.0], [2.0, 2.0, 9.0]
    documents = [
        {
            "kind": kind,
            "cells": {name: {"kl": kl[name][i], "agreement": 1.0, "windows": [kl[name][i]]} for name in kl},
        }
        for i, kind in enumerate(("a", "a", "b"))
    ]
    assert study.oracles(documents, cells) == ([1.0, 2.0, 4.0], [2.0, 2.0, 4.0])
    lines = {line[0]: line for line in study.rows(documents, cells)}
    assert lines[merged][1] == "1.3333" and lines[merged][4] == "+1.60"  # (12 - 4) / (12 - 7)
    assert lines["dustin k30"][4] == "+0.00" and lines["best m of each document"][4] == "+1.00"
    assert lines["best m of each kind"][4] == "+0.80"


def test_a_cell_has_what_was_fitted_and_what_it_says_itself(study: ModuleType) -> None:
    fitted = Split(weight=0.75, handicap=2)
    *_, one = study.cells_at(selection(), [{"method": "dustin-merged", "fitted": True, "scale": "rank"}], fitted)
    assert one.name == "dustin-merged fitted scale rank k30" and not one.fixed
    assert one.policy.selection.split == Split(weight=0.75, handicap=2, scale="rank")
    with pytest.raises(SystemExit, match="--run"):
        study.cells_at(selection(), [{"method": "dustin-merged", "fitted": True}], None)
