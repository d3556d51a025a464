"""The arg-max over ranks is that over all logits, sums are the same bits everywhere, and ranks compare their inputs."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping

import pytest
import torch
from rank_pool import RankPool
from split_models import SHAPES

from dustin_runtime.errors import ConflictError, DustinError, MissingError, UsageError
from dustin_runtime.models import ops
from dustin_runtime.parallel.ranks import joined
from dustin_runtime.parallel.tensor import TensorParallel

INF, NAN = math.inf, math.nan
VOCAB = 9
"""Five ids on the first rank, four and a row of padding on the second."""


def best(logits: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """On a rank: its part of the logits, as its head makes them, and what is found."""
    with joined(20) as ranks:
        group = ranks.collectives("cpu")
        assert group
        split = TensorParallel.of(SHAPES["llama"].model_copy(update={"vocab": VOCAB}), group)
        here = split.share.vocab
        own = torch.nn.functional.pad(logits[..., here.start : here.stop], (0, split.share.vocab_rows - len(here)))
        return *split.argmax_finite(own.contiguous(), vocab), split.whole_logits(own)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_arg_max_over_ranks(dtype: torch.dtype, two_ranks: RankPool) -> None:
    rows = [
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [8, 7, 6, 5, 4, 3, 2, 1, 0],
        [-1, -2, -3, -4, -5, -1, -2, -3, -4],  # equals on both ranks, and zeros of padding above them
        [1, 7, 7, 1, 1, 7, 7, 1, 1],
        [1, 1, 1, 1, 1, 1, 7, 7, 1],
        [0] * 9,
        [-INF] * 9,
        [1, 2, 3, 4, 5, 6, INF, 8, 9],
        [1, 2, NAN, 4, 5, 6, 7, 8, 9],
        [1, 2, 3, 4, 5, 6, 7, NAN, 9],
        [1, NAN, 3, 4, 5, NAN, 7, 8, 9],
        [1, 2, 3, 4, 5, 6, 7, 8, NAN],
    ]
    logits = torch.tensor(rows, dtype=dtype).view(3, 4, VOCAB)
    for vocab in (9, 8, 6, 5, 3, 1):
        ids, finite = ops.argmax_finite(logits, vocab)
        for found, sound, whole in two_ranks(best, logits, vocab):
            assert torch.equal(found, ids) and found.dtype == torch.int64
            assert torch.equal(sound, finite) and sound.dtype == torch.bool
            assert torch.equal(whole.nan_to_num(99), logits.nan_to_num(99))


def test_random_logits_with_many_equals(two_ranks: RankPool) -> None:
    logits = torch.randint(-3, 3, (200, VOCAB), generator=torch.Generator().manual_seed(0)).float()
    ids, finite = ops.argmax_finite(logits, 8)
    for found, sound, _ in two_ranks(best, logits, 8):
        assert torch.equal(found, ids) and torch.equal(sound, finite)


def add(parts: list[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    with joined(20) as ranks:
        group = ranks.collectives("cpu")
        assert group
        mine = parts[ranks.rank].clone()  # what a pool is given lies in memory that its processes share
        total = group.sum(mine)
        return total, total.data_ptr() == mine.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_are_in_place_and_the_same_bits_on_both_ranks(dtype: torch.dtype, two_ranks: RankPool) -> None:
    parts = [torch.randn(7, 300, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(2)]
    (left, in_place), (right, _) = two_ranks(add, parts)
    assert torch.equal(left, right) and torch.equal(left, parts[0] + parts[1])
    assert in_place


def agree(facts: list[Mapping[str, object]]) -> tuple[type, str, bool] | None:
    with joined(20) as ranks:
        try:
            ranks.agree(facts[ranks.rank])
        except ConflictError as error:
            return type(error), str(error), error.quiet
        return None


def test_different_facts_end_both_ranks_with_their_name(two_ranks: RankPool) -> None:
    same = {"--method": "sd", "prompts": [[1, 2]]}
    assert two_ranks(agree, [same, dict(same)]) == [None, None]
    text = "ranks differ in --method: sd on rank 0, dustin on rank 1"
    assert two_ranks(agree, [same, same | {"--method": "dustin"}]) == [
        (ConflictError, text, False),
        (ConflictError, text, True),
    ]
    text = "ranks differ in --draft: not given on rank 0, x on rank 1"
    for lacks in ({}, {"--draft": None}):
        assert two_ranks(agree, [same | lacks, same | {"--draft": "x"}]) == [
            (ConflictError, text, False),
            (ConflictError, text, True),
        ]


def fail(errors: list[DustinError | None]) -> tuple[type, str, bool, int] | None:
    with joined(20) as ranks:
        try:
            with ranks.alike():
                if error := errors[ranks.rank]:
                    raise error
        except DustinError as error:
            return type(error), str(error), error.quiet, error.exit_code
        return None


def test_what_fails_on_one_rank_fails_on_both(two_ranks: RankPool) -> None:
    assert two_ranks(fail, [None, None]) == [None, None]
    missing = MissingError("m.gguf: no such file")
    for errors, text in (
        ([None, missing], "rank 1: m.gguf"),
        ([missing, None], "rank 0: m.gguf"),
        ([missing] * 2, "m."),
    ):
        (kind, said, quiet, code), other = two_ranks(fail, errors)
        assert (kind, quiet, code) == (MissingError, False, 6) and said.startswith(text)
        assert other == (MissingError, said, True, 6)


def in_teams() -> tuple[int, bool, list[float]]:
    """On a rank of two teams of two, which talk apart from each other."""
    with joined(20) as ranks:
        team = ranks.in_teams(2)
        group = team.team_collectives("cpu")
        assert group
        mine = torch.full((3,), float(ranks.rank))
        found = [group.sum(mine.clone())[0].item(), *group.gather(mine)[:, 0].tolist()]
        if team.worker == 1:  # the other team does less
            found += [group.broadcast(mine.clone(), 1)[0].item()]
            if group.rank == 0:
                group.send(mine, 1)
            else:
                found += [group.receive(mine.clone(), 0)[0].item()]
        with ranks.alike(), group.alike():
            return team.worker, team.keeps, found


def last_words() -> str:
    """On the first of two ranks, whose other has died: what it fails with on its own."""
    with joined(20) as ranks:
        if ranks.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            with ranks.alike():
                raise MissingError("m.gguf: no such file")
        except DustinError as error:
            return str(error)


def test_teams_talk_apart() -> None:
    pool = RankPool(4)
    try:
        assert pool(in_teams) == [
            (0, True, [1.0, 0.0, 1.0]),
            (0, False, [1.0, 0.0, 1.0]),
            (1, True, [5.0, 2.0, 3.0, 3.0]),
            (1, False, [5.0, 2.0, 3.0, 3.0, 2.0]),
        ]
    finally:
        pool.close()


def test_a_rank_whose_others_have_ended_says_why_it_fails() -> None:
    pool = RankPool(2)
    try:
        pool.start(last_words)
        assert pool.finish(0) == "m.gguf: no such file"
    finally:
        pool.close()


def device(asked: str) -> str:
    with joined(20) as ranks:
        return ranks.device(asked)


def test_each_rank_has_its_own_device(two_ranks: RankPool) -> None:
    assert two_ranks(device, "cpu") == ["cpu", "cpu"]
    assert two_ranks(device, "cuda") == ["cuda:0", "cuda:1"]
    with pytest.raises(UsageError, match="--device cuda:1: each of 2 ranks needs its own; give cuda or cpu"):
        two_ranks(device, "cuda:1")
