"""The weight of dustin-merged, fitted on traces whose best one is known."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dustin_profile.search.arr import arr, mass
from dustin_profile.search.split_fit import arr_of, fit_split
from dustin_profile.traces.windows import Windows
from dustin_runtime.config import LayerHeads, Selection, Split
from dustin_runtime.errors import NothingMeasuredError
from dustin_runtime.policies import make_policy
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


def test_what_is_fitted_favours_the_signal_that_knows() -> None:
    truths, others = [random(seed) for seed in range(3)], [random(seed + 50) for seed in range(3)]
    by_draft = [document(i, truth, other, truth) for i, (truth, other) in enumerate(zip(truths, others, strict=True))]
    by_target = [document(i, other, truth, truth) for i, (truth, other) in enumerate(zip(truths, others, strict=True))]
    least, most = (fit_split(documents, selection()).weight for documents in (by_target, by_draft))
    assert least < 0.4 < 0.6 < most


def test_the_fitted_weight_has_the_best_arr_and_the_rest_stays() -> None:
    documents = [document(seed) for seed in range(2)]
    asked = selection(split=Split(exponent=0.75))
    found = fit_split(documents, asked)

    def recovered(weight: float) -> float:
        merged = policy("dustin-merged", exponent=0.75, weight=weight)
        return sum(float(arr_of(windows, merged).mean()) for windows in documents)

    by_weight = {step / 16: recovered(step / 16) for step in range(17)}
    assert found == Split(exponent=0.75, weight=max(by_weight, key=lambda weight: by_weight[weight]))
    fitted = asked.model_copy(update={"split": found})
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
    cells = study.cells_at(selection(), [{}], None)
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


def test_what_was_fitted_is_a_cell_too(study: ModuleType) -> None:
    *_, said, fitted = study.cells_at(selection(), [{"weight": 0.25, "exponent": 1}], Split(weight=0.75))
    assert [said.name, fitted.name] == ["dustin-merged weight 0.25 exponent 1 k30", "dustin-merged fitted k30"]
    assert said.policy.selection.split == Split(weight=0.25, exponent=1)
    assert fitted.policy.selection.split == Split(weight=0.75) and not fitted.fixed
