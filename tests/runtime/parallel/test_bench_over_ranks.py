"""`dustin-run bench` in two processes: one document, of the slowest; and what ends both of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from commands import Outcome, dustin_run
from rank_pool import RankPool
from tiny_pair import TinyPair

from dustin_runtime import memory_plan
from dustin_runtime.bench import subject, timing
from dustin_runtime.bench.together import Together
from dustin_runtime.engine import Engine
from dustin_runtime.errors import CapacityError
from dustin_runtime.links import LINKS
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.pairs import ModelRecipe, PairRecipe, find_pair
from dustin_runtime.parallel.ranks import joined
from dustin_runtime.step import Stepper

OK, USAGE, CONFLICT, CAPACITY, MISSING, INTERRUPTED = 0, 2, 4, 5, 6, 130
LICENSE = Path(__file__).parents[3] / "LICENSE"
SMALL = ["--batch", "2", "--context", "48", "--steps", "3", "--repeats", "1", "--budget", "40", "--draft-budget", "16"]
NOISE = ["bench", "--pair", "noise", "--random-weights", "--synthetic-context", "--device", "cpu", *SMALL]
MORE = {"roofline_all_reduce_ms"}
"""What a row has more than one of a single process."""
Patches = Callable[[int], list[Any]]


def recipe() -> PairRecipe:
    """A known pair that is tiny; its target has a head of its own, whose rows two ranks do not share evenly."""
    sizes = {"family": "llama", "hidden": 32, "ffn": 64, "kv_heads": 2, "head_size": 8, "vocab": 1201, "context": 128}
    target, draft = (
        ModelRecipe(
            hub="org/noise",
            shape=ModelShape.model_validate({"layers": layers, "query_heads": 4, **sizes}),
            tokenizer_vocab=1100,
        )
        for layers in (4, 2)
    )
    return PairRecipe(aliases=("noise",), target=target, draft=draft, depth=3, budget=48, source="made up for a test")


def command(arguments: list[list[str]], patches: Patches | None = None) -> Outcome:
    """On a rank: `dustin-run` with its own arguments, where `noise` is a known pair."""
    rank = int(os.environ["RANK"])
    with ExitStack() as stack:
        for patch in (noise_is_known(), *(patches(rank) if patches else [])):
            stack.enter_context(patch)
        return dustin_run(*arguments[rank])


def noise_is_known() -> Any:
    return mock.patch.object(subject, "find_pair", lambda alias: recipe() if alias == "noise" else find_pair(alias))


def together(pool: RankPool, *arguments: list[object], patches: Patches | None = None) -> list[Outcome]:
    """Both ranks' outcomes, with the same arguments or each with its own."""
    texts = [[str(one) for one in given] for given in arguments]
    found: list[Outcome] = pool(command, texts if len(texts) > 1 else texts * 2, patches)
    return found


def methods(*names: str) -> list[str]:
    return [part for name in names for part in ("--method", name)]


def measured(outcomes: list[Outcome], path: Path) -> dict[str, Any]:
    """The document, which one rank alone has written, and whose rows it alone has printed."""
    first, second = outcomes
    assert (first.code, first.err, second) == (OK, "", Outcome(OK, "", "")), outcomes
    found: dict[str, Any] = json.loads(path.read_text())
    header, *lines = first.out.splitlines()
    assert header.endswith("  over 2 ranks")
    assert [line.split()[0] for line in lines] == [row["method"] for row in found["rows"]]
    return found


def linears_bytes(row: dict[str, Any]) -> float:
    return float(row["components_gb_per_s"]["linears"] * row["components_ms"]["linears"] * 1e6)


def test_noise_over_two_ranks(two_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    every = methods("vanilla", "magicdec", "dustin", "dustin-rest", "streaming")
    given = [*NOISE, *every, "--force-acceptance", "2.5"]
    document = measured(together(two_ranks, [*given, "--json", path]), path)
    with noise_is_known():
        assert dustin_run(*given, "--json", tmp_path / "one.json").code == OK
    alone = json.loads((tmp_path / "one.json").read_text())
    assert document["ranks"] == 2
    assert document["command"].startswith("torchrun --nproc-per-node 2 -m dustin_runtime bench --pair noise ")
    assert document.keys() == alone.keys() | {"ranks"}
    link = LINKS["cpu"]
    assert document["roofline"] == alone["roofline"] | {
        "link_bytes_per_s": link.bytes_per_s,
        "all_reduce_latency_s": link.latency_s,
    }
    assert document["synthetic"] == alone["synthetic"]
    for row, one in zip(document["rows"], alone["rows"], strict=True):
        assert row.keys() == one.keys() | MORE
        same = ("method", "depth", "budget", "draft_reads", "tau", "acceptance_per_position", "synthetic")
        assert [row[name] for name in same] == [one[name] for name in same]
        assert row["components_ms"].keys() == one["components_ms"].keys() | {"all_reduce"}
        assert sum(row["components_ms"].values()) == pytest.approx(row["step_ms"])
        assert min(value for name, value in row["components_ms"].items() if name != "rest") > 0
        # The rows of the embedding that are looked up, 2 or 8 of 1201, and norms are whole on each.
        assert 0.5 < linears_bytes(row) / linears_bytes(one) < 0.52
        assert row["over_roofline"] == pytest.approx(row["step_ms"] / row["roofline_ms"])
        tokens = 2 * (row["depth"] + 1)
        assert row["roofline_all_reduce_ms"] == pytest.approx(8 * 1e3 * (tokens * 32 * 4 / 2e9 + 50e-6))
        assert row["roofline_all_reduce_ms"] < row["roofline_ms"]
    markdown = path.with_suffix(".md").read_text()
    assert "2 ranks, each CPU (" in markdown and "| all-reduce ms | rest ms |" in markdown
    assert "at 2 GB/s, and 50 us each" in markdown
    for text in ((tmp_path / "one.json").read_text(), (tmp_path / "one.md").read_text()):
        assert "rank" not in text and "reduce" not in text


@pytest.mark.parametrize("draft", [None, "self:2"])
def test_a_real_pair_decides_as_in_one_process(
    draft: str | None, tiny_pair: TinyPair, two_ranks: RankPool, tmp_path: Path
) -> None:
    pair = TinyPair(tiny_pair.target, Path(draft)) if draft else tiny_pair
    path = tmp_path / "grid.json"
    every = methods("vanilla", "dustin", "dustin-rest")
    given = ["bench", *pair.options, "--file", LICENSE, "--dtype", "float64", *SMALL, *every]
    document = measured(together(two_ranks, [*given, "--json", path]), path)
    assert dustin_run(*given, "--json", tmp_path / "one.json").code == OK
    alone = json.loads((tmp_path / "one.json").read_text())
    assert (document["ranks"], document["synthetic"]) == (2, [])
    for row, one in zip(document["rows"], alone["rows"], strict=True):
        assert row["acceptance_per_position"] == one["acceptance_per_position"]
        assert row["prefill_s"] > 0
        if row["depth"] and draft:  # the draft's sums are counted too
            passes = 8 * (2 * 5 * 96 * 8 / 2e9 + 50e-6) + 4 * sum(2 * n * 96 * 8 / 2e9 + 50e-6 for n in (2, 1, 1, 1))
            assert row["roofline_all_reduce_ms"] == pytest.approx(1e3 * passes)


def test_a_synthetic_context_of_a_split_draft(tiny_pair: TinyPair, two_ranks: RankPool, tmp_path: Path) -> None:
    path, pair = tmp_path / "grid.json", TinyPair(tiny_pair.target, Path("self:2"))
    given = ["bench", *pair.options, "--synthetic-context", *SMALL, *methods("dustin"), "--json", path]
    document = measured(together(two_ranks, given), path)
    assert document["rows"][0]["components_ms"]["scores"] > 0


def test_what_is_refused_is_said_once(tiny_pair: TinyPair, two_ranks: RankPool, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    for given, code, message in (
        ([*NOISE, "--method", "h2o"], USAGE, "method h2o needs all heads in one process, there are 2"),
        (["bench", "--pair", "smollm2", *NOISE[3:]], USAGE, "2 ranks cannot share 9 query heads, 3 KV heads"),
        ([*NOISE, "--device", "cuda:0"], USAGE, "--device cuda:0: each of 2 ranks needs its own"),
        ([*NOISE, "--force-acceptance", "9"], USAGE, "--force-acceptance 9: a step of 3 drafts emits 1 to 4"),
        ([*NOISE, "--json", blocked / "x.json"], MISSING, "rank 0: --json "),
        (["bench", *tiny_pair.options, *SMALL, "--file", "none.txt"], MISSING, "none.txt: no such file"),
    ):
        first, second = together(two_ranks, given)
        assert (first.code, first.out, second) == (code, "", Outcome(code, "", "")), (first, second)
        assert first.error.startswith(message), first
    first, second = together(two_ranks, ["bench", "attention", "--device", "cpu", "--workload", "50x1"])
    assert first == second and first.code == USAGE
    assert first.error.startswith("bench attention: runs in one process; only generate and bench serve under torchrun")


def test_ranks_that_were_given_something_else_end_with_its_name(two_ranks: RankPool) -> None:
    for more, name in (
        (["--steps", "4"], "--steps: 3 on rank 0, 4 on rank 1"),
        (["--context", "50"], "--context: [48] on rank 0, [48, 50] on rank 1"),
        (["--force-acceptance", "2"], "--force-acceptance: not given on rank 0, 2.0 on rank 1"),
    ):
        first, second = together(two_ranks, NOISE, [*NOISE, *more])
        assert (first.code, first.out, second) == (CONFLICT, "", Outcome(CONFLICT, "", ""))
        assert first.error == f"ranks differ in {name}"


def seeded_by_rank(rank: int) -> list[Any]:
    real = subject.random_decoder

    def random(*given: Any) -> Any:
        return real(*given) if len(given) > 4 else real(*given[:3], seed=1 + rank)

    return [mock.patch.object(subject, "random_decoder", random)]


def test_other_noise_on_another_rank_is_a_conflict(two_ranks: RankPool) -> None:
    first, second = together(two_ranks, NOISE, patches=seeded_by_rank)
    assert (first.code, first.out, second) == (CONFLICT, "", Outcome(CONFLICT, "", ""))
    assert first.error.startswith("ranks differ in the draft's random weights: ")


def decides_otherwise(rank: int) -> list[Any]:
    real = Stepper.__call__

    def step(self: Stepper, *arguments: Any) -> Any:
        result = real(self, *arguments)
        state = arguments[0]
        state.recent.add_(rank)
        return result

    return [mock.patch.object(Stepper, "__call__", step)]


def test_ranks_that_decide_differently_measure_nothing(two_ranks: RankPool) -> None:
    first, second = together(two_ranks, [*NOISE, *methods("vanilla")], patches=decides_otherwise)
    assert (first.code, first.out, second) == (CONFLICT, "", Outcome(CONFLICT, "", ""))
    assert first.error.startswith("ranks differ in the last tokens of vanilla: ")


def small_second_gpu(rank: int) -> list[Any]:
    return [
        mock.patch.object(memory_plan, "free_bytes", return_value=(8 << 30, 1 << 20)[rank]),
        mock.patch.object(subject, "random_decoder", None),
    ]


def test_what_does_not_fit_on_one_rank_is_refused_on_both_before_weights_are_made(two_ranks: RankPool) -> None:
    first, second = together(two_ranks, NOISE, patches=small_second_gpu)
    assert (first.code, first.out, second) == (CAPACITY, "", Outcome(CAPACITY, "", ""))
    assert first.error.startswith("rank 1: 2 rows of ")
    assert " GiB on each of 2 ranks (" in first.error


def full_second_gpu(rank: int) -> list[Any]:
    def state(self: Stepper, rows: int, capacity: int) -> Any:
        raise CapacityError("no memory for a KV cache")

    return [mock.patch.object(Stepper, "state", state)] if rank else []


def test_caches_that_one_rank_cannot_hold_end_both(two_ranks: RankPool) -> None:
    first, second = together(two_ranks, NOISE, patches=full_second_gpu)
    assert (first.code, second) == (CAPACITY, Outcome(CAPACITY, "", ""))
    assert first.error == "rank 1: no memory for a KV cache"


def interrupted(rank: int) -> list[Any]:
    return [mock.patch.object(Engine, "step", mock.Mock(side_effect=KeyboardInterrupt))]


def test_an_interruption_is_said_once(two_ranks: RankPool) -> None:
    first, second = together(two_ranks, NOISE, patches=interrupted)
    assert (first.code, first.err) == (INTERRUPTED, "error: interrupted\n")
    assert second == Outcome(INTERRUPTED, "", "")


def slow_second() -> timing.Timing:
    with joined(20) as ranks:
        work = lambda: time.sleep(0.02 if ranks.rank else 0)  # noqa: E731 - as the benchmark's own work
        return timing.clock_ms(work, 1000, limit_s=0.1, together=Together(2))


def test_the_slowest_rank_counts_and_all_repeat_as_often(two_ranks: RankPool) -> None:
    """Alone the first would repeat a thousand times; if the work talked to the other, it would wait for ever."""
    first, second = two_ranks(slow_second)
    assert first == second
    assert first.least_ms >= 20 and first.repeats <= 5
