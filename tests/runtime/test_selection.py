"""Selection against its definition (arXiv 2606.24957, Eq. 6), written out in plain Python."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dustin_runtime.budget import check_budget
from dustin_runtime.errors import ConfigError
from dustin_runtime.selection import eligible_positions, ranked, select


class Case(NamedTuple):
    """A batch and a split."""

    lookahead: list[list[float]]
    history: list[list[float]]
    lengths: list[int]
    budget: int
    m: int
    sink: int
    window: int


# Few distinct scores, so that most rows have ties; the two zeros are one score.
SCORES = st.sampled_from([0.0, -0.0, 1e-40, 0.25, 0.25000003, 1.0, 3.0])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Ragged batches with lengths below, at and above the budget, and splits at both ends of their range."""
    sink, window = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    free = draw(st.integers(1, 8))
    budget = sink + window + free
    m = draw(st.one_of(st.just(0), st.just(free), st.integers(0, free)))
    columns = draw(st.integers(1, 24))
    lengths = draw(st.lists(st.integers(0, columns), min_size=1, max_size=4))
    if columns >= budget and draw(st.booleans()):
        lengths[0] = budget
    row = st.lists(SCORES, min_size=columns, max_size=columns)
    rows = st.lists(row, min_size=len(lengths), max_size=len(lengths))
    return Case(draw(rows), draw(rows), lengths, budget, m, sink, window)


def kept_by_definition(case: Case, row: int) -> list[int]:
    """Ascending kept positions of one sequence."""
    n = case.lengths[row]
    if n <= case.budget:
        return list(range(n))
    protected = set(range(case.sink)) | set(range(n - case.window, n))
    others = [position for position in range(n) if position not in protected]
    draft = sorted(others, key=lambda position: (-case.lookahead[row][position], position))[: case.m]
    others = [position for position in others if position not in draft]
    target = sorted(others, key=lambda position: (-case.history[row][position], position))
    target = target[: case.budget - case.m - len(protected)]
    return sorted(protected.union(draft, target))


def run(case: Case, device: str = "cpu") -> torch.Tensor:
    """`select` on a case."""
    return select(
        torch.tensor(case.lookahead, device=device),
        torch.tensor(case.history, device=device),
        torch.tensor(case.lengths, device=device),
        budget=case.budget,
        m=case.m,
        sink=case.sink,
        window=case.window,
    )


@settings(max_examples=300, deadline=None)
@given(cases())
@example(Case([[0.0] * 9], [[0.0] * 9], [9], 5, 2, 1, 1))
@example(Case([[1.0] * 3], [[1.0] * 3], [0], 5, 2, 1, 1))
def test_equals_the_definition(case: Case) -> None:
    result = run(case)
    assert result.dtype == torch.int64
    assert result.shape == (len(case.lengths), case.budget)
    for row, n in enumerate(case.lengths):
        expected = kept_by_definition(case, row)
        assert len(expected) == min(n, case.budget)
        assert result[row].tolist() == expected + [-1] * (case.budget - len(expected))
        assert {*range(min(case.sink, n)), *range(max(n - case.window, 0), n)} <= set(result[row].tolist())


@settings(max_examples=50, deadline=None)
@given(cases())
def test_rows_do_not_depend_on_their_batch(case: Case) -> None:
    together = run(case)
    for row in range(len(case.lengths)):
        alone = case._replace(lookahead=[case.lookahead[row]], history=[case.history[row]], lengths=[case.lengths[row]])
        assert torch.equal(run(alone)[0], together[row])


@settings(max_examples=50, deadline=None)
@given(cases())
def test_columns_beyond_the_prefix_are_ignored(case: Case) -> None:
    def spoiled(rows: list[list[float]]) -> list[list[float]]:
        return [row[:n] + [9.0] * (len(row) - n) for row, n in zip(rows, case.lengths, strict=True)]

    assert torch.equal(run(case._replace(lookahead=spoiled(case.lookahead), history=spoiled(case.history))), run(case))


def test_a_list_without_a_share_may_be_missing() -> None:
    scores, lengths = torch.rand(2, 40), torch.tensor([40, 31])
    for m in (0, 12):
        both = select(scores, scores, lengths, budget=20, m=m, sink=2, window=6)
        one = select(scores if m else None, None if m else scores, lengths, budget=20, m=m, sink=2, window=6)
        assert torch.equal(both, one)
    with pytest.raises(ValueError, match="lookahead chooses 1"):
        select(None, scores, lengths, budget=20, m=1, sink=2, window=6)


def test_scores_must_be_fp32() -> None:
    scores = torch.rand(1, 40).half()
    with pytest.raises(TypeError, match="float32"):
        select(scores, scores, torch.tensor([40]), budget=20, m=1, sink=2, window=6)


@pytest.mark.parametrize(
    ("field", "split"),
    [
        ("budget", (20, 0, 4, 16)),
        ("m", (21, 2, 4, 16)),
        ("m", (21, -1, 4, 16)),
        ("sink", (21, 0, -4, 16)),
        ("window", (21, 0, 4, -16)),
    ],
)
def test_an_invalid_split_is_refused_by_field(field: str, split: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        check_budget(*split)
    budget, m, sink, window = split
    scores = torch.rand(1, 40)
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        select(scores, scores, torch.tensor([40]), budget=budget, m=m, sink=sink, window=window)


def test_valid_ends_of_the_range() -> None:
    check_budget(512, 0, 4, 16)
    check_budget(512, 492, 4, 16)
    check_budget(1, 1, 0, 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(SCORES, min_size=1, max_size=20), st.integers(0, 25), st.data())
def test_ranked_orders_by_score_then_position(scores: list[float], count: int, data: st.DataObject) -> None:
    flags = data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    order = [p for p in sorted(range(len(scores)), key=lambda p: (-scores[p], p)) if flags[p]][:count]
    result = ranked(torch.tensor(scores), torch.tensor(flags), count)
    assert result.tolist() == order + [-1] * (count - len(order))


def test_ranked_takes_leading_dimensions() -> None:
    scores = torch.rand(3, 2, 50)
    eligible = eligible_positions(torch.tensor([50, 40]), 50, sink=1, window=2)
    result = ranked(scores, eligible, 7)
    assert result.shape == (3, 2, 7)
    for layer in range(3):
        assert torch.equal(result[layer], ranked(scores[layer], eligible, 7))


def test_nothing_waits_for_data() -> None:
    """Meta tensors have shapes and no values: reading a value, or a shape made from values, raises."""
    scores = torch.empty(2, 64, device="meta")
    lengths = torch.empty(2, dtype=torch.int64, device="meta")
    with pytest.raises(RuntimeError):
        lengths.max().item()
    assert select(scores, scores, lengths, budget=20, m=6, sink=2, window=6).shape == (2, 20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph_keeps_what_the_cpu_keeps() -> None:
    """Replays on new inputs, many ties among them, equal the CPU's lists."""
    generator = torch.Generator().manual_seed(0)
    columns = 8192
    lookahead, history = torch.zeros(2, 4, columns, device="cuda")
    lengths = torch.full((4,), columns, device="cuda")
    split = {"budget": 512, "m": 200, "sink": 4, "window": 16}
    select(lookahead, history, lengths, **split)  # loads the kernels, which capture cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = select(lookahead, history, lengths, **split)
    for levels in (3, 50, 100_000):
        scores = torch.randint(levels, (2, 4, columns), generator=generator).float() / levels
        ends = torch.tensor([columns, 300, 512, 4000])
        lookahead.copy_(scores[0])
        history.copy_(scores[1])
        lengths.copy_(ends)
        graph.replay()
        assert torch.equal(kept.cpu(), select(scores[0], scores[1], ends, **split))
