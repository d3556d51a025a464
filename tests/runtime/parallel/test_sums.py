"""Which way sums blocks over ranks: the choice, the same on all of them, and what cannot be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from commands import Outcome, dustin_run
from rank_pool import RankPool
from split_models import SHAPES
from tiny_pair import TinyPair

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.bench import sums as bench_sums
from dustin_runtime.bench.grid import Setup
from dustin_runtime.bench.grid_report import document, markdown
from dustin_runtime.errors import UsageError
from dustin_runtime.models import ops
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.parallel import reduce
from dustin_runtime.parallel.collectives import Collectives
from dustin_runtime.parallel.ranks import joined
from dustin_runtime.parallel.reduce import NcclSum, OneShotSum, Sum, TwoShotSum
from dustin_runtime.parallel.sums import BlockSums, SizeClass, choose, step_tokens
from dustin_runtime.parallel.tensor import TensorParallel

HIDDEN = 32
GPU = torch.device("cuda", 0)


class Named:
    """A way that says its name (implements `Sum`)."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self._said = name, said  # type: ignore[misc]

    name: ClassVar[str] = ""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._said.append(self.name)
        return x

    def room(self, size: Sequence[int]) -> None:
        return None


class Summed(Collectives):
    """Ranks whose own sum says so too."""

    said: ClassVar[list[str]] = []

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.said.append("ranks")
        return x


def size_class(tokens: int, way: str) -> SizeClass:
    return SizeClass(tokens, tokens * HIDDEN * 4, way, {way: 1.0})


def test_each_size_goes_the_way_of_its_class() -> None:
    said = Summed.said
    said.clear()
    sums = BlockSums(Summed(0, 2))
    ways: list[Sum] = [Named("small", said), Named("large", said)]
    sums(torch.zeros(1, 4, HIDDEN))
    sums.adopt([size_class(512, "large"), size_class(8, "small")], ways, HIDDEN)
    for tokens in (1, 8, 9, 512, 513):
        sums(torch.zeros(1, tokens, HIDDEN))
    # Kernels move 16 bytes at a time, from such places.
    sums(torch.zeros(1, 3, 5))
    sums(torch.zeros(5 + 4 * HIDDEN)[5:].view(1, 4, HIDDEN))
    sums(torch.zeros(4 + 4 * HIDDEN)[4:].view(1, 4, HIDDEN))
    sums(torch.zeros(1, HIDDEN, 4).transpose(1, 2))
    assert said == ["ranks", "small", "small", "large", "large", "ranks", "ranks", "ranks", "small", "ranks"]
    assert [one.tokens for one in sums.classes] == [8, 512]


def test_a_cut_decoder_sums_as_its_whole() -> None:
    split = TensorParallel.of(SHAPES["llama"], Summed(0, 2))
    draft = split.first_layers(1)
    said: list[str] = []
    split.blocks.adopt([size_class(8, "small")], [Named("small", said)], HIDDEN)
    draft.end_block(torch.zeros(1, 8, HIDDEN))
    draft.sum(torch.zeros(1, 8, HIDDEN))  # scores come another way, whatever their size
    assert said == ["small"]


class InRoom:
    """A way that wants all it sums in its own memory, as those on GPUs (implements `Sum`)."""

    name: ClassVar[str] = "one-shot"

    def __init__(self, ranks: Collectives, elements: int) -> None:
        self._ranks = ranks
        self.buffer = reduce.Buffer(torch.full((elements,), torch.nan), "group")
        self.copied: list[bool] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        held, out = self.buffer.holding(x)
        self.copied.append(held is not x)
        assert held.data_ptr() == self.buffer.flat.data_ptr() != out.data_ptr()
        out.copy_(self._ranks.sum(held.clone()))
        held.fill_(torch.nan)  # what it was is of no use any more
        return out

    def room(self, size: Sequence[int]) -> torch.Tensor:
        return self.buffer.room(size)


def forward() -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """On a rank: hidden states with gloo's sums, and with those of a way that has room for products."""
    with joined(20) as ranks:
        talk = ranks.collectives("cpu")
        assert talk
        model = random_decoder(SHAPES["llama"], torch.float32, "cpu", 0, talk)
        split, ids, start = model.split, torch.arange(10).view(2, 5), torch.zeros(2, dtype=torch.int64)
        assert isinstance(split, TensorParallel)
        plain = model.forward(ids, start, model.cache(2, 8), dense_attention)
        way = InRoom(talk, 10 * model.shape.hidden)
        split.blocks.adopt([size_class(10, way.name)], [way], model.shape.hidden)
        return plain, model.forward(ids, start, model.cache(2, 8), dense_attention), way.copied


def test_products_are_computed_where_they_are_summed(two_ranks: RankPool) -> None:
    (plain, there, copied), (_, other, _) = two_ranks(forward)
    torch.testing.assert_close(there, plain, rtol=1e-5, atol=1e-6)
    assert torch.equal(there, other)
    assert copied == [False] * (2 * SHAPES["llama"].layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_into_a_room_is_the_product(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 3, 24).to(dtype), torch.randn(40, 24).to(dtype)
    out = torch.empty(2, 3, 40, dtype=dtype)
    assert ops.linear_into(out, x, weight) is out
    torch.testing.assert_close(out, ops.linear(x, weight))
    assert torch.equal(ops.linear_into(None, x, weight), ops.linear(x, weight))


def test_what_lies_elsewhere_is_copied_and_summed_in_place() -> None:
    x, buffer = torch.arange(6.0).view(2, 3), reduce.Buffer(torch.zeros(8), "group")
    held, out = buffer.holding(x)
    assert out is x and torch.equal(held, x) and held.data_ptr() == buffer.flat.data_ptr()
    again, out = buffer.holding(buffer.room((1, 4)))
    assert again.data_ptr() == buffer.flat.data_ptr() != out.data_ptr() and out.shape == (1, 4)


def test_sizes_of_a_step() -> None:
    assert step_tokens(16, 4, split_draft=False) == {80}
    assert step_tokens(16, 4, split_draft=True) == {80, 32, 16}
    assert step_tokens(16, 0, split_draft=True) == {16}


def chosen(times: list[dict[tuple[str, int], float]]) -> tuple[list[SizeClass], list[tuple[str, int]]]:
    """On a rank: the choice by its own made-up times, and what it timed."""
    asked: list[tuple[str, int]] = []
    with joined(20) as ranks:

        def time_us(way: Sum, tokens: int) -> float:
            asked.append((way.name, tokens))
            return times[ranks.rank][way.name, tokens]

        ways: list[Sum] = [Named("nccl", []), Named("one-shot", [])]
        return choose(ways, [80, 16, 80], 64, time_us), asked


def test_ranks_choose_alike_by_the_slowest(two_ranks: RankPool) -> None:
    left = {("nccl", 16): 20.0, ("one-shot", 16): 5.0, ("nccl", 80): 20.0, ("one-shot", 80): 9.0}
    right = {("nccl", 16): 10.0, ("one-shot", 16): 12.0, ("nccl", 80): 22.0, ("one-shot", 80): 40.0}
    (first, asked), (second, _) = two_ranks(chosen, [left, right])
    assert first == second
    assert first == [
        SizeClass(16, 1024, "one-shot", {"nccl": 20.0, "one-shot": 12.0}),
        SizeClass(80, 5120, "nccl", {"nccl": 22.0, "one-shot": 40.0}),
    ]
    assert asked == [("nccl", 16), ("one-shot", 16), ("nccl", 80), ("one-shot", 80)]


def test_what_one_rank_knows_of_its_torch_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reduce.missing_operation() is None  # of the version that the tests run with
    one, two = OneShotSum.name, TwoShotSum.name
    assert reduce.own_fault(torch.device("cpu"), torch.bfloat16, 2, one) == "it needs GPUs"
    assert reduce.own_fault(GPU, torch.bfloat16, 2, one) is None
    assert reduce.own_fault(GPU, torch.float32, 8, two) is None
    fault = reduce.own_fault(GPU, torch.float16, 2, one)
    assert fault == "it adds bfloat16 or float32, the target is torch.float16"
    assert reduce.own_fault(GPU, torch.bfloat16, 3, two) == "it serves 2, 4 or 8 ranks, not 3"
    assert reduce.own_fault(GPU, torch.bfloat16, 3, one) is None
    with mock.patch.object(reduce, "OPERATIONS", ("one_shot_all_reduce_out", "no_such_operation")):
        assert reduce.own_fault(GPU, torch.bfloat16, 2, one) == f"torch {torch.__version__} has no no_such_operation"
    monkeypatch.setattr(reduce, "symmetric_memory", mock.Mock(side_effect=ImportError))
    fault = reduce.own_fault(GPU, torch.bfloat16, 2, one)
    assert fault == f"torch {torch.__version__} has no torch.distributed._symmetric_memory"


def fault(hosts: list[str], faults: list[str | None], unread: list[int], devices: list[int]) -> Any:
    """On a rank: why a forced way cannot be, where each has such a host, GPU and torch."""
    with joined(20) as ranks:
        rank = ranks.rank
        with (
            mock.patch.object(reduce, "host", return_value=hosts[rank]),
            mock.patch.object(reduce, "own_fault", return_value=faults[rank]),
            mock.patch.object(reduce, "_reads", lambda device, other: device.index not in unread),
        ):
            try:
                talk = Collectives(rank, ranks.world)
                reduce.require_symmetric("one-shot", talk, torch.device("cuda", devices[rank]), torch.bfloat16)
            except UsageError as error:
                return str(error), error.quiet
        return None


@pytest.mark.parametrize(
    ("hosts", "faults", "unread", "devices", "reason"),
    [
        (["a", "a"], [None, None], [], [0, 1], None),
        (["a", "b"], [None, None], [], [0, 0], "it reads other GPUs' memory, and the ranks are on 2 hosts"),
        (["a", "a"], [None, "torch 2.6 has no x"], [], [0, 1], "torch 2.6 has no x"),
        (["a", "a"], [None, None], [1], [0, 1], "GPU 1 has no peer access to GPU 0"),
        (["a", "a"], [None, None], [], [0, 0], "ranks share a GPU"),
    ],
)
def test_ranks_that_cannot_read_each_other_say_why_alike(
    hosts: list[str],
    faults: list[str | None],
    unread: list[int],
    devices: list[int],
    reason: str | None,
    two_ranks: RankPool,
) -> None:
    text = f"--all-reduce one-shot: {reason}; give auto or nccl"
    expected = [(text, False), (text, True)] if reason else [None, None]
    assert two_ranks(fault, hosts, faults, unread, devices) == expected


@pytest.mark.parametrize(
    ("asked", "world", "device", "pipeline", "reason"),
    [
        ("ring", 2, "cuda:0", False, "unknown; give auto, nccl, one-shot, two-shot"),
        ("nccl", 1, "cuda", False, "this is one process, which sums nothing over ranks; leave it out"),
        ("two-shot", 2, "cuda:0", True, "a pipeline sums no blocks; leave it out"),
        ("one-shot", 2, "cpu", False, "needs GPUs, on CPUs gloo sums; leave it out"),
    ],
)
def test_what_cannot_be_asked_for(asked: str, world: int, device: str, pipeline: bool, reason: str) -> None:
    with pytest.raises(UsageError) as error:
        reduce.require_way(asked, world, device, pipeline)
    assert str(error.value) == f"--all-reduce {asked}: {reason}"


def test_what_can_be() -> None:
    for asked in ("auto", "nccl", "one-shot", "two-shot"):
        reduce.require_way(asked, 2, "cuda:1")
    reduce.require_way("auto", 1, "cpu")


def command(arguments: list[str]) -> Outcome:
    return dustin_run(*arguments)


def test_both_commands_refuse_before_anything_is_loaded(tiny_pair: TinyPair, two_ranks: RankPool) -> None:
    models = ["--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft), "--device", "cpu"]
    for arguments in (
        ["generate", *models, "--max-new-tokens", "2", "hello"],
        ["bench", *models, "--synthetic-context", "--context", "48", "--batch", "2"],
    ):
        alone = dustin_run(*arguments, "--all-reduce", "nccl")
        assert (alone.code, alone.error.partition(":")[0]) == (2, "--all-reduce nccl")
        for asked, reason in (("one-shot", "needs GPUs"), ("ring", "unknown")):
            first, second = two_ranks(command, [*arguments, "--all-reduce", asked])
            assert first.code == 2 and first.error.startswith(f"--all-reduce {asked}: {reason}")
            assert second == Outcome(2, "", "")


def on_a_cpu() -> tuple[Any, torch.Tensor]:
    with joined(20) as ranks:
        model = random_decoder(SHAPES["llama"], torch.float32, "cpu", 0, ranks.collectives("cpu"))
        found = bench_sums.choose_sums(model, "auto", [4])
        return found, model.whole_block(torch.full((1, 4, HIDDEN), ranks.rank + 1.0))


def test_gloo_sums_on_cpus_as_ever(two_ranks: RankPool) -> None:
    for found, total in two_ranks(on_a_cpu):
        assert found == () and torch.equal(total, torch.full((1, 4, HIDDEN), 3.0))


class OnGpu(Decoder):
    """A model that says it is on a GPU."""

    @property
    def device(self) -> torch.device:
        return GPU if getattr(self, "rope", None) else torch.device("cpu")


def measured(asked: str, fault: str | None, opens: bool, right: bool) -> tuple[Any, list[str]]:
    """On a rank: what is timed and chosen where GPUs are such, with NCCL the slowest and one shot the fastest."""
    said: list[str] = []
    ways = {name: Named(name, said) for name in reduce.WAYS}
    speed = {"nccl": 9.0, "one-shot": 3.0, "two-shot": 6.0}
    with joined(20) as ranks:
        plain = random_decoder(SHAPES["llama"], torch.float32, "cpu", 0, ranks.collectives("cpu"))
        model = OnGpu(plain.shape, plain.weights, plain.split)
        patches = {
            "NcclSum": mock.Mock(return_value=ways["nccl"], **{"name": "nccl"}),
            "symmetric_fault": lambda *_: fault,
            "opened": lambda *_: (object(), "") if opens else (None, "no symmetric memory (x)"),
            "symmetric_ways": lambda *_: [ways["one-shot"], ways["two-shot"]],
            "adds": lambda way, *_: right or way.name == "two-shot",
            "_timer": lambda *_: lambda way, tokens: speed[way.name] * tokens,
        }
        patches["NcclSum"].name = "nccl"
        with mock.patch.multiple(bench_sums, **patches):
            try:
                found: Any = bench_sums.choose_sums(model, asked, [4, 8])
            except UsageError as error:
                return str(error), []
        model.whole_block(torch.zeros(1, 4, model.shape.hidden))
        return [(one.tokens, one.way, sorted(one.us)) for one in found], said


@pytest.mark.parametrize(
    ("asked", "fault", "opens", "right", "way", "timed"),
    [
        ("auto", None, True, True, "one-shot", ["nccl", "one-shot", "two-shot"]),
        ("auto", None, True, False, "two-shot", ["nccl", "two-shot"]),
        ("auto", None, False, True, "nccl", ["nccl"]),
        ("auto", "no peer access", True, True, "nccl", ["nccl"]),
        ("nccl", None, True, True, "nccl", ["nccl"]),
        ("two-shot", None, True, True, "two-shot", ["two-shot"]),
    ],
)
def test_the_fastest_of_what_is_there_or_what_is_asked_for(
    asked: str, fault: str | None, opens: bool, right: bool, way: str, timed: list[str], two_ranks: RankPool
) -> None:
    for found, said in two_ranks(measured, asked, fault, opens, right):
        assert found == [(4, way, timed), (8, way, timed)]
        assert said == [way]


@pytest.mark.parametrize(
    ("fault", "opens", "right", "reason"),
    [
        ("GPU 0 has no peer access to GPU 1", True, True, "GPU 0 has no peer access to GPU 1"),
        (None, False, True, "no symmetric memory (x)"),
        (None, True, False, "its sums are wrong on these GPUs"),
    ],
)
def test_what_is_asked_for_and_not_there_is_refused(
    fault: str | None, opens: bool, right: bool, reason: str, two_ranks: RankPool
) -> None:
    text = f"--all-reduce one-shot: {reason}; give auto or nccl"
    assert two_ranks(measured, "one-shot", fault, opens, right) == [(text, []), (text, [])]


def test_the_bench_prints_and_keeps_the_table(tmp_path: Path) -> None:
    model = random_decoder(SHAPES["llama"], torch.float32, "cpu", 0)
    size = SizeClass(80, 80 << 14, "one-shot", {"nccl": 21.25, "one-shot": 9.0})
    assert str(size) == "all-reduce of 80 tokens (1.25 MiB): nccl 21.2 us, one-shot 9.0 us; one-shot serves"
    selection = mock.Mock(**{"model_dump.return_value": {}})
    setup = Setup(model, model, selection, 4, 100, 64, None, None, True, 8, 1, sums=(size,))
    found = document(setup, [], "noise", [])
    assert found["all_reduce"] == [
        {"tokens": 80, "bytes": 80 << 14, "way": "one-shot", "us": {"nccl": 21.25, "one-shot": 9.0}}
    ]
    assert "| 80 | 1.25 | 21.2 | 9.0 | one-shot |" in markdown(found)


def test_nccl_is_the_ranks_own_sum() -> None:
    Summed.said.clear()
    NcclSum(Summed(0, 2))(torch.zeros(2))
    assert Summed.said == ["ranks"]
