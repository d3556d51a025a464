"""A run that is killed and continued gives the weights of one that was not; the scripts from text to figures."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tiny_pair import TinyPair

from dustin_profile.encoder import PlainEncoder
from dustin_profile.texts import topics
from dustin_runtime.errors import ConflictError, MissingError, NothingMeasuredError, RegressionError, UsageError
from dustin_runtime.files import read_json, write_json
from dustin_runtime.models.tokenizer import load_tokenizer, tokenizer_hash
from recipes.smollm2_135m import continuations, curve, evaluate, prepare, settings, train, trainer
from recipes.smollm2_135m.curve import draw_curve
from recipes.smollm2_135m.data import MANIFEST, write_tokens
from recipes.smollm2_135m.texts import Text

SIZES = ["--steps", "12", "--tokens-per-step", "128", "--warmup", "2", "--lengths", "0:16,64;0.5:32"]
KEPT = ["--checkpoint-every", "4", "--evaluate-every", "4", "--log-every", "1", "--evaluate-count", "2"]


@pytest.fixture(scope="module")
def data(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of one source, without the time that reading all Python code takes."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer = load_tokenizer(tiny_pair.target)
    tokens = np.asarray(PlainEncoder(tokenizer)(topics()[:40_000]), np.uint32)
    splits = {"train": tokens[1000:], "heldout": tokens[:1000]}
    entry = {split: write_tokens(folder, "books", split, found) for split, found in splits.items()}
    manifest = {"kind": "dustin-draft-data", "tokenizer": tokenizer_hash(tokenizer), "separator": 1}
    write_json(folder / MANIFEST, manifest | {"sources": {"books": entry}})
    return folder


@pytest.fixture
def run(tiny_pair: TinyPair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Run `train` in a folder of that name; options given later win. Pictures are drawn in one test alone."""

    def start(name: str, *options: object) -> Path:
        monkeypatch.setattr(curve, "draw_curve", lambda path, found: path.write_bytes(b"PNG"))
        fixed = ["--data", data, "--target", tiny_pair.target, "--layers", "0,3", "--shares", "books=1"]
        line = [tmp_path / name, *fixed, *SIZES, *KEPT, "--device", "cpu", "--rate", "3e-3", *options]
        train.main(settings.parser().parse_args([str(part) for part in line]))
        return tmp_path / name

    return start


def weights(folder: Path) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in load_file(folder / "checkpoint.safetensors").items()}


def figures(folder: Path) -> dict[str, Any]:
    found = read_json(folder / "curve.json")
    assert [entry["step"] for entry in found["train"]] == sorted({entry["step"] for entry in found["train"]})
    return {name: found[name] for name in ("train", "heldout", "settings")}


def same(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)
    assert figures(one) == figures(other)
    assert (one / "draft" / "model.safetensors").read_bytes() == (other / "draft" / "model.safetensors").read_bytes()


def test_it_learns_and_resumes_bit_for_bit(run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run("whole")
    held_out = read_json(whole / "curve.json")["heldout"]
    assert [entry["step"] for entry in held_out] == [0, 4, 8, 12]
    assert held_out[-1]["sources"]["books"]["kl"] < held_out[0]["sources"]["books"]["kl"] - 0.05

    run("parts", "--stop-at", 5)  # stopped cleanly between two checkpoints
    advance = trainer.Trainer.advance

    def killed(self: trainer.Trainer) -> dict[str, float]:
        if self.step == 10:
            self.curve["train"].append({"step": 99})
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(trainer.Trainer, "advance", killed)
    with pytest.raises(KeyboardInterrupt):
        run("parts")
    monkeypatch.undo()
    assert read_json(run("parts") / "final.json")["step"] == 12
    same(whole, whole.parent / "parts")


def test_a_curve_is_drawn(run: Callable[..., Path]) -> None:
    folder = run("drawn", "--stop-at", 4)
    draw_curve(folder / "curve.png", read_json(folder / "curve.json"))
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_micro_batches_and_recomputation_change_rounding_alone(run: Callable[..., Path]) -> None:
    whole = run("a", "--stop-at", 3)
    parts = run("b", "--stop-at", 3, "--micro-tokens", 64, "--chunk", 10, "--recompute")
    for name, tensor in weights(whole).items():
        if name.startswith("model"):
            assert np.allclose(tensor, weights(parts)[name], rtol=1e-3, atol=1e-4)


def test_a_short_run_reproduces_the_start_of_a_long_one(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    reference = run("long", "--stop-at", 6) / "curve.json"
    run("short", "--stop-at", 3, "--reference", reference)
    assert "3 recorded steps in common" in capsys.readouterr().out
    changed = read_json(reference)
    changed["train"][1]["kl"] *= 1.1
    write_json(reference, changed)
    with pytest.raises(RegressionError, match="losses differ by 9"):
        run("short", "--stop-at", 3, "--reference", reference)
    with pytest.raises(ConflictError, match=r"settings\.rate"):
        run("other", "--stop-at", 3, "--reference", reference, "--rate", "1e-3")


def test_other_settings_do_not_continue_a_run(run: Callable[..., Path]) -> None:
    folder = run("one", "--stop-at", 1)
    with pytest.raises(ConflictError, match=r"settings\.seed was 0, now it is 1"):
        run("one", "--seed", 1)
    (folder / "checkpoint.safetensors").write_bytes(b"damaged")
    with pytest.raises(MissingError, match="not a checkpoint"):
        run("one")


def test_a_time_limit_stops_exports_and_is_continued(run: Callable[..., Path]) -> None:
    folder = run("limited", "--time-limit", 0.001)
    assert read_json(folder / "final.json")["step"] == 0
    assert (folder / "draft" / "model.safetensors").exists()
    shortened = run("limited", "--end-at", 4)
    assert read_json(shortened / "final.json")["step"] == 4
    assert read_json(shortened / "curve.json")["ending"] == [0, 4]
    assert read_json(run("limited") / "final.json")["step"] == 4  # remembered


def test_gradients_that_are_not_finite_are_left_out_then_given_up(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(float("nan")))
    with pytest.raises(NothingMeasuredError, match="3 gradients in a row"):
        run("nan")


def test_settings_that_cannot_be_run(run: Callable[..., Path], tmp_path: Path) -> None:
    for options, said in (
        (["--tokens-per-step", "100"], "multiple of the longest sequence, 64"),
        (["--layers", "a"], "--layers a"),
        (["--chunk", "0"], "--chunk 0"),
        (["--dtype", "float64"], "--dtype float64"),
        (["--shares", "books=1,own=1"], "has no own"),
    ):
        with pytest.raises(UsageError, match=said):
            run("bad", *options)
    assert not (tmp_path / "bad").exists()


def test_price_and_benchmark_write_nothing(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run("dry", "--dry-run")
    priced = {entry["device"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert priced["h200"]["tokens"] == 12 * 128
    assert priced["h200"]["seconds"] < priced["cpu"]["seconds"]
    run("dry", "--benchmark", "--time-limit", 60)
    timed = json.loads(capsys.readouterr().out)
    assert timed["tokens_per_second"].keys() == {"16", "32", "64"}
    assert timed["steps_in_limit"] > 0
    assert not (tmp_path / "dry").exists()


def test_from_text_to_figures(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Path]
) -> None:
    """Every script once, in the order of the README; none needs Optuna."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    half = topics()[100_000:160_000]
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text(half[:40_000])
    shutil.copytree(tmp_path / "books", tmp_path / "held")
    made = [Text(f"m{index}.py", half[1000 * index : 1000 * index + 3000]) for index in range(40)]
    monkeypatch.setattr(prepare, "code", lambda: iter(made))
    monkeypatch.setattr(prepare, "documentation", lambda: iter(made))
    made_data, target = tmp_path / "made", str(tiny_pair.target)
    line = [made_data, "--target", target, "--books", tmp_path / "books", "--held-out-books", tmp_path / "held"]
    prepare.main(prepare.parser().parse_args([str(part) for part in line]))
    manifest = read_json(made_data / MANIFEST)
    assert all(manifest["sources"][name][split] for name in ("books", "code", "docs") for split in ("train", "heldout"))
    assert manifest["sources"]["books"]["texts"]["train"]["names"].keys() == {"a.txt"}
    assert not any(half[:200] in path.read_text(errors="ignore") for path in made_data.glob("*.json"))

    line = [made_data, "--target", target, "--groups", "20+12:1,40+24:1", "--tokens", 150, "--held-out-tokens", 40]
    line += ["--rows", 3, "--device", "cpu", "--shares", "books=1,code=1"]
    arguments = continuations.parser().parse_args([str(part) for part in line])
    continuations.main(arguments)
    first = read_json(made_data / MANIFEST)["sources"]["own"]
    kept = sorted((made_data / "own-parts").glob("train-*"))
    assert len(kept) == 5 and first["train"][0]["tokens"] > 150
    kept[-1].unlink()
    continuations.main(arguments)
    assert read_json(made_data / MANIFEST)["sources"]["own"] == first

    folder = run("trained", "--data", made_data, "--shares", "books=2,own=1", "--stop-at", 4)
    sources = read_json(folder / "curve.json")["heldout"][-1]["sources"]
    assert sources.keys() == {"books", "code", "docs", "own"}

    out = tmp_path / "figures"
    line = [out, "--target", target, "--draft", folder / "draft", "--draft", "self:2", "--books", tmp_path / "held"]
    line += ["--contexts", "128,256", "--depths", "2", "--prompts", 3, "--new-tokens", 12, "--device", "cpu"]
    line += ["--budget", 64, "--arr-documents", 4, "--needle-lengths", 256, "--needles", 2, "--timing-context", 128]
    arguments = evaluate.parser().parse_args([str(part) for part in line])
    evaluate.main(arguments)
    results = read_json(out / "results.json")
    assert [len(results[part]) for part in evaluate.PARTS] == [4, 4, 2]
    for row in results["acceptance"]:
        assert row["tau"] == pytest.approx(1 + sum(row["accepted"]))
        assert row["interval"]["mean"] == pytest.approx(sum(row["tau_by_prompt"]) / row["prompts"], abs=1e-3)
    assert "| self:2 | books | 256 |" in (out / "results.md").read_text()
    shutil.rmtree(out / "arr")
    evaluate.main(arguments)  # every figure is there
    assert read_json(out / "results.json") == results
    with pytest.raises(ConflictError, match=r"inputs\.prompts"):
        evaluate.main(evaluate.parser().parse_args([str(part) for part in [*line, "--prompts", 2]]))
