"""One ranking of both scores, against loops over tokens on scores with many ties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dustin_runtime.config import LayerHeads, Selection, Split
from dustin_runtime.policies import make_policy

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


@pytest.mark.parametrize("exponent", [0.5, 1])
@pytest.mark.parametrize("weight", [0.25, 0.5])
def test_merged_keeps_the_best_of_the_weighted_powers(weight: float, exponent: float) -> None:
    split = Split(weight=weight, exponent=exponent)

    def power(values: Tensor) -> Tensor:
        return share(values).sqrt() if exponent == 0.5 else share(values)

    def joined(ahead: Tensor, past: Tensor) -> Tensor:
        return weight * power(ahead) + (1 - weight) * power(past)

    for seed in range(4):
        given = scores(seed=seed)
        assert chosen("dustin-merged", given, split=split) == by_one_ranking(given, joined)


def test_any_exponent_ranks_by_its_power() -> None:
    given = scores([COLUMNS] * 4, steps=1 << 20)
    found = chosen("dustin-merged", given, split=Split(weight=0.3, exponent=0.7))
    free = slice(SINK, COLUMNS - WINDOW)
    for row, mine in enumerate(found):
        ahead, past = given.ahead[row, free].double(), given.past[row, free].double()
        values = 0.3 * (ahead / ahead.sum()) ** 0.7 + 0.7 * (past / past.sum()) ** 0.7
        is_kept = torch.isin(torch.arange(COLUMNS)[free], torch.tensor(mine))
        assert is_kept.sum() == FREE
        assert values[is_kept].min() > values[~is_kept].max() * (1 - 1e-6)  # a power is not correctly rounded


def test_the_default_is_the_root_at_equal_weight_whatever_m_is() -> None:
    given = scores()
    roots = chosen("dustin-merged", given, split=Split(weight=0.5, exponent=0.5))
    assert roots != chosen("dustin-merged", given, split=Split(exponent=1))
    for m in (0, 5, FREE):
        assert chosen("dustin-merged", given, m) == roots


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


@pytest.mark.parametrize(
    "fields", [{"weigth": 0.5}, {"weight": 1.1}, {"weight": -0.1}, {"weight": None}, {"exponent": 0}, {"exponent": 1.1}]
)
def test_what_no_ranking_has_is_refused(fields: dict[str, float | None]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Split.model_validate(fields)
