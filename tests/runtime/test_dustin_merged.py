"""One ranking of both scores, against loops over tokens on scores with many ties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dustin_runtime.config import LayerHeads, Selection, Split
from dustin_runtime.policies import make_policy
from dustin_runtime.policies.dustin_merged import weight_of

SINK, WINDOW, BUDGET, COLUMNS = 2, 3, 17, 60
FREE = BUDGET - SINK - WINDOW
LENGTHS = [60, 41, 18, 17, 16, 4, 1]


@dataclass
class Scores:
    """Given scores as a step's (implements `policies.Signals` as far as it is asked)."""

    lengths: Tensor
    ahead: Tensor
    past: Tensor

    def history(self) -> Tensor:
        return self.past

    def lookahead(self) -> Tensor:
        return self.ahead


def selection(m: int = 5, split: Split | None = None, budget: int = BUDGET) -> Selection:
    return Selection(
        budget=budget,
        sink=SINK,
        window=WINDOW,
        m=m,
        history=LayerHeads(layer=2, heads=(1, 5)),
        lookahead=(LayerHeads(layer=1, heads=(0, 4)),),
        split=split,
    )


def scores(lengths: list[int] = LENGTHS, steps: int = 8, seed: int = 0, columns: int = COLUMNS) -> Scores:
    """Skewed numbers on a grid of 1 / steps, which makes ties and zeros; noise beyond a prefix."""
    chance = torch.Generator().manual_seed(seed)
    ahead, past = torch.rand(2, len(lengths), columns, generator=chance).pow(3).mul(steps).floor() / steps
    return Scores(torch.tensor(lengths), ahead, past)


def kept(positions: Tensor) -> list[list[int]]:
    """Positions of every row's list, which must ascend with -1 at its end."""
    assert positions.shape[0] == positions.shape[2] == 1
    found = []
    for row in positions[0, :, 0].tolist():
        mine = [p for p in row if p >= 0]
        assert mine == sorted(set(mine)) and row == mine + [-1] * (len(row) - len(mine))
        found.append(mine)
    return found


def chosen(method: str, given: Scores, m: int = 5, split: Split | None = None) -> list[list[int]]:
    policy = make_policy(method, selection(m, split))
    found = policy.select(given)  # type: ignore[arg-type]
    assert found is not None and found.shape[-1] == BUDGET
    return kept(found)


def always(length: int) -> set[int]:
    return {p for p in (*range(SINK), *range(length - WINDOW, length)) if 0 <= p < length}


def by_one_ranking(given: Scores, joined: Any) -> list[list[int]]:
    """The best of `joined(ahead, past, normalise)` in every row; the latter of fp32 as the rule has it."""
    found = []
    for row, length in enumerate(given.lengths.tolist()):
        free = list(range(SINK, length - WINDOW))
        mine = always(length)
        if free:
            values = joined(given.ahead[row, free], given.past[row, free])
            order = sorted(range(len(free)), key=lambda at: (-float(values[at]), free[at]))
            mine |= {free[at] for at in order[:FREE]}
        found.append(sorted(mine))
    return found


def share(values: Tensor) -> Tensor:
    return values / values.double().sum().float().clamp(min=1e-30)


def over_last(values: Tensor) -> Tensor:
    best = sorted(values.tolist(), reverse=True)
    return values / max(best[FREE - 1] if len(best) >= FREE else 0.0, 1e-30)


@pytest.mark.parametrize("combine", ["sum", "max"])
@pytest.mark.parametrize("scale", ["sum", "rank"])
@pytest.mark.parametrize("weight", [None, 0.25, 0.5])
def test_merged_keeps_the_best_of_the_weighted_scores(weight: float | None, scale: str, combine: str) -> None:
    split = Split(weight=weight, scale=scale, combine=combine)  # type: ignore[arg-type]
    normalised = share if scale == "sum" else over_last

    w = 5 / FREE if weight is None else weight

    def joined(ahead: Tensor, past: Tensor) -> Tensor:
        terms = w * normalised(ahead), (1 - w) * normalised(past)
        return terms[0] + terms[1] if combine == "sum" else torch.maximum(*terms)

    for seed in range(4):
        given = scores(seed=seed)
        if scale == "rank":  # all short rows are kept whole, whatever they are divided by
            given.ahead += 0.125
            given.past += 0.125
        assert chosen("dustin-merged", given, split=split) == by_one_ranking(given, joined)


@pytest.mark.parametrize(("m", "weight"), [(0, 1 / 8), (1, 1 / 8), (5, 5 / FREE), (FREE - 1, 7 / 8), (FREE, 7 / 8)])
def test_a_weight_that_is_not_given_is_that_of_m_but_silences_nothing(m: int, weight: float) -> None:
    assert weight_of(selection(m)) == weight
    policy = make_policy("dustin-merged", selection(m))
    assert policy.uses_history and policy.uses_lookahead


def test_a_merged_ranking_of_one_signal_alone_is_that_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    given = scores()
    for weight, method, missing in ((0.0, "dustin-t", "lookahead"), (1.0, "dustin-d", "history")):
        policy = make_policy("dustin-merged", selection(split=Split(weight=weight)))
        assert (policy.uses_lookahead, policy.uses_history) == (weight > 0, weight < 1)
        monkeypatch.delattr(Scores, missing)
        assert chosen("dustin-merged", given, split=Split(weight=weight)) == chosen(method, given)
        monkeypatch.undo()


def test_a_draft_without_heads_leaves_the_choice_to_history() -> None:
    bare = selection(m=0).model_copy(update={"lookahead": ()})
    policy, given = make_policy("dustin-merged", bare), scores()
    assert not policy.uses_lookahead and policy.uses_history
    assert kept(policy.select(given)) == chosen("dustin-t", given)  # type: ignore[arg-type]


def test_every_list_is_full_and_has_what_is_protected() -> None:
    for length, row in zip(LENGTHS, chosen("dustin-merged", scores()), strict=True):
        assert len(row) == min(length, BUDGET)
        assert always(length) <= set(row)


def test_columns_behind_the_prefix_change_nothing() -> None:
    short = scores([30, 28], columns=31)
    longer = Scores(short.lengths, *(torch.cat((x, torch.rand(2, 900)), 1) for x in (short.ahead, short.past)))
    assert chosen("dustin-merged", short) == chosen("dustin-merged", longer)


def test_files_from_before_are_as_they_were() -> None:
    assert "split" not in selection().model_dump()
    held = selection(split=Split(weight=0.5)).model_dump(mode="json")
    assert Selection.model_validate(held) == selection(split=Split(weight=0.5))
    with pytest.raises(ValueError, match="extra"):
        Split.model_validate({"weigth": 0.5})
