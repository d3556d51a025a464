"""`dustin-run generate` in two processes: one text, said once; and what ends both of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Outcome, dustin_run
from rank_pool import RankPool
from tiny_pair import TinyPair

from dustin_runtime.config import DustinConfig, Estimate, Guard, LayerHeads, Selection, load_config, save_config
from dustin_runtime.loading import open_pair

PROMPTS = ["The assert statement is convenient.", "x"]
OK, USAGE, CONFLICT, MISSING = 0, 2, 4, 6


@pytest.fixture(scope="module")
def config(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    opened = open_pair(str(tiny_pair.target), str(tiny_pair.draft), offline=True)
    selection = Selection(
        budget=24,
        sink=4,
        window=8,
        m=6,
        history=LayerHeads(layer=2, heads=(0, 5)),
        lookahead=(LayerHeads(layer=1, heads=(0, 3)),),
    )
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    save_config(DustinConfig(pair=opened.identity(), depth=3, selection=selection), path)
    return path


def command(arguments: list[list[str]]) -> Outcome:
    """On a rank: `dustin-run` with its own arguments."""
    return dustin_run(*arguments[int(os.environ["RANK"])])


def generate(pair: TinyPair, *options: object, prompts: list[str] = PROMPTS) -> list[str]:
    given = [*prompts, *pair.options, "--max-new-tokens", 12, "--ignore-eos", *options]
    return ["generate", *map(str, given)]


def together(pool: RankPool, *arguments: list[str]) -> list[Outcome]:
    """Both ranks' outcomes, with the same arguments or each with its own."""
    found: list[Outcome] = pool(command, [*arguments] if len(arguments) > 1 else [*arguments] * 2)
    return found


def texts(document: str) -> list[list[int]]:
    found: dict[str, Any] = json.loads(document)
    return [row["tokens"] for row in found["rows"]]


@pytest.mark.parametrize(
    "options", [[], ["--temperature", "1.2", "--top-p", "0.9", "--batch", "1"], ["--kv-dtype", "fp8"]]
)
def test_the_text_is_that_of_one_process_and_said_once(
    options: list[str], tiny_pair: TinyPair, config: Path, two_ranks: RankPool
) -> None:
    arguments = generate(tiny_pair, "--config", config, "--compare", "sd", "--json", *options)
    first, second = together(two_ranks, arguments)
    assert (first.code, first.err, second) == (OK, "", Outcome(OK, "", ""))
    assert texts(first.out) == texts(dustin_run(*arguments).out)
    shown, silent = together(two_ranks, generate(tiny_pair, "--method", "sd", *options))
    assert shown.code == OK and shown.out.startswith("[0] ") and shown.err.startswith("sd: ")
    assert silent == Outcome(OK, "", "")


def test_ranks_that_were_given_something_else_end_with_its_name(
    tiny_pair: TinyPair, config: Path, two_ranks: RankPool, tmp_path: Path
) -> None:
    same = generate(tiny_pair, "--config", config)
    other = Path(shutil.copy(config, tmp_path / "other.yaml"))
    for theirs, name in (
        ([*same, "--seed", "3"], "ranks differ in --seed: 0 on rank 0, 3 on rank 1"),
        (generate(tiny_pair, "--config", other), "ranks differ in --config: "),
    ):
        first, second = together(two_ranks, same, theirs)
        assert first.code == second.code == CONFLICT
        assert first.error.startswith(name)
        assert (second.out, second.err) == ("", "")


def test_what_lies_under_one_name_must_be_the_same(
    tiny_pair: TinyPair, config: Path, two_ranks: RankPool, tmp_path: Path
) -> None:
    """As on hosts whose files differ: a config, then a model's weights."""
    for rank in range(2):
        shutil.copytree(tiny_pair.target, tmp_path / str(rank) / "target")
        shutil.copytree(tiny_pair.draft, tmp_path / str(rank) / "draft")
        (tmp_path / str(rank) / "config.yaml").write_text(
            config.read_text().replace("tiny-target", "target").replace("tiny-draft", "draft")
        )
    arguments = generate(TinyPair(Path("target"), Path("draft")), "--config", "config.yaml")
    second = tmp_path / "1"
    weights = second / "draft" / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[: size // 2] + bytes(size - size // 2))
    first, silent = two_ranks(command_in, tmp_path, arguments)
    assert (first.code, silent) == (CONFLICT, Outcome(CONFLICT, "", ""))
    assert first.error.startswith("ranks differ in the draft's sha256: ")
    (second / "config.yaml").write_text((second / "config.yaml").read_text().replace("m: 6", "m: 5"))
    first, silent = two_ranks(command_in, tmp_path, arguments)
    assert (first.error, silent.code) == (
        "ranks differ in the config's selection.m: 6 on rank 0, 5 on rank 1",
        CONFLICT,
    )
    (second / "config.yaml").unlink()
    first, silent = two_ranks(command_in, tmp_path, arguments)
    assert (first.code, silent) == (MISSING, Outcome(MISSING, "", ""))
    assert first.error.startswith("rank 1: config.yaml: ")


def command_in(folders: Path, arguments: list[str]) -> Outcome:
    """On a rank: `dustin-run` in a folder of its own."""
    before = Path.cwd()
    os.chdir(folders / os.environ["RANK"])
    try:
        return dustin_run(*arguments)
    finally:
        os.chdir(before)


def test_what_cannot_be_split_is_refused_before_weights_are_read(
    tiny_pair: TinyPair, config: Path, two_ranks: RankPool, tmp_path: Path
) -> None:
    odd = altered(tiny_pair.target, tmp_path / "odd", num_attention_heads=3, num_key_value_heads=3)
    for arguments, message in (
        (generate(TinyPair(odd, tiny_pair.draft)), "2 ranks cannot share 3 query heads, 3 KV heads"),
        (generate(tiny_pair, "--config", config, "--method", "h2o"), "method h2o needs all heads in one process"),
        (generate(tiny_pair, "--device", "cuda:0"), "--device cuda:0: each of 2 ranks needs its own"),
        (["bench", "attention"], "bench attention: runs in one process; only generate and bench serve under torchrun"),
    ):
        first, second = together(two_ranks, arguments)
        assert first.code == second.code == USAGE, first
        assert message in first.error


def altered(model: Path, folder: Path, **fields: object) -> Path:
    """A copy of a model whose config says something else."""
    shutil.copytree(model, folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | fields))
    return folder


@pytest.mark.parametrize(
    "options", [[], ["--temperature", "1.2", "--top-p", "0.9", "--batch", "1"], ["--kv-dtype", "fp8"]]
)
def test_a_pipeline_writes_the_text_of_one_process(
    options: list[str], tiny_pair: TinyPair, config: Path, two_ranks: RankPool
) -> None:
    for draft in (["--config", config, "--compare", "sd"], ["--draft", "self:3", "--method", "sd"]):
        arguments = generate(tiny_pair, *draft, "--json", *options)
        first, second = together(two_ranks, [*arguments, "--pipeline"])
        assert (first.code, first.err, second) == (OK, "", Outcome(OK, "", ""))
        assert texts(first.out) == texts(dustin_run(*arguments).out)


def test_what_no_pipeline_can_run_is_refused(
    tiny_pair: TinyPair, config: Path, two_ranks: RankPool, tmp_path: Path
) -> None:
    arguments = generate(tiny_pair, "--config", config)
    alone = dustin_run(*arguments, "--pipeline")
    assert alone.code == USAGE
    assert alone.error.startswith(
        "--pipeline: this is one process; start as many as there are to be stages with torchrun"
    )
    first, second = together(two_ranks, [*arguments, "--pipeline"], arguments)
    assert (first.code, second) == (CONFLICT, Outcome(CONFLICT, "", ""))
    assert first.error == "ranks differ in --pipeline: True on rank 0, False on rank 1"
    flat = altered(tiny_pair.target, tmp_path / "flat", num_hidden_layers=1)
    for given, message in (
        (
            generate(TinyPair(flat, tiny_pair.draft)),
            "2 stages of a pipeline need a layer each, the target has 1; start",
        ),
        ([*arguments, "--method", "h2o"], "method h2o needs all heads in one process"),
    ):
        first, second = together(two_ranks, [*given, "--pipeline"])
        assert (first.code, second) == (USAGE, Outcome(USAGE, "", ""))
        assert first.error.startswith(message)


def test_torchrun_starts_it(tiny_pair: TinyPair) -> None:
    arguments = generate(tiny_pair, "--method", "sd", "--json")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*start, "-m", "dustin_runtime", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == OK, done.stderr
    assert done.stdout.count("\n") == 1
    assert texts(done.stdout) == texts(dustin_run(*arguments).out)


def test_a_guard_decides_alike_on_both_ranks(
    tiny_pair: TinyPair, config: Path, tmp_path: Path, two_ranks: RankPool
) -> None:
    estimate = Estimate(intercept=0.1, history=0.4, lookahead=0.4, rms=0.02, overestimate=0.03)
    guard = Guard(budget=24, estimate=estimate, sizes=(24, 128), across=estimate, documents=3, errors_of="held_out")
    save_config(load_config(config).model_copy(update={"guard": guard}), tmp_path / "config.yaml")
    for options in (("--guard", 0.7), ("--full-every", 2), ("--guard", 1)):
        given = generate(
            tiny_pair, "--config", tmp_path / "config.yaml", *options, "--dtype", "float64", "--json",
            prompts=["The assert statement is convenient. " * 6, "x"],
        )  # fmt: skip
        alone = dustin_run(*given)
        first, second = together(two_ranks, given)
        assert (alone.code, first.code, second.code) == (OK, OK, OK), first.err
        assert texts(first.out) == texts(alone.out)
        shares = [json.loads(one.out)["statistics"]["full_steps_share"] for one in (alone, first)]
        assert shares[0] == shares[1] > 0


@pytest.mark.parametrize("split", [[], ["--pipeline"]])
def test_what_stands_in_for_the_rest_is_that_of_one_process(
    split: list[str], tiny_pair: TinyPair, config: Path, two_ranks: RankPool
) -> None:
    given = generate(
        tiny_pair, "--config", config, "--method", "dustin-rest", "--full-every", 4, "--kv-dtype", "fp8", "--json",
        prompts=["The assert statement is convenient. " * 6, "x"],
    )  # fmt: skip
    first, second = together(two_ranks, [*given, *split])
    assert (first.code, second) == (OK, Outcome(OK, "", "")), first.err
    alone = dustin_run(*given)
    assert texts(first.out) == texts(alone.out)
    figures = [json.loads(one.out)["statistics"] for one in (alone, first)]
    for name in ("full_steps_share", "kept_tokens_per_step"):
        assert figures[0][name] == figures[1][name] > 0


def test_audits_are_refused(tiny_pair: TinyPair, config: Path, two_ranks: RankPool) -> None:
    first, second = together(two_ranks, generate(tiny_pair, "--config", config, "--max-divergence", 1))
    assert first.code == second.code == USAGE
    assert "--max-divergence: audits verify in full in one process; this is one of 2" in first.err + second.err
