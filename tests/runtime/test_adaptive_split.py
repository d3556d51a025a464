"""Splits that follow the text, against loops over tokens on scores with many ties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dustin_runtime.config import LayerHeads, PowerLaw, Selection, Split
from dustin_runtime.method_names import ADAPTIVE
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.policies import make_policy
from dustin_runtime.policies.adaptive_split import SplitFeedback, weight_of
from dustin_runtime.selection import select

SHAPE = ModelShape(
    family="llama", layers=4, hidden=48, ffn=64, query_heads=6, kv_heads=2, head_size=8, vocab=40, context=99
)
SINK, WINDOW, BUDGET, COLUMNS = 2, 3, 17, 60
FREE = BUDGET - SINK - WINDOW
LENGTHS = [60, 41, 18, 17, 16, 4, 1]


@dataclass
class Scores:
    """Given scores as a step's (implements `policies.Signals` as far as it is asked)."""

    lengths: Tensor
    ahead: Tensor
    past: Tensor
    memory: Any = None

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
    given.memory = policy.memory(SHAPE, 3, len(given.lengths), COLUMNS, torch.float32, torch.device("cpu"))
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


@pytest.mark.parametrize("combine", ["max", "sum"])
def test_marginal_takes_from_the_list_whose_next_token_promises_more(combine: Any) -> None:
    laws = PowerLaw(factor=0.5, exponent=0.75), PowerLaw(factor=2, exponent=1.25)
    split = Split(lookahead_law=laws[0], history_law=laws[1], combine=combine)

    def promised(ahead: Tensor, past: Tensor) -> list[Tensor]:
        return [law.factor * share(x) ** law.exponent for law, x in zip(laws, (ahead, past), strict=True)]

    for seed in range(4):
        given = scores(seed=seed)
        found = chosen("dustin-marginal", given, split=split)
        if combine == "sum":
            assert found == by_one_ranking(given, lambda *both: sum(promised(*both)))
            continue
        for row, length in enumerate(LENGTHS):
            free = list(range(SINK, length - WINDOW))
            expected = promised(given.ahead[row, free], given.past[row, free])
            lists = [sorted(range(len(free)), key=lambda at, x=x: (-float(x[at]), at)) for x in expected]
            taken: list[int] = []
            while len(taken) < min(FREE, len(free)):  # a greedy merge of two lists
                heads = [next(at for at in order if at not in taken) for order in lists]
                taken.append(
                    min(zip(expected, heads, strict=True), key=lambda one: (-float(one[0][one[1]]), one[1]))[1]
                )
            assert found[row] == sorted(always(length) | {free[at] for at in taken})


@pytest.mark.parametrize("m", [0, 1, 5, FREE - 1, FREE])
def test_feedback_begins_with_the_configured_split(m: int) -> None:
    for seed in range(4):
        given = scores(seed=seed)
        assert chosen("dustin-feedback", given, m=m) == chosen("dustin", given, m=m)


def test_rows_have_an_m_of_their_own() -> None:
    given = scores([60, 50, 40, 60, 20, 9])
    policy = make_policy("dustin-feedback", selection())
    memory = given.memory = policy.memory(SHAPE, 3, 6, COLUMNS, torch.float32, torch.device("cpu"))
    assert isinstance(memory, SplitFeedback)
    memory.m.copy_(torch.tensor([0.0, 3.4, 3.6, FREE, 7.0, 5.0]))
    found = kept(policy.select(given))  # type: ignore[arg-type]
    for row, m in enumerate((0, 3, 4, FREE, 7, 5)):
        one = slice(row, row + 1)
        want = select(
            given.ahead[one], given.past[one], given.lengths[one], budget=BUDGET, m=m, sink=SINK, window=WINDOW
        )
        assert found[row] == [p for p in want[0].tolist() if p >= 0]


def test_feedback_moves_towards_the_list_that_turned_out_better() -> None:
    """Lookahead prefers positions from 10 on, history those from 30 on; then the target looks at one of the two."""
    ahead, past, neither = torch.zeros(3, 4, COLUMNS)
    ahead[:, 10 : 10 + FREE] = torch.arange(FREE, 0, -1)
    past[:, 30 : 30 + FREE] = torch.arange(FREE, 0, -1)
    given = Scores(torch.tensor([60, 60, 60, BUDGET]), ahead, past)
    policy = make_policy("dustin-feedback", selection(m=6, split=Split(rate=0.1, handicap=1)))
    memory = given.memory = policy.memory(SHAPE, 3, 4, COLUMNS, torch.float32, torch.device("cpu"))
    assert isinstance(memory, SplitFeedback)
    policy.select(given)  # type: ignore[arg-type]
    assert memory.m.tolist() == [6, 6, 6, 6]  # nothing is known yet
    given.past = torch.stack((ahead[0], past[0], neither[0], ahead[0]))
    policy.select(given)  # type: ignore[arg-type]
    moved = 0.1 * FREE
    assert memory.m.tolist() == pytest.approx([6 + moved, 6 - moved, 6, 6])  # the last one's list held everything
    for _ in range(30):
        given.past = past
        policy.select(given)  # type: ignore[arg-type]
        given.past = torch.stack((ahead[0], past[0], neither[0], ahead[0]))
        policy.select(given)  # type: ignore[arg-type]
    memory.admit(1, None, None)  # type: ignore[arg-type]
    assert memory.m[1] == 6 and memory.m[2] == 6
    given.past = past
    policy.select(given)  # type: ignore[arg-type]
    assert memory.m[1] == 6


def test_feedback_stays_within_the_budget_and_comes_back_from_its_ends() -> None:
    ahead, past = torch.zeros(2, 1, COLUMNS)
    ahead[:, 10 : 10 + FREE] = torch.arange(FREE, 0, -1)
    past[:, 30 : 30 + FREE] = torch.arange(FREE, 0, -1)
    for better, end, step in ((ahead, FREE, -1), (past, 0, 1)):
        memory = SplitFeedback(selection(split=Split(rate=0.5)), 1, torch.device("cpu"))
        lists = [scores.argsort(descending=True, stable=True)[:, :FREE] for scores in (ahead, past)]
        lengths = torch.tensor([60])
        for _ in range(4):
            memory.remember(*lists, COLUMNS)
            memory.learn(better, lengths)
        assert float(memory.m) == end
        memory.remember(*lists, COLUMNS)
        memory.learn(past if better is ahead else ahead, lengths)
        assert (float(memory.m) - end) * step > 0


def test_a_handicap_outweighs_what_history_is_favoured_by() -> None:
    ahead, past = torch.zeros(2, 1, COLUMNS)
    ahead[:, 10 : 10 + FREE], past[:, 30 : 30 + FREE] = 1, 2
    lists = [scores.argsort(descending=True, stable=True)[:, :FREE] for scores in (ahead, past)]
    for handicap, wanted in ((1.0, -1), (2.0, 0), (4.0, 1)):
        memory = SplitFeedback(selection(split=Split(handicap=handicap)), 1, torch.device("cpu"))
        memory.remember(*lists, COLUMNS)
        memory.learn(ahead + past, torch.tensor([60]))
        assert (float(memory.m) > 5) - (float(memory.m) < 5) == wanted


def test_a_row_that_ended_beyond_the_columns_is_no_error() -> None:
    memory = SplitFeedback(selection(), 1, torch.device("cpu"))
    memory.lookahead[:] = torch.arange(50, 50 + FREE)
    memory.history[:] = torch.arange(80, 80 + FREE)
    memory.learn(torch.ones(1, 40), torch.tensor([95]))
    assert float(memory.m) == 5


@pytest.mark.parametrize("method", ADAPTIVE)
def test_a_draft_without_heads_leaves_the_choice_to_history(method: str) -> None:
    bare = selection(m=0).model_copy(update={"lookahead": ()})
    policy, given = make_policy(method, bare), scores()
    assert not policy.uses_lookahead and policy.uses_history
    given.memory = policy.memory(SHAPE, 3, len(LENGTHS), COLUMNS, torch.float32, torch.device("cpu"))
    assert kept(policy.select(given)) == chosen("dustin-t", given)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ADAPTIVE)
def test_every_list_is_full_and_has_what_is_protected(method: str) -> None:
    for length, row in zip(LENGTHS, chosen(method, scores()), strict=True):
        assert len(row) == min(length, BUDGET)
        assert always(length) <= set(row)


@pytest.mark.parametrize("method", ADAPTIVE)
def test_columns_behind_the_prefix_change_nothing(method: str) -> None:
    short = scores([30, 28], columns=31)
    longer = Scores(short.lengths, *(torch.cat((x, torch.rand(2, 900)), 1) for x in (short.ahead, short.past)))
    assert chosen(method, short) == chosen(method, longer)


def test_files_from_before_are_as_they_were() -> None:
    assert "split" not in selection().model_dump()
    held = selection(split=Split(weight=0.5)).model_dump(mode="json")
    assert Selection.model_validate(held) == selection(split=Split(weight=0.5))
    with pytest.raises(ValueError, match="extra"):
        Split.model_validate({"weigth": 0.5})
