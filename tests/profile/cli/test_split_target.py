"""`srh`, `trace` and `search` with a target split over two processes: one's results up to rounding, those of any number
of teams to the byte, and what ends all of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from commands import Outcome
from profiling_ranks import (
    CAPACITY,
    CONFLICT,
    DOCUMENTS,
    MISSING,
    NOTHING,
    OK,
    PEER,
    USAGE,
    command,
    content,
    full_disk,
    kill_at_second,
    not_finite,
    profile,
)
from rank_pool import RankPool
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file
from tiny_pair import TinyPair

from dustin_profile.choices import DraftCaches
from dustin_profile.pipeline import Pipeline
from dustin_profile.prompts import Sample
from dustin_profile.settings import DataSettings, ModelSettings, ObjectiveSettings, Settings, choose_pair
from dustin_profile.srh.score import Prober, Score
from dustin_profile.traces.collect import Collector
from dustin_runtime.errors import MissingError, UsageError
from dustin_runtime.files import read_json, write_json
from dustin_runtime.loading import open_pair
from dustin_runtime.models import weights
from dustin_runtime.parallel import ranks as runtime_ranks
from dustin_runtime.parallel.ranks import ALONE, joined

TEAM = ["--tensor-parallel", "2"]
SECOND = Outcome(OK, "", "")


@pytest.fixture(scope="module")
def alone(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of a search."""
    run = tmp_path_factory.mktemp("alone") / "run"
    assert profile(command(tiny_pair, "search", run, *DOCUMENTS)).code == OK
    return run


@pytest.fixture(scope="module")
def split(tiny_pair: TinyPair, two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a team of two makes of the same, stage by stage."""
    run = tmp_path_factory.mktemp("split") / "run"
    for name in ("srh", "trace", "search"):
        options = [] if name == "srh" else DOCUMENTS
        first, second = two_ranks(profile, command(tiny_pair, name, run, *options, *TEAM))
        assert first.code == OK, first.err
        assert first.out
        assert second == SECOND
    return run


@pytest.fixture
def four_ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


def require_same_heads(found: Path, expected: Path) -> None:
    ours, wanted = read_json(found), read_json(expected)
    assert ours["ranking"] == wanted["ranking"]
    torch.testing.assert_close(torch.tensor(ours["scores"]), torch.tensor(wanted["scores"]), atol=1e-5, rtol=1e-4)


def require_same_traces(found: Path, expected: Path) -> None:
    shards = sorted(path.name for path in expected.glob("*.safetensors"))
    assert shards and sorted(path.name for path in found.glob("*.safetensors")) == shards
    for name in shards:
        ours, wanted = load_file(found / name), load_file(expected / name)
        for key in ("prefix", "text", "agrees"):
            assert torch.equal(ours[key], wanted[key])
        for key in ("truth", "tail"):
            torch.testing.assert_close(ours[key], wanted[key], atol=1e-5, rtol=1e-4)
        for key in ("history", "lookahead"):  # kept in fp16
            torch.testing.assert_close(ours[key], wanted[key], atol=1e-5, rtol=2e-3)


def test_a_team_finds_what_one_process_does(alone: Path, split: Path) -> None:
    require_same_heads(split / "srh/heads-target.json", alone / "srh/heads-target.json")
    require_same_traces(split / "traces", alone / "traces")
    configs = [YAML(typ="safe").load(run / "config.yaml") for run in (split, alone)]
    for name in ("history", "lookahead", "retrieval_heads"):
        assert configs[0]["selection"][name] == configs[1]["selection"][name]
    assert configs[0]["provenance"]["arguments"]["tensor_parallel"] == 2
    assert read_json(split / "traces/inputs.json")["tensor_parallel"] == 2
    assert "tensor_parallel" not in read_json(alone / "traces/inputs.json")
    # A draft of its own is whole on every rank, which does not touch its scores.
    ours, wanted = content(split), content(alone)
    for name in wanted:
        if name.startswith("srh/draft/") or name == "srh/heads-draft.json":
            assert ours[name] == wanted[name]


@pytest.mark.parametrize("lookahead", ["proposals"])  # which has the trajectory's pass too
def test_a_draft_of_the_target_is_split_with_it(
    lookahead: str, tiny_pair: TinyPair, two_ranks: RankPool, tmp_path: Path
) -> None:
    """And documents are continued two at a time, all heads are the truth."""
    pair = tiny_pair._replace(draft="self:2")  # type: ignore[arg-type]
    options = ["--documents", 3, "--rows", 2, "--lookahead", lookahead, "--evaluation", "all"]
    assert profile(command(pair, "trace", tmp_path / "one", *options)).code == OK
    first, second = two_ranks(profile, command(pair, "trace", tmp_path / "two", *options, *TEAM))
    assert (first.code, second) == (OK, SECOND), first.err
    for side in ("target", "draft"):
        require_same_heads(tmp_path / f"two/srh/heads-{side}.json", tmp_path / f"one/srh/heads-{side}.json")
    require_same_traces(tmp_path / "two/traces", tmp_path / "one/traces")
    assert read_json(tmp_path / "two/srh/draft/inputs.json")["tensor_parallel"] == 2


def write_borrowing(folder: Path, pair: TinyPair) -> TinyPair:
    """The target with a head of its own, and its first two layers as a draft that borrows embedding and head."""
    made = TinyPair(folder / "target", folder / "draft")
    shutil.copytree(pair.target, made.target)
    made.draft.mkdir()
    config = read_json(pair.target / "config.json") | {"tie_word_embeddings": False}
    write_json(made.target / "config.json", config)
    write_json(made.draft / "config.json", config | {"num_hidden_layers": 2, "dustin": {"embedding": "target"}})
    tensors = load_file(pair.target / "model.safetensors")
    kept = ("model.layers.0.", "model.layers.1.", "model.norm.")
    save_file({name: x for name, x in tensors.items() if name.startswith(kept)}, made.draft / "model.safetensors")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0).contiguous()}
    save_file(tensors | head, made.target / "model.safetensors")
    return made


def damaged() -> Any:
    return mock.patch.object(weights, "load_decoder", side_effect=MissingError("model.safetensors: damaged"))


def test_a_draft_borrows_what_ranks_have_in_parts(tiny_pair: TinyPair, two_ranks: RankPool, tmp_path: Path) -> None:
    """And the other rank does not wait for a part that could not be read."""
    pair = write_borrowing(tmp_path, tiny_pair)
    assert profile(command(pair, "trace", tmp_path / "one")).code == OK
    assert two_ranks(profile, command(pair, "srh", tmp_path / "two", *TEAM))[0].code == OK
    arguments = command(pair, "trace", tmp_path / "two", *TEAM)
    first, second = two_ranks(profile, arguments, damaged)
    assert (first.code, first.error) == (MISSING, "rank 1: model.safetensors: damaged")
    assert second == Outcome(MISSING, "", "")
    first, second = two_ranks(profile, arguments)
    assert (first.code, second) == (OK, SECOND), first.err
    require_same_traces(tmp_path / "two/traces", tmp_path / "one/traces")


def scores(pair: TinyPair, mode: str) -> list[Score]:
    """In this process or a team: what three prompts say, two of which are answered together; the second is refused."""
    with joined() as ranks:
        team = ranks.in_teams(ranks.world)
        opened = open_pair(str(pair.target), str(pair.draft), offline=True)
        prober = Prober(
            opened.load_target(torch.float32, "cpu", team.team_collectives("cpu")),
            mode=mode,  # type: ignore[arg-type]
            decode=lambda ids: " ".join(map(str, ids)),
            accept=lambda text, needle: needle != 1,
            stop=lambda tokens: len(tokens) == 5,
            vocab=opened.shared_vocab,
            capacity=700,
            steps=6,
            rows=2,
        )
        random = torch.Generator().manual_seed(0)
        texts = torch.randint(2, 2000, (3, 600), generator=random).tolist()
        samples = [
            Sample(needle, 600, 0.5, ids, tuple(range(300, 310)), ids[303:307], 300) for needle, ids in enumerate(texts)
        ]
        return [*prober.score_all(samples[:2]), *prober.score_all(samples[2:])]


@pytest.mark.parametrize("mode", ["forced", "generate"])
def test_scores_are_of_all_heads_on_every_rank(mode: str, tiny_pair: TinyPair, two_ranks: RankPool) -> None:
    one = scores(tiny_pair, mode)
    first, second = two_ranks(scores, tiny_pair, mode)
    for found, other, wanted in zip(first, second, one, strict=True):
        assert (found.accepted, found.response) == (wanted.accepted, wanted.response)
        torch.testing.assert_close(found.span, wanted.span, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(found.copies, wanted.copies, atol=1e-6, rtol=1e-4)
        assert torch.equal(found.span, other.span)
    assert [score.accepted for score in first] == [True, mode == "forced", True]
    assert first[0].span.shape == (4, 6)


def test_two_teams_one_of_which_loses_a_rank_and_one_team_goes_on(
    tiny_pair: TinyPair, split: Path, two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    refused = four_ranks(profile, command(tiny_pair, "search", run, "--tensor-parallel", "4"))
    assert refused[0].error.startswith("4 ranks cannot share 6 query heads, 2 KV heads")
    assert [outcome.code for outcome in refused] == [USAGE] * 4
    assert refused[1:] == [Outcome(USAGE, "", "")] * 3
    assert not list(run.rglob("*.json"))
    arguments = command(tiny_pair, "search", run, *DOCUMENTS, *TEAM)
    four_ranks.start(profile, arguments, kill_at_second)
    first = four_ranks.finish(0)
    assert first.code == PEER
    assert first.error.startswith("another rank has ended")
    stamps = {path: path.stat().st_mtime_ns for path in (run / "traces").glob("*.safetensors")}
    assert 2 <= len(stamps) <= 3  # of the first round, and perhaps the one that the other team was at
    assert [outcome.code for outcome in two_ranks(profile, arguments)] == [OK, OK]
    assert content(run) == content(split)
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_a_rank_that_is_killed_ends_the_rest_of_its_team(
    tiny_pair: TinyPair, split: Path, two_ranks: RankPool, tmp_path: Path
) -> None:
    pool = RankPool(2)
    try:
        arguments = command(tiny_pair, "search", tmp_path / "run", *DOCUMENTS, *TEAM)
        pool.start(profile, arguments, kill_at_second)
        first = pool.finish(0)
    finally:
        pool.close()
    assert first.code == PEER
    assert first.error.startswith("another rank has ended")
    assert len(list((tmp_path / "run/traces").glob("*.safetensors"))) == 1
    assert [outcome.code for outcome in two_ranks(profile, arguments)] == [OK, OK]
    assert content(tmp_path / "run") == content(split)


def no_memory_at_second() -> Any:
    """While the other rank is at the same document."""
    windows, seen = Collector._windows, []

    def traced(self: Collector, *arguments: Any) -> Any:
        seen.append(arguments)
        if len(seen) == 2:
            raise MemoryError
        return windows(self, *arguments)

    return mock.patch.object(Collector, "_windows", traced)


def impatient(*arguments: Any) -> Outcome:
    with mock.patch.object(runtime_ranks, "TIMEOUT", 8):
        return profile(*arguments)


@pytest.mark.parametrize(
    ("spoil", "rank", "code", "message"),
    [
        (full_disk, 0, CAPACITY, "rank 0: "),
        (no_memory_at_second, 1, CAPACITY, "rank 1: out of memory: lower the context"),
        (not_finite, 1, NOTHING, ""),
    ],
)
def test_what_goes_wrong_inside_a_team_is_said_once_and_loses_nothing(
    spoil: Callable[[], Any],
    rank: int,
    code: int,
    message: str,
    tiny_pair: TinyPair,
    two_ranks: RankPool,
    tmp_path: Path,
) -> None:
    """Documents are continued together: a rank fails before its team has done all; for a full disk none waits."""
    run = tmp_path / "run"
    arguments = command(tiny_pair, "trace", run, "--documents", 4, "--rows", 4, *TEAM)
    job = impatient if spoil is no_memory_at_second else profile
    first, second = two_ranks(job, arguments, spoil, None, rank)
    assert first.code == code, first.err
    assert first.error.startswith(message)
    if spoil is full_disk:
        assert "traces/00000.safetensors: no space left to write it" in first.error
    if spoil is not_finite:
        assert "attention is not finite; try --dtype float32" in first.error and "rank" not in first.error
    assert second == Outcome(code, "", "")
    assert [outcome.code for outcome in two_ranks(profile, arguments)] == [OK, OK]
    assert len(list((run / "traces").glob("*.safetensors"))) == 4


def test_results_of_other_teams_are_not_mixed(
    tiny_pair: TinyPair, alone: Path, split: Path, two_ranks: RankPool
) -> None:
    plain = command(tiny_pair, "trace", split, *DOCUMENTS)
    assert profile(plain).error.startswith(f"{split / 'srh/target'}: made with tensor_parallel = 2, now without it")
    first, second = two_ranks(profile, command(tiny_pair, "trace", alone, *DOCUMENTS, *TEAM))
    assert first.error.startswith(f"{alone / 'srh/target'}: made without tensor_parallel, now 2: give")
    assert (first.code, second) == (CONFLICT, Outcome(CONFLICT, "", ""))


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ("full", "--tensor-parallel 2: steps of a target that is split are not timed; put the latency.json that "),
        ("both", "--draft-cache both: one process alone tries it; give full with --tensor-parallel 2"),
    ],
)
def test_a_team_times_no_steps(cache: DraftCaches, message: str, tiny_pair: TinyPair, tmp_path: Path) -> None:
    models = ModelSettings(target=str(tiny_pair.target), draft=str(tiny_pair.draft), device="cpu")
    objective = ObjectiveSettings(objective="throughput", draft_cache=cache)
    settings = Settings(tmp_path, models=models, data=DataSettings(context=256), objective=objective)
    with pytest.raises(UsageError, match=f"^{message}"):
        Pipeline(settings, choose_pair(models), ALONE.in_teams(2)).search()


@pytest.mark.parametrize("name", ["srh", "trace", "search"])
def test_teams_that_processes_do_not_make_are_refused(
    name: str, tiny_pair: TinyPair, two_ranks: RankPool, tmp_path: Path
) -> None:
    remedy = "torchrun --nproc-per-node N -m dustin_profile"
    one = profile(command(tiny_pair, name, tmp_path / "run", *TEAM))
    assert one.error == f"--tensor-parallel 2: this is one process; start a multiple of 2 with {remedy}"
    assert one.code == USAGE
    for size, said in (
        (3, f"2 processes do not divide into teams of it; start a multiple of 3 with {remedy}"),
        (0, "must be at least 1"),
    ):
        first, second = two_ranks(profile, command(tiny_pair, name, tmp_path / "run", "--tensor-parallel", size))
        assert first.error == f"--tensor-parallel {size}: {said}"
        assert (first.code, second) == (USAGE, Outcome(USAGE, "", ""))
    assert not (tmp_path / "run").exists()
