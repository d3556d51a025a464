"""What users get wrong: one line that names the field or file, the exit code of its kind, nothing half-written, and
the right command afterwards goes on."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import SEARCH, SRH, Outcome, dustin_profile, dustin_run
from safetensors.torch import load_file, save_file
from tiny_pair import TinyPair

from dustin_profile.rundir import locked
from dustin_profile.srh import stage as srh_stage
from dustin_runtime.files import read_json

pytestmark = pytest.mark.usefixtures("plain_pictures")

LICENSE = Path(__file__).parents[3] / "LICENSE"
"""A short text: tokenising the default one takes longer than the rest of a run."""
OK, USAGE, CONFLICT, CAPACITY, MISSING, CONFIG, NOTHING = 0, 2, 4, 5, 6, 7, 8


def files(run: Path) -> set[str]:
    """What a run directory holds, all of it whole."""
    found = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    assert not [name for name in found if ".tmp" in name]
    for name in found:
        if name.endswith(".json"):
            read_json(run / name)
    return found


def search(pair: TinyPair, run: Path, *options: object) -> Outcome:
    return dustin_profile("search", *pair.options, "--run-dir", run, *SEARCH, "--data", LICENSE, *options)


def refused(outcome: Outcome, code: int, message: str) -> None:
    assert (outcome.code, outcome.out) == (code, "")
    error = outcome.error
    if "N tokens" in message:  # the tests' tokenizer is trained on Python's topics, which differ between versions
        error = re.sub(r"\d+ tokens", "N tokens", error)
    assert error.startswith(message), error


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], USAGE, "give --pair ALIAS (`dustin-profile pairs` lists them), or both --target and --draft"),
        (["--pair", "qwen72:0.5b"], USAGE, "unknown pair 'qwen72:0.5b': did you mean qwen72b:0.5b or"),
        (["--pair", "smollm2", "--target", "x"], USAGE, "give --pair ALIAS"),
        (["--target", "a/b", "--draft", "a/c", "--offline"], MISSING, "a/b: not (completely) in the local cache, and"),
        (["--target", "./nowhere", "--draft", "self:1"], MISSING, "./nowhere: no such file or folder"),
        (["--target", "what is this", "--draft", "self:1"], MISSING, "'what is this' is no model: give smollm2, a"),
    ],
)
def test_pairs_that_are_not_there(options: list[str], code: int, message: str, tmp_path: Path) -> None:
    refused(dustin_profile("search", *options, "--run-dir", tmp_path / "run"), code, message)
    assert not files(tmp_path / "run")
    if code == USAGE:
        refused(dustin_profile("search", *options, "--dry-run"), code, message)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--budget 20", USAGE, "--budget: 20 leaves no token to choose; give more than sink + window = 20"),
        ("--budget 0", USAGE, "--budget: 0 leaves no token to choose"),
        ("--budget 100 --sink 50 --recent 50", USAGE, "--budget: 100 leaves no token to choose"),
        ("--sink -1", USAGE, "--sink -1: must be at least 0"),
        ("--recent -1", USAGE, "--recent -1: must be at least 0"),
        ("--depth 0", USAGE, "--depth 0: must be at least 1"),
        ("--depth 65 --continuation 99", USAGE, "--depth 65: must be at most 64"),
        ("--width 0", USAGE, "--width 0: must be at least 1"),
        ("--width 25", USAGE, "--continuation 24: a window needs 25 tokens"),
        ("--continuation 3", USAGE, "--continuation 3: a window needs 4 tokens"),
        ("--windows 0", USAGE, "--windows 0: must be at least 1"),
        ("--documents 0", USAGE, "--documents 0: must be at least 1"),
        ("--context 0", USAGE, "--context 0: must be at least 1"),
        ("--context 4090", CAPACITY, "--context with --continuation: 4114 tokens exceed the model's context of 4096"),
        ("--length 0", USAGE, "--length 0: must be at least 1"),
        ("--length 4090", CAPACITY, "--length 4090: 4122 tokens exceed the model's context of 4096: shorten it, or"),
        ("--length 60", USAGE, "length 60: the needle and its question need"),
        ("--needle-count 0", USAGE, "--needle-count 0: must be at least 1"),
        ("--needle-count -1", USAGE, "--needle-count -1: must be at least 1"),
        ("--depth-at 1.5", USAGE, "--depth-at 1.5: must lie between 0 and 1"),
        ("--answer-tokens 0", USAGE, "--answer-tokens 0: must be at least 1"),
        ("--least-prompts 0", USAGE, "--least-prompts 0: must be at least 1"),
        ("--stable-overlap 1.1", USAGE, "--stable-overlap 1.1: give a share above 0 and at most 1"),
        ("--least-documents 0", USAGE, "--least-documents 0: must be at least 1"),
        ("--decided-within 0", USAGE, "--decided-within 0.0: give an ARR between 0 and 1"),
        ("--draft-layers 0", USAGE, "--draft-layers 0: must be at least 1"),
        ("--draft-layers 4", USAGE, "--draft-layers 4: the draft has 3; give 1 to 3"),
        ("--held-out 1", USAGE, "--held-out 1.0: give a share between 0 and 1"),
        ("--seed -1", USAGE, "--seed -1: must be at least 0"),
        ("--trials 0", USAGE, "--trials 0: must be at least 1"),
        ("--template chat --data queries.jsonl", USAGE, "template chat: the tokenizer has no chat template"),
        ("--device tpu", USAGE, "--device tpu: unknown; give auto, cpu, cuda or cuda:N"),
        ("--device meta", USAGE, "--device meta: unknown; give auto, cpu, cuda or cuda:N"),
        ("--device cuda:99", CAPACITY, "--device cuda:99: "),
        ("--dtype int8", USAGE, "--dtype int8: unknown (known: auto, float32, bfloat16, float16, float64)"),
        ("--rope yarn", USAGE, "--rope yarn: give default, linear:FACTOR or yarn:FACTOR"),
        ("--rope ntk:2", USAGE, "--rope ntk:2: give default, linear:FACTOR or yarn:FACTOR"),
        ("--rope yarn:0.5", USAGE, "--rope yarn:0.5: give default, linear:FACTOR or yarn:FACTOR"),
        ("--rope linear:inf", USAGE, "--rope linear:inf: give default, linear:FACTOR or yarn:FACTOR"),
        ("--rope yarn:nan", USAGE, "--rope yarn:nan: give default, linear:FACTOR or yarn:FACTOR"),
        ("--data nowhere.txt", MISSING, "nowhere.txt: no such file or folder, and not a data set"),
        ("--data org/nothing", MISSING, "org/nothing: is not in the local cache, and --offline forbids to fetch it"),
        ("--data empty.txt", MISSING, "empty.txt: is empty; give a file with text in it"),
        ("--data binary.txt", MISSING, "binary.txt: is binary (NUL bytes); give UTF-8 text"),
        ("--data latin.txt", MISSING, "latin.txt: is not UTF-8 text (byte 3); convert it to UTF-8"),
        ("--data short.txt", MISSING, "short.txt: the longest document has N tokens, fewer than --context 256; pass"),
        ("--data folder", MISSING, "folder: has no .txt files; give a folder with some, or one file"),
        ("--data numbers.jsonl", MISSING, "numbers.jsonl:2: column text holds int, text expected"),
        ("--data broken.parquet", MISSING, "broken.parquet: is not a parquet file ("),
        ("--haystack empty.txt", MISSING, "empty.txt: is empty; give a file with text in it"),
        ("--haystack binary.txt", MISSING, "binary.txt: is binary (NUL bytes)"),
        ("--haystack short.txt", CAPACITY, "haystack: has N tokens, a prompt of 256 needs"),
        ("--needles short.txt", CONFIG, "short.txt: needles: must be a list under this key"),
        ("--needles needles.yaml", CONFIG, "needles.yaml: needles.0.question: Field required"),
        ("--needles binary.txt", MISSING, "binary.txt: is binary (NUL bytes)"),
    ],
)
def test_settings_and_data_are_refused_before_any_work(
    options: str, code: int, message: str, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dustin_runtime.models.weights.load_decoder", None)  # no weights are read
    for name, content in (
        ("empty.txt", b" \n"),
        ("binary.txt", b"text\0text"),
        ("latin.txt", b"caf\xe9"),
        ("short.txt", b"Too short."),
        ("numbers.jsonl", b'{"text": "one"}\n{"text": 2}\n'),
        ("queries.jsonl", json.dumps({"context": "word " * 300, "query": "What?"}).encode()),
        ("broken.parquet", b"PAR1"),
        ("needles.yaml", b"needles: [{needle: The answer is 42., answer: '42'}]\n"),
    ):
        Path(name).write_bytes(content)
    Path("folder").mkdir()
    refused(search(tiny_pair, Path("run"), *options.split()), code, message)
    assert not files(Path("run"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--batch 1", "--batch: says nothing about --objective arr; add --objective throughput"),
        ("--objective arr --draft-cache full", "--draft-cache: says nothing about --objective arr"),
        ("--objective throughput --least-arr 0.9", "--least-arr 0.9: add --choose least-arr"),
    ],
)
def test_what_says_nothing_is_refused_at_its_default_too(options: str, message: str) -> None:
    refused(dustin_profile("search", "--pair", "smollm2", *options.split(), "--dry-run"), USAGE, message)


def damage(pair: TinyPair, folder: Path, side: str, change: Callable[[Path], object]) -> TinyPair:
    """The pair with a copy of one model that `change` has been applied to."""
    copy = folder / f"bad-{side}"
    shutil.copytree(getattr(pair, side), copy)
    change(copy)
    return pair._replace(**{side: copy})


def edit_json(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        value = read_json(folder / name)
        change(value)
        (folder / name).write_text(json.dumps(value))

    return apply


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    return apply


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, size)


def swap_tokens(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    one, other = (next(token for token, index in vocabulary.items() if index == wanted) for wanted in (700, 701))
    vocabulary[one], vocabulary[other] = 701, 700


LAYER = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (cut("model.safetensors", 100_000), MISSING, "{bad}/model.safetensors: truncated: 100000 bytes of "),
        (cut("model.safetensors", 4), MISSING, "{bad}/model.safetensors: truncated, or not a safetensors file"),
        (cut("model.safetensors", 0), MISSING, "{bad}/model.safetensors: truncated, or not a safetensors file"),
        (lambda folder: (folder / "model.safetensors").unlink(), MISSING, "{bad}: no weights; model.safetensors or"),
        (cut("config.json", 30), MISSING, "{bad}/config.json: not readable as JSON ("),
        (lambda folder: (folder / "config.json").unlink(), MISSING, "{bad}/config.json: no such file"),
        (
            edit_json("config.json", lambda c: c.update(architectures=["GPT2LMHeadModel"])),
            CONFIG,
            "{bad}/config.json: architecture GPT2LMHeadModel is not supported",
        ),
        (
            edit_json("config.json", lambda c: c.update(rope_parameters={"rope_type": "dynamic", "factor": 2})),
            CONFIG,
            "{bad}/config.json: RoPE type dynamic is not supported",
        ),
        (
            edit_json("config.json", lambda c: c.update(num_hidden_layers=5)),
            MISSING,
            "{name}: {missing} tensors are missing, model.layers.",
        ),
        (
            edit_weights(lambda w: w.update({LAYER: w[LAYER][:, :-1].contiguous()})),
            MISSING,
            "{name}: model.layers.1.mlp.down_proj.weight is [",
        ),
        (edit_weights(lambda w: w.pop(LAYER)), MISSING, "{name}: 1 tensors are missing, model.layers.1.mlp.down_proj"),
        (edit_weights(lambda w: w[LAYER].fill_(float("nan"))), NOTHING, "needle 0 at length 256: the model computes"),
        (cut("tokenizer.json", 500), MISSING, "{bad}: no usable tokenizer ("),
        (
            edit_json("tokenizer.json", swap_tokens),
            CONFIG,
            "tokenizers differ at token 700: ",
        ),
    ],
    ids=[
        *("weights-cut", "weights-header-cut", "weights-empty", "weights-gone", "config-cut", "config-gone"),
        *("architecture", "rope", "layers", "tensor-shape", "tensor-gone", "nan", "tokenizer-cut", "other-tokenizer"),
    ],
)
def test_damaged_models(
    side: str, change: Callable[[Path], object], code: int, message: str, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    pair = damage(tiny_pair, tmp_path, side, change)
    missing = {"target": 9, "draft": 2 * 9}[side]
    message = message.format(bad=tmp_path / f"bad-{side}", name=f"bad-{side}", missing=missing)
    run = tmp_path / "run"
    refused(search(pair, run), code, message)
    finished = {"srh/heads-target.json", "srh/heads-target.png", "srh/target/256-0.5.json", "srh/target/256-1.json"}
    begun = {"seconds.json", "srh/target/inputs.json", "srh/draft/inputs.json"}
    assert files(run) <= begun | (finished if side == "draft" else set())
    if code in (MISSING, NOTHING):
        served = dustin_run("generate", "Text.", *pair.options, "--max-new-tokens", 4)
        assert served.code == code
        assert "Traceback" not in served.err and served.err.count("error: ") == 1


def test_a_mended_model_continues_where_the_damaged_one_stopped(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """The draft's file is cut: the target's heads are found, kept, and not computed again once it is whole."""
    pair = damage(tiny_pair, tmp_path, "draft", lambda folder: None)
    assert dustin_profile("srh", *pair.options, "--run-dir", tmp_path / "run", *SRH).code == OK
    weights = pair.draft / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    shutil.rmtree(tmp_path / "run" / "srh" / "draft")
    before = (tmp_path / "run" / "srh" / "target" / "256-1.json").stat().st_mtime_ns
    refused(search(pair, tmp_path / "run"), MISSING, f"{weights}: truncated: ")
    weights.write_bytes(whole)
    assert search(pair, tmp_path / "run").code == OK
    assert (tmp_path / "run" / "srh" / "target" / "256-1.json").stat().st_mtime_ns == before


def test_nothing_retrieved_names_the_flag_and_the_flag_helps(tiny_pair: TinyPair, tmp_path: Path) -> None:
    run = tmp_path / "run"
    nothing = search(tiny_pair, run, "--mode", "generate")
    refused(nothing, NOTHING, "target tiny-target: none of 6 needles was retrieved: rank it with --mode forced, or use")
    assert "srh/heads-target.json" not in files(run)
    other = search(tiny_pair, run)
    refused(other, CONFLICT, f"{run}/srh/target: made with mode = generate, now forced: give another --run-dir, or --o")
    assert search(tiny_pair, run, "--overwrite").code == OK
    assert "config.yaml" in files(run)


def test_no_document_gives_a_window(tiny_pair: TinyPair, tmp_path: Path) -> None:
    row = json.dumps({"context": "word " * 300, "query": "What?", "answer": "x"})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n{row}\n")
    nothing = search(tiny_pair, tmp_path / "run", "--data", tmp_path / "rows.jsonl")
    assert nothing.code == NOTHING
    assert nothing.error.startswith("no document gave a window; rows.jsonl#0001: the continuation has 3 tokens, a ")
    assert "traces/manifest.json" in files(tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ("--context 255", "traces: made with data_sha256 = "),
        ("--windows 5", "traces: made with windows = 4, now 5: give another --run-dir, or --overwrite to discard it"),
        ("--depth 3", "traces: made with depth = 4, now 3: "),
        ("--length 320", "srh/target: made with lengths = [256], now [256, 320]: "),
        ("--dtype bfloat16", "srh/target: made with dtype = float32, now bfloat16: "),
        ("--budget 65", "search: made with budget = 64, now 65: "),
        ("--objective throughput", "search: made without objective, now {'objective': 'throughput', "),
        ("--rope linear:2", "srh/target: made without model.rope, now {'type': 'linear', 'factor': 2.0, "),
    ],
)
def test_changed_inputs_are_refused_by_the_field(
    options: str, field: str, tiny_pair: TinyPair, tmp_path: Path, finished: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    results = {name for name in files(run) if name != "seconds.json" and not name.endswith(".png")}
    before = {name: (run / name).read_bytes() for name in results}
    refused(search(tiny_pair, run, *options.split()), CONFLICT, f"{run}/{field}")
    assert {name: (run / name).read_bytes() for name in results} == before
    assert files(run) == files(finished)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ("--windows 5", "traces: made with windows = 4, now 5: "),
        ("--draft-mode generate", "srh/draft: made with mode = forced, now generate: "),
        ("--sink 5", "search: made with sink = 4, now 5: "),
    ],
)
def test_conflicts_of_later_stages_show_before_any_work(
    options: str, field: str, tiny_pair: TinyPair, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for part in (run / "srh" / "target").glob("256-*.json"):
        part.unlink()
    monkeypatch.setattr("dustin_runtime.models.weights.load_decoder", None)
    refused(search(tiny_pair, run, *options.split()), CONFLICT, f"{run}/{field}")


@pytest.fixture(scope="module")
def finished(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests copy it."""
    run = tmp_path_factory.mktemp("finished") / "run"
    assert search(tiny_pair, run).code == OK
    return run


def test_overwriting_discards_what_was_made_from_other_inputs(
    tiny_pair: TinyPair, tmp_path: Path, finished: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    heads = (run / "srh" / "target" / "256-1.json").stat().st_mtime_ns
    again = search(tiny_pair, run, "--windows", 3, "--overwrite", "--json")
    assert {entry["windows"] for entry in json.loads(again.out)["documents"]["search"].values()} == {3}
    assert (run / "srh" / "target" / "256-1.json").stat().st_mtime_ns == heads


def test_a_run_directory_in_use_or_not_writable(tiny_pair: TinyPair, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with locked(run):
        refused(search(tiny_pair, run), CONFLICT, f"--run-dir {run}: another dustin-profile is working in it")
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        refused(search(tiny_pair, folder), MISSING, f"--run-dir {folder}: cannot be written (")


STORED = ["srh/target/256-1.json", "srh/heads-draft.png", "traces/manifest.json", "traces/00002.safetensors"]
STORED += ["search/study.log", "config.yaml"]


@pytest.mark.parametrize("name", STORED)
def test_a_full_disk_at_any_file_leaves_whole_files_and_the_next_run_goes_on(
    name: str, tiny_pair: TinyPair, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    replace = Path.replace

    def full(path: Path, target: Path) -> Path:
        if str(target).endswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", full)
    message = f"{run / name}: no space left to write it; free some and run the command again"
    refused(search(tiny_pair, run), CAPACITY, message)
    monkeypatch.undo()
    assert name not in files(run)
    assert "config.yaml" not in files(run)
    assert search(tiny_pair, run).code == OK
    assert files(run) == files(finished)
    for shard in ("traces/00002.safetensors", "srh/heads-draft.json"):
        assert (run / shard).read_bytes() == (finished / shard).read_bytes()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_really_full(tiny_pair: TinyPair, tmp_path: Path, finished: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", run], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        full = search(tiny_pair, run)
        assert full.code == CAPACITY
        assert ": no space left to write it; free some and run the command again" in full.error
        assert 0 < len(files(run)) < len(files(finished))
        subprocess.run(["mount", "-o", "remount,size=20m", run], check=True)
        assert search(tiny_pair, run).code == OK
        assert files(run) == files(finished)
    finally:
        subprocess.run(["umount", run], check=True)


def test_no_memory_is_one_line(tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*arguments: object, **named: object) -> None:
        raise MemoryError

    monkeypatch.setattr(srh_stage, "_entry", exhausted)
    refused(search(tiny_pair, tmp_path / "run"), CAPACITY, "out of memory: lower the context")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("traces/inputs.json", "not readable as JSON"),
        ("traces/manifest.json", "not readable as JSON"),
        ("srh/draft/256-1.json", "not readable as JSON"),
        ("traces/00001.safetensors", "damaged ("),
    ],
)
def test_a_damaged_file_of_a_run_is_named(
    name: str, message: str, tiny_pair: TinyPair, tmp_path: Path, finished: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / name).write_bytes(b"\xff" * (run / name).stat().st_size)
    refused(search(tiny_pair, run), MISSING, f"{run / name}: {message}")
    if name.endswith("safetensors"):  # as its message says
        (run / name).unlink()
        assert search(tiny_pair, run).code == OK
        assert (run / name).read_bytes() == (finished / name).read_bytes()


def config(before: str, after: str) -> Callable[[str], str]:
    def apply(text: str) -> str:
        assert text.count(before) >= 1
        return text.replace(before, after, 1)

    return apply


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (config("budget: 64", "budgt: 64"), CONFIG, "selection.budgt: unknown key; did you mean 'budget'?"),
        (config("budget: 64", "budget: many"), CONFIG, "selection.budget: Input should be a valid integer"),
        (config("budget: 64", "budget: 20"), CONFIG, "selection: budget: 20 leaves no token to choose"),
        (config("  m: ", "  m: 9"), CONFIG, "selection: m: 9"),
        (config("history:\n    layer: ", "history:\n    layer: 9"), CONFIG, "selection.history.layer 9"),
        (config("lookahead:\n  - layer: ", "lookahead:\n  - layer: 9"), CONFIG, "selection.lookahead.layer 9"),
        (config("heads: [", "heads: [99, "), CONFIG, "selection.history.heads 99: tiny-target has query heads 0..5"),
        (config("schema_version: 1", "schema_version: 2\nnew: 1"), CONFIG, "schema_version 2 is not readable here"),
        (lambda text: "", CONFIG, "is empty"),
        (lambda text: text + "x: [", CONFIG, "not YAML ("),
        (lambda text: "\udcff\udcfe", MISSING, "not readable as text ("),
    ],
)
def test_invalid_configs(
    change: Callable[[str], str], code: int, message: str, tiny_pair: TinyPair, tmp_path: Path, finished: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(change((finished / "config.yaml").read_text()), errors="surrogateescape")
    baseline = ["--baseline", finished / "results.json"]
    for outcome in (
        dustin_run("generate", "Text.", "--config", path, *tiny_pair.options),
        dustin_profile("check", path, *baseline, *tiny_pair.options),
        dustin_profile("drift", path, *tiny_pair.options),
    ):
        assert (outcome.code, outcome.out) == (code, ""), outcome
        assert message in outcome.error
    assert dustin_run("generate", "Text.", "--config", tmp_path / "none.yaml").code == MISSING


def test_a_config_of_another_pair(tiny_pair: TinyPair, tmp_path: Path, finished: Path) -> None:
    other = ["--target", tiny_pair.target, "--draft", "self:2", "--offline"]
    baseline = ["--baseline", finished / "results.json"]
    for outcome in (
        dustin_run("generate", "Text.", "--config", finished, *other),
        dustin_profile("drift", finished, *other),
        dustin_profile("check", finished, *baseline, *other),
    ):
        refused(outcome, CONFIG, "pair.draft.layers: the config was made for tiny-draft with 3, self:2 has 2; load")
    path = tmp_path / "config.yaml"
    path.write_text(config("tokenizer: ", "tokenizer: 0")((finished / "config.yaml").read_text()))
    served = dustin_run("generate", "Text.", "--config", path, *tiny_pair.options)
    refused(served, CONFIG, "pair.tokenizer: the loaded tokenizer is not the one that the config was made with")
    checked = dustin_profile("check", path, *baseline, *tiny_pair.options)
    refused(checked, CONFLICT, "pair.tokenizer: the baseline has ")
    nowhere = dustin_run("generate", "Text.", "--config", finished, "--offline")
    assert nowhere.code == MISSING
    assert nowhere.error.endswith("say with --target and --draft where the config's models are")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], USAGE, "no prompt: give text as arguments, --file or --jsonl"),
        ([""], USAGE, "prompt 0: is empty; give at least one token of text"),
        (["--file", "none.txt"], MISSING, "none.txt: no such file"),
        (["--file", "binary.txt"], MISSING, "binary.txt: binary; give a text file"),
        (["--file", "empty.txt"], MISSING, "empty.txt: empty; give a text file"),
        (["--file", "."], MISSING, ".: cannot be read (Is a directory)"),
        (["--jsonl", "rows.jsonl"], MISSING, "rows.jsonl:2: not JSON ("),
        (["word " * 3000], CAPACITY, "prompt 0 with its output: "),
        (
            ["x", "--method", "dustn"],
            USAGE,
            "--method dustn: unknown (known: vanilla, sd, magicdec, triforce, dustin, ",
        ),
        (["x", "--method", "dustin"], USAGE, "--method dustin needs --config: emit one with dustin-profile search"),
        (["x", "--budget", "64"], USAGE, "--budget and --m change a config; give one with --config"),
        (["x", "--chat"], USAGE, "--chat: the tokenizer has no chat template"),
        (["x", "--pair", "smollm2"], USAGE, "give --pair, or --target and --draft, not both"),
        (["x", "--dtype", "int4"], USAGE, "--dtype int4: unknown"),
        (["x", "--device", "cuda:99"], CAPACITY, "--device cuda:99: "),
        (["x", "--rope", "yarn:x"], USAGE, "--rope yarn:x: give default, linear:FACTOR or yarn:FACTOR"),
    ],
)
def test_what_generate_refuses(
    options: list[str], code: int, message: str, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("binary.txt").write_bytes(b"a\0")
    Path("empty.txt").write_bytes(b"\n")
    Path("rows.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    refused(
        dustin_run("generate", *options, *tiny_pair.options[: -2 if "--device" in options else None]), code, message
    )
