"""The ways to sum blocks over two real GPUs: NCCL's sums, the same bits on both, in graphs, beside a rank that dies.

On a machine with two GPUs that reach each other's memory, one command runs all (multicast is not needed):

    TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 pytest tests/runtime/parallel/test_sums_on_gpus.py
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from commands import Outcome, dustin_run
from rank_pool import RankPool
from tiny_pair import TinyPair

from dustin_runtime.bench.sums import choose_sums
from dustin_runtime.loading import pick_device
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.parallel.collectives import Collectives
from dustin_runtime.parallel.ranks import joined
from dustin_runtime.parallel.reduce import NcclSum, Sum, adds, opened, symmetric_fault, symmetric_ways
from dustin_runtime.parallel.sums import SizeClass
from dustin_runtime.parallel.watch import LONG

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SIZES = ((1, 1, 64), (3, 5, 1000), (16, 5, 8192), (1, 2048, 3584), (1, 2047, 136))
"""Of messages: one block of a kernel and many, such as divide by it and such as do not."""
MOST = 16 * 5 * 8192 * 16
REPLAYS = 100
WAYS = ("one-shot", "two-shot")
SHAPE = {"layers": 4, "hidden": 1024, "ffn": 2048, "query_heads": 8, "kv_heads": 4, "head_size": 128}


class Found(NamedTuple):
    """Of one sum on a rank."""

    way: str
    bits: str
    """Its digest."""
    error: float
    """The largest difference to NCCL's, in roundings of that."""


@pytest.fixture
def gpus() -> Iterator[RankPool]:
    """Two new processes: torch keeps by a group's name how it reached others' memory, and a later run has that name."""
    pool = RankPool(2)
    yield pool
    pool.close()


def both(pool: RankPool, job: Callable[..., Any], *given: Any) -> list[Any]:
    """What a job returns on both ranks; kernels are compiled meanwhile."""
    pool.start(job, *given)
    found = [pool.finish(rank, seconds=240) for rank in range(2)]
    for outcome in found:
        if isinstance(outcome, BaseException):
            raise outcome
    return found


def here(ranks: Any, dtype: torch.dtype) -> tuple[Collectives, torch.device, list[Sum]]:
    """A rank's talk, its GPU and the ways that are there."""
    name = pick_device(ranks.device("cuda"))
    device, talk = torch.device(name), ranks.collectives(name)
    assert symmetric_fault(talk, device, dtype) is None
    buffer, fault = opened(talk, MOST, dtype, device)
    assert buffer, fault
    ways = symmetric_ways(buffer, ranks.world)
    assert all(adds(way, talk, dtype, device) for way in ways)
    assert [way.name for way in ways] == list(WAYS)
    return talk, device, ways


def parts(size: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    made = torch.randn(size, generator=torch.Generator(device).manual_seed(seed), device=device)
    return made.to(dtype)


def compared(way: Sum, own: torch.Tensor, nccl: torch.Tensor) -> Found:
    rounding = torch.finfo(own.dtype).eps * nccl.double().abs().clamp(min=1)
    bits = hashlib.sha256(own.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
    return Found(way.name, bits, float(((own.double() - nccl.double()).abs() / rounding).max()))


def eager(talk: Collectives, device: torch.device, ways: list[Sum], dtype: torch.dtype) -> list[Found]:
    """On a rank: sums of every size, one after the other in one buffer."""
    found = []
    for size in SIZES:
        for turn in range(3):
            x = parts(size, dtype, device, 100 * turn + talk.rank)
            nccl = NcclSum(talk)(x.clone())
            for way in ways:
                own = x.clone()
                assert way(own) is own
                held = way.room(size)
                assert held is not None
                total = way(held.copy_(x))  # which is not copied
                assert total.data_ptr() != held.data_ptr() and torch.equal(total, own)
                found.append(compared(way, own, nccl))
    return found


def require_alike(ranks: list[list[Found]]) -> None:
    """The same bits on both ranks, others every time, and NCCL's sums within a rounding."""
    first, second = ranks
    assert [(one.way, one.bits) for one in first] == [(one.way, one.bits) for one in second]
    assert len({one.bits for one in first}) == len(first) / len(WAYS)  # both ways have them
    assert max(one.error for one in (*first, *second)) <= 1


def replayed(talk: Collectives, device: torch.device, ways: list[Sum], dtype: torch.dtype) -> list[Found]:
    """On a rank: a graph of several sums, replayed with other inputs; every result is kept."""
    found, size = [], (3, 16, 5, 1024)
    for way in ways:
        given = torch.zeros(size, dtype=dtype, device=device)

        def work(way: Sum = way, given: torch.Tensor = given) -> list[torch.Tensor]:
            return [way(way.room(x.shape).copy_(x)) for x in given]

        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = work()
        for replay in range(REPLAYS):
            given.copy_(parts(size, dtype, device, 2 * replay + talk.rank))
            if (replay + talk.rank) % 7 == 0:
                time.sleep(0.002)  # ranks come at different times
            graph.replay()
            own = torch.stack(results)
            nccl = NcclSum(talk)(given.clone())
            found.append(compared(way, own, nccl))
    return found


def summed(dtype: torch.dtype) -> tuple[list[Found], list[Found]]:
    with joined(60) as ranks:
        talk, device, ways = here(ranks, dtype)
        with talk.watched(LONG):
            return eager(talk, device, ways, dtype), replayed(talk, device, ways, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_nccl_and_the_same_bits(dtype: torch.dtype, gpus: RankPool) -> None:
    first, second = both(gpus, summed, dtype)
    assert len(first[1]) == len(WAYS) * REPLAYS
    require_alike([first[0], second[0]])
    require_alike([first[1], second[1]])  # in a graph


def chosen() -> dict[str, list[SizeClass]]:
    """On a rank: what each `--all-reduce` makes of a decoder of noise, whose sums then are right."""
    found = {}
    with joined(60) as ranks:
        name = pick_device(ranks.device("cuda"))
        talk = ranks.collectives(name)
        shape = ModelShape.model_validate({"family": "llama", "vocab": 512, "context": 4096, **SHAPE})
        model = random_decoder(shape, torch.bfloat16, name, 0, talk)
        for asked in ("auto", "nccl", *WAYS):
            found[asked] = list(choose_sums(model, asked, [80, 2048]))
            for tokens in (1, 80, 2048, 2049):
                x = torch.full((1, tokens, shape.hidden), ranks.rank + 1.0, dtype=torch.bfloat16, device=name)
                assert bool((model.whole_block(x) == 3).all())
    return found


def test_the_fastest_is_taken_on_both(gpus: RankPool) -> None:
    first, second = both(gpus, chosen)
    assert first == second
    for asked, table in first.items():
        assert [one.tokens for one in table] == [80, 2048]
        for one in table:
            assert sorted(one.us) == (["nccl", *WAYS] if asked == "auto" else [asked])
            assert one.way == min(one.us, key=one.us.__getitem__) and min(one.us.values()) > 0


def command(arguments: list[str]) -> Outcome:
    return dustin_run(*arguments)


@pytest.mark.parametrize("way", ["auto", *WAYS])
def test_every_way_gives_the_same_text(way: str, tiny_pair: TinyPair, gpus: RankPool) -> None:
    """Of two parts there is one sum, however it is made."""
    given = ["generate", *tiny_pair.options, "--dtype", "float32", "--method", "sd", "--max-new-tokens", "24", "--json"]
    given += ["--device", "cuda", "The sum of two parts", "is", "--all-reduce"]
    texts = []
    for asked in ("nccl", way):
        first, second = both(gpus, command, [*given, asked])
        assert first.code == second.code == 0, (first, second)
        made = json.loads(first.out)
        texts.append([row["tokens"] for row in made["rows"]])
        assert len(made["all_reduce"]) == 2
        assert all(one["way"] == asked for one in made["all_reduce"]) or asked == "auto"
    assert texts[0] == texts[1]


@pytest.mark.parametrize("way", ["nccl", "auto"])
def test_the_bench_steps_in_graphs_with_it(way: str, gpus: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    given = ["bench", "--pair", "qwen7b:0.5b", "--random-weights", "--synthetic-context", "--force-acceptance", "2.2"]
    given += ["--batch", "4", "--context", "1024", "--steps", "16", "--repeats", "3", "--device", "cuda"]
    given += ["--method", "vanilla", "--method", "dustin", "--all-reduce", way, "--json", str(path)]
    first, second = both(gpus, command, given)
    assert first.code == second.code == 0, (first, second)
    found = json.loads(path.read_text())
    assert first.out.startswith("all-reduce of 4 tokens (")
    assert [one["tokens"] for one in found["all_reduce"]] == [4, 16]
    assert [row["method"] for row in found["rows"]] == ["vanilla", "dustin"]


def dies(way: str) -> None:
    """On a rank: wait for a graph's sum to which the second does not come."""
    with joined(60) as ranks:
        talk, device, ways = here(ranks, torch.bfloat16)
        add = next(one for one in [NcclSum(talk), *ways] if one.name == way)
        x = torch.zeros(80, 1024, dtype=torch.bfloat16, device=device)
        add(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            add(x)
        with talk.watched():
            for turn in range(200):
                if ranks.rank and turn == 100:
                    os.kill(os.getpid(), signal.SIGKILL)
                graph.replay()
                torch.cuda.synchronize(device)


@pytest.mark.parametrize("way", ["nccl", *WAYS])
def test_a_dead_rank_ends_who_waits_for_it_on_the_gpu(way: str, capfd: pytest.CaptureFixture[str]) -> None:
    pool = RankPool(2)
    try:
        pool.start(dies, way)
        pool.processes[1].join(120)
        began = time.monotonic()
        pool.processes[0].join(30)
        assert pool.processes[0].exitcode == 9 and time.monotonic() - began < 20
        assert "another rank has ended or does not answer (rank 1 has ended)" in capfd.readouterr().err
    finally:
        pool.close()
