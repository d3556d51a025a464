"""A target that is split over two processes generates what it does in one, for every family and method that can be."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from split_models import (
    NINE_HEADS,
    RULES,
    SHAPES,
    SPLIT,
    VOCAB,
    Case,
    alone,
    compare,
    generate,
    rested,
    selection,
    together,
    write_headless,
    write_weights,
)

from dustin_runtime.errors import PeerError, UsageError
from dustin_runtime.parallel.collectives import Collectives
from dustin_runtime.parallel.ranks import joined
from dustin_runtime.policies import POLICIES, require_over_ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_weights(root / name, shape) for name, shape in SHAPES.items()}


def case(folders: dict[str, Path], family: str, method: str = "vanilla", **options: object) -> Case:
    needs = POLICIES[method].needs_selection
    chosen = selection(budget=14, m=4) if needs else None
    return Case(folders[family], SHAPES[family], method, **{"selection": chosen} | options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", SHAPES)
def test_two_ranks_generate_what_one_does(
    family: str, dtype: torch.dtype, folders: dict[str, Path], two_ranks: RankPool
) -> None:
    methods = SPLIT if family == "llama" else ("vanilla", "dustin")
    compare(
        two_ranks,
        [
            case(folders, family, method, dtype=dtype, draft_budget=12 if method == "magicdec" else None)
            for method in methods
        ],
    )


def test_three_ranks_sum_in_one_order(tmp_path: Path) -> None:
    """Of three numbers the order of the additions matters: all ranks must have the same."""
    folder, pool = write_weights(tmp_path, NINE_HEADS), RankPool(3)
    chosen = selection(budget=14, m=4, heads=(8, 3, 0))
    try:
        compare(pool, [Case(folder, NINE_HEADS, "dustin", chosen, dtype) for dtype in (torch.float64, torch.float32)])
    finally:
        pool.close()


@pytest.mark.parametrize("family", ["llama", "llama-one-kv-head", "mistral"])
def test_each_rank_has_the_rest_of_its_own_heads(family: str, folders: dict[str, Path], two_ranks: RankPool) -> None:
    """Where ranks outnumber KV heads too; with a draft that is split, and one that drafts a share of the rows."""
    given = folders[family], SHAPES[family]
    compare(two_ranks, [rested(*given), rested(*given, period=3, own_layers=None, rows=2)])


@pytest.mark.parametrize("option", [*RULES, "fp8", "temperature"])
def test_the_rest_with_other_options(option: str, folders: dict[str, Path], two_ranks: RankPool) -> None:
    options = {"fp8": {"kv_dtype": torch.float8_e4m3fn}, "temperature": {"temperature": 1.3}}
    one = rested(folders["llama"], SHAPES["llama"], **options.get(option, {"rule": RULES.get(option)}))
    compare(two_ranks, [one, one._replace(pipeline=True)])
    assert bool(alone(one).full) == bool(one.rule and one.rule.guards)


def test_a_whole_draft_on_every_rank_and_a_draft_of_shards(folders: dict[str, Path], two_ranks: RankPool) -> None:
    drafts = [{"own_layers": None}, {"own_layers": None, "draft_budget": 9}, {"own_layers": 3, "draft_budget": 9}]
    compare(two_ranks, [case(folders, "qwen2", "dustin", **draft) for draft in drafts])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_draft_that_borrows_embedding_and_head(
    family: str, folders: dict[str, Path], two_ranks: RankPool, tmp_path: Path
) -> None:
    """A tied head, and one that ranks hold in parts; both texts are those of the target's own first layers."""
    draft = write_headless(tmp_path / "draft", folders[family])
    compare(two_ranks, [case(folders, family, "dustin", headless=draft)])
    borrowed, split = two_ranks(together, [case(folders, family, "sd", headless=draft), case(folders, family, "sd")])[0]
    assert borrowed.tokens == split.tokens


def test_scored_heads_of_one_rank_alone(folders: dict[str, Path], two_ranks: RankPool) -> None:
    """The other rank scores nothing, and selects the same."""
    chosen = [selection(14, 4, heads) for heads in ((0,), (5, 3), (2, 1))]
    compare(two_ranks, [case(folders, "llama", "dustin-t", selection=one) for one in chosen])


def test_a_budget_of_everything_equals_full_verification(folders: dict[str, Path], two_ranks: RankPool) -> None:
    everything = selection(budget=200, m=50)
    sparse = [case(folders, "llama", name, selection=everything) for name in SPLIT if POLICIES[name].needs_selection]
    vanilla, *others = two_ranks(together, [case(folders, "llama"), *sparse])[0]
    assert len(others) == 8
    assert all(run.tokens == vanilla.tokens for run in others)


def test_sampled_texts_are_those_of_one_process(folders: dict[str, Path], two_ranks: RankPool) -> None:
    hot = [case(folders, family, "dustin", temperature=1.3) for family in ("llama", "qwen2")]
    compare(two_ranks, hot)
    greedy = case(folders, "llama", "dustin")
    (first, cold), (second, _) = two_ranks(together, [hot[0], greedy])
    assert torch.equal(first.logits, second.logits) and first.logits.shape[-1] == VOCAB  # put together
    assert cold.logits.shape[-1] == 21  # half of 41 ids: the rank's own columns
    assert first.tokens != cold.tokens


def test_methods_that_need_all_heads_are_refused() -> None:
    able = {name for name, policy in POLICIES.items() if policy.over_ranks}
    assert able == set(SPLIT)
    for name in POLICIES.keys() - able:
        policy = POLICIES[name](selection(14, 4))
        require_over_ranks(policy, 1)
        with pytest.raises(UsageError, match=f"method {name} needs all heads in one process, there are 2; .*vanilla"):
            require_over_ranks(policy, 2)


def test_a_stepper_refuses_them_as_well(folders: dict[str, Path], two_ranks: RankPool) -> None:
    with pytest.raises(UsageError, match="method h2o needs all heads in one process"):
        two_ranks(together, [case(folders, "llama", "h2o")])


def ends_in_a_step(one: Case, with_signal: int) -> None:
    """On a rank: the second one is stopped, or killed, in the middle of a run."""
    real, calls = Collectives.sum, 0

    def summed(self: Collectives, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if self.rank and calls == 100:
            os.kill(os.getpid(), with_signal)
        return real(self, *given)

    Collectives.sum = summed  # type: ignore[method-assign]
    try:
        with joined(2) as ranks:
            generate(one._replace(new=100), ranks)
    finally:
        Collectives.sum = real  # type: ignore[method-assign]


def test_a_rank_that_hangs_or_dies_ends_the_others(folders: dict[str, Path]) -> None:
    pool, one = RankPool(2), case(folders, "llama")
    try:
        for with_signal, answer in ((signal.SIGSTOP, signal.SIGCONT), (signal.SIGKILL, None)):
            pool.start(ends_in_a_step, one, with_signal)
            error = pool.finish(0, seconds=30)
            assert isinstance(error, PeerError) and error.exit_code == 9
            assert str(error).startswith("another rank has ended or does not answer (")
            if answer:  # what has gone on again finds the others gone
                os.kill(pool.processes[1].pid, answer)
                error = pool.finish(1, seconds=30)
                assert isinstance(error, PeerError) and str(error).startswith("rank 1: another rank has ended")
    finally:
        pool.close()
