"""Ranks that draft different rows step as one process does: the same drafts, lists and texts, token for token."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from split_models import (
    DEPTH,
    NINE_HEADS,
    SHAPES,
    SPLIT,
    Case,
    alone,
    compare,
    generate,
    selection,
    together,
    write_weights,
)

from dustin_runtime.errors import CapacityError, DustinError, NothingMeasuredError, PeerError
from dustin_runtime.parallel.collectives import Collectives
from dustin_runtime.parallel.ranks import joined
from dustin_runtime.parallel.rows import RowBlocks
from dustin_runtime.policies import POLICIES
from dustin_runtime.serving import Run

PROMPTS = [[1, 5, 9, 30, 2], [7], [3, 3, 8] * 13, [4, 11, 4, 6], [20, 21] * 9, [2]]
LLAMA, NINE = "llama", "nine heads"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    shapes = {LLAMA: SHAPES[LLAMA], NINE: NINE_HEADS}
    return {name: write_weights(root / name, shape) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[RankPool]:
    pool = RankPool(3)
    yield pool
    pool.close()


def case(folders: dict[str, Path], method: str, count: int = 3, **options: object) -> Case:
    """`count` prompts with a draft of two of the target's three layers, whole on every rank."""
    chosen = selection(budget=14, m=4) if POLICIES[method].needs_selection else None
    window = 12 if method == "magicdec" else None
    given = {"selection": chosen, "whole_layers": 2, "prompts": PROMPTS[:count], "draft_budget": window} | options
    return Case(folders[LLAMA], SHAPES[LLAMA], method, **given)


@pytest.mark.parametrize("method", SPLIT)
def test_every_number_of_rows(method: str, folders: dict[str, Path], two_ranks: RankPool) -> None:
    dtypes = {1: torch.float64, 2: torch.float32, 3: torch.float32, 5: torch.float64}
    compare(two_ranks, [case(folders, method, count, dtype=dtype) for count, dtype in dtypes.items()])


@pytest.mark.parametrize("method", ["sd", "dustin"])
def test_four_rows_on_three_ranks(method: str, folders: dict[str, Path], three_ranks: RankPool) -> None:
    """The last one has padding alone."""
    heads = selection(14, 4, heads=(8, 3, 0)) if method == "dustin" else None
    cases = [
        Case(folders[NINE], NINE_HEADS, method, heads, whole_layers=2, prompts=PROMPTS[:count]) for count in (4, 1, 3)
    ]
    compare(three_ranks, cases)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_queue_of_prompts_through_fewer_rows(rows: int, folders: dict[str, Path], two_ranks: RankPool) -> None:
    cases = [case(folders, name, 6, rows=rows) for name in ("sd", "magicdec", "dustin")]
    compare(two_ranks, cases)


def test_sampled_texts(folders: dict[str, Path], two_ranks: RankPool) -> None:
    """Each row has a temperature, a top-p and a seed of its own."""
    cases = [
        case(folders, "sd", 5, temperature=0.7),
        case(folders, "dustin", 3, temperature=0.9, dtype=torch.float32),
        case(folders, "dustin", 5, temperature=0.7, rows=3, draft_budget=9),
    ]
    compare(two_ranks, cases)
    assert all(sum(alone(one).accepted) for one in cases)


def test_drafts_that_keep_first_and_last_tokens(folders: dict[str, Path], two_ranks: RankPool) -> None:
    cases = [case(folders, name, 3, draft_budget=9) for name in ("dustin", "dustin-d", "magicdec", "streaming")]
    compare(two_ranks, [*cases, case(folders, "dustin", 5, rows=3, draft_budget=9)])


def test_a_budget_of_everything_equals_full_verification(folders: dict[str, Path], two_ranks: RankPool) -> None:
    sparse = [name for name in SPLIT if POLICIES[name].needs_selection]
    everything = selection(budget=200, m=50)
    cases = [case(folders, "vanilla"), *(case(folders, name, selection=everything) for name in sparse)]
    vanilla, *others = two_ranks(together, cases)[1]
    assert len(others) == 8
    assert all(run.tokens == vanilla.tokens and sum(run.accepted) for run in others)


@pytest.mark.parametrize("window", [None, 9])
def test_a_rank_keeps_and_drafts_its_own_rows_alone(
    window: int | None, folders: dict[str, Path], two_ranks: RankPool
) -> None:
    one = case(folders, "dustin", 3, draft_budget=window)
    whole, runs = alone(one), [run for (run,) in two_ranks(together, [one])]
    prefilled = [[len(PROMPTS[0]), len(PROMPTS[1])], [len(PROMPTS[2])]]
    turns = len([rows for rows, _ in whole.passes if rows == 3])
    assert turns and turns % DEPTH == 0
    assert whole.draft_keys is not None
    for run, prompts in zip(runs, prefilled, strict=True):
        assert run.draft_keys is not None
        assert run.draft_keys.shape == (2, 2, *whole.draft_keys.shape[2:])
        assert [tokens for rows, tokens in run.passes if rows == 1] == prompts
        assert len([rows for rows, _ in run.passes if rows == 2]) == turns
    padding = runs[1].draft_keys[:, 1]
    assert not padding[:, DEPTH + 1 :].any()  # its length stays 1
    tail = whole.draft_keys.shape[2] - DEPTH if window else len(PROMPTS[2])
    assert torch.allclose(runs[1].draft_keys[:, 0, :tail], whole.draft_keys[:, 2, :tail])


def collectives_of(one: Case) -> list[tuple[int, ...]]:
    """On a rank: the shapes of all that is gathered."""
    real, shapes = Collectives.gather, []

    def gather(self: Collectives, x: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return real(self, x)

    Collectives.gather = gather  # type: ignore[method-assign]
    try:
        with joined(20) as ranks:
            generate(one._replace(new=5), ranks)
    finally:
        Collectives.gather = real  # type: ignore[method-assign]
    return shapes


def test_drafting_takes_one_gather_a_step(folders: dict[str, Path], two_ranks: RankPool) -> None:
    """The other one is the arg-max of the target's."""
    one = case(folders, "dustin", 3)
    first, second = two_ranks(collectives_of, one)
    assert first == second
    steps = [shape for shape in first if len(shape) == 3]  # [rows, depth + 1, what an arg-max gathers]
    blocks = [rows for rows, width in (shape for shape in first if len(shape) == 2) if width >= 2 * DEPTH]
    assert blocks == [2] * len(steps) and steps


def blocks(rows: int) -> tuple[range, list[int | None], torch.Tensor, list[torch.Tensor]]:
    with joined(20) as ranks:
        group = ranks.collectives("cpu")
        assert group
        split = RowBlocks(rows, group)
        own = [split.own(x) for x in whole(rows)]
        return split.here, [split.place(row) for row in range(rows)], own[0], split.gather(own)


def whole(rows: int) -> list[torch.Tensor]:
    """Of every dtype that travels, with what no arithmetic preserves."""
    random = torch.Generator().manual_seed(rows)
    ids = torch.randint(-(1 << 62), 1 << 62, (rows, 3), generator=random)
    wide = torch.randn(rows, 3, 5, dtype=torch.float64, generator=random)
    scores = torch.randn(rows, 7, generator=random)
    scores[-1, :3] = torch.tensor([math.nan, -0.0, math.inf])
    return [ids, wide, scores]


@pytest.mark.parametrize("rows", range(1, 8))
def test_blocks_hold_every_row_once_and_gather_it_to_the_bit(
    rows: int, two_ranks: RankPool, three_ranks: RankPool
) -> None:
    for pool, world in ((two_ranks, 2), (three_ranks, 3)):
        outcomes = pool(blocks, rows)
        assert [row for here, *_ in outcomes for row in here] == list(range(rows))
        for here, places, own, found in outcomes:
            assert places == [row - here.start if row in here else None for row in range(rows)]
            assert len(own) == -(-rows // world)
            assert torch.equal(own[: len(here)], whole(rows)[0][here.start : here.stop])
            assert (own[len(here) :] == 1).all()
            for ours, wanted in zip(found, whole(rows), strict=True):
                assert ours.dtype == wanted.dtype and ours.is_contiguous()
                assert torch.equal(ours.view(torch.int32), wanted.view(torch.int32))


def breaks(one: Case, owner: int, how: str) -> tuple[type, str, bool]:
    """On a rank: a run whose draft fails on `owner` alone."""
    real = Run._prefill_draft

    def fails(self: Any, *given: Any) -> Any:
        if how == "memory":
            raise CapacityError("no memory for a KV cache of 9.0 GiB: lower batch or context")
        if how == "bug":
            raise ZeroDivisionError("a bug")
        for layer in self.stepper.draft.weights.layers[:1]:
            layer.down.fill_(math.nan)
        return real(self, *given)

    try:
        with joined(20) as ranks:
            if ranks.rank == owner:
                Run._prefill_draft = fails  # type: ignore[method-assign]
            generate(one, ranks)
    except DustinError as error:
        return type(error), str(error), error.quiet
    finally:
        Run._prefill_draft = real  # type: ignore[method-assign]
    raise AssertionError("it did not fail")


def test_a_draft_that_fails_on_its_rank_fails_on_all(folders: dict[str, Path], two_ranks: RankPool) -> None:
    for owner, prompt in ((0, 0), (1, 2)):
        outcomes = two_ranks(breaks, case(folders, "dustin"), owner, "not finite")
        (kind, said, quiet), other = outcomes
        assert (kind, quiet) == (NothingMeasuredError, False)
        assert said.startswith(f"rank {owner}: prompt {prompt}: what the draft makes of it is not finite, from layer 0")
        assert other == (NothingMeasuredError, said, True)
    (kind, said, _), _ = two_ranks(breaks, case(folders, "sd"), 1, "memory")
    assert (kind, said) == (CapacityError, "rank 1: no memory for a KV cache of 9.0 GiB: lower batch or context")


def test_a_bug_on_one_rank_ends_the_others_with_a_message(folders: dict[str, Path], two_ranks: RankPool) -> None:
    began = time.monotonic()
    two_ranks.start(breaks, case(folders, "sd"), 1, "bug")
    kind, said, _ = two_ranks.finish(0, seconds=30)
    assert kind is PeerError and said.startswith("another rank has ended or does not answer (")
    assert isinstance(two_ranks.finish(1), ZeroDivisionError)
    assert time.monotonic() - began < 15
