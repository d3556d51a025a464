"""`dustin-profile drift` on the tiny pair: its figures, batches, resumption, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Outcome, dustin_profile
from tiny_pair import TinyPair

from dustin_profile.evaluation import drift_stage
from dustin_profile.evaluation.drift import FullVerification
from dustin_profile.rundir import locked
from dustin_runtime.config import load_config, save_config
from dustin_runtime.engine import Engine
from dustin_runtime.files import read_json

USAGE, CONFLICT, CAPACITY, MISSING, CONFIG, INTERRUPTED = 2, 4, 5, 6, 7, 130
SMALL = ("--context", 96, "--documents", 3, "--tokens", 12, "--bucket", 5)


def drift(pair: TinyPair, config: Path, run: Path, *options: object) -> Outcome:
    return dustin_profile("drift", config, *pair.options, "--run-dir", run, "--quiet", *SMALL, *options)


def document(outcome: Outcome) -> dict[str, Any]:
    assert outcome.code == 0, outcome.err
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def methods(*names: str) -> list[str]:
    return [option for name in names for option in ("--method", name)]


@pytest.mark.usefixtures("plain_pictures")
def test_what_reads_everything_does_not_drift(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    options = (*methods("sd", "dustin", "vanilla"), "--budget", 200, "--budget", 32, "--json")
    found = document(drift(tiny_pair, config, tmp_path, *options))
    assert found == read_json(tmp_path / "drift" / "results.json")
    assert list(found["summary"]) == ["sd", "dustin-k200", "dustin-k32", "vanilla"] == found["inputs"]["cells"]
    for name in ("sd", "vanilla", "dustin-k200"):
        cell = found["summary"][name]
        assert 0 <= cell["kl"]["mean"] < 1e-9
        assert cell["agreement"]["mean"] == 1
    sparse = found["summary"]["dustin-k32"]
    assert (sparse["method"], sparse["budget"], sparse["read"]) == ("dustin", 32, 32)
    assert sparse["kl"]["mean"] > 1e-3
    assert sparse["kl"]["low"] >= 0
    assert sparse["agreement"]["mean"] < 1
    assert [part["tokens"] for part in sparse["by_tokens"]] == [5, 10, 12]
    assert found["summary"]["vanilla"]["tau"] == 1
    assert found["summary"]["vanilla"]["read"] > 96
    assert found["summary"]["sd"]["tau"] >= 1


@pytest.mark.usefixtures("plain_pictures")
def test_means_are_over_tokens_and_then_over_documents(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    found = document(drift(tiny_pair, config, tmp_path, *methods("streaming"), "--json"))
    documents = [entry["cells"]["streaming-k64"] for entry in found["documents"]]
    assert [entry["prompt_tokens"] for entry in found["documents"]] == [96] * 3
    for one in documents:
        for name in ("kl", "agreement"):
            parts = one[name]
            assert one[f"mean_{name}"] == pytest.approx((5 * parts[0] + 5 * parts[1] + 2 * parts[2]) / 12)
    cell = found["summary"]["streaming-k64"]
    assert cell["kl"]["mean"] == pytest.approx(sum(one["mean_kl"] for one in documents) / 3)
    assert cell["kl"]["documents"] == 3
    for place, part in enumerate(cell["by_tokens"]):
        assert part["kl"] == pytest.approx(sum(one["kl"][place] for one in documents) / 3)
        assert part["agreement"] == pytest.approx(sum(one["agreement"][place] for one in documents) / 3)
    for name in ("tau", "read", "repeated"):
        assert cell[name] == pytest.approx(sum(one[name] for one in documents) / 3)


@pytest.mark.usefixtures("plain_pictures")
@pytest.mark.parametrize("temperature", [0, 1.2])
def test_a_batch_is_its_texts_one_by_one(tiny_pair: TinyPair, config: Path, tmp_path: Path, temperature: float) -> None:
    options = (*methods("dustin", "quest", "magicdec"), "--temperature", temperature, "--json")
    alone, batched = (
        document(drift(tiny_pair, config, tmp_path / str(batch), *options, "--batch", batch)) for batch in (1, 2)
    )
    assert (alone["inputs"].pop("batch"), batched["inputs"].pop("batch")) == (1, 2)
    assert batched["inputs"] == alone["inputs"]
    for one, other in zip(batched["documents"], alone["documents"], strict=True):
        assert one["id"] == other["id"]
        for name, cell in one["cells"].items():
            for figure, value in cell.items():
                assert value == pytest.approx(other["cells"][name][figure], abs=1e-6), (name, figure)


@pytest.mark.usefixtures("plain_pictures")
def test_seeds_draw_other_texts(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    def kl(name: str, *options: object) -> list[float]:
        found = document(drift(tiny_pair, config, tmp_path / name, *options, "--json"))
        return [entry["cells"]["dustin-k64"]["mean_kl"] for entry in found["documents"]]

    greedy = kl("greedy")
    one = kl("one", "--temperature", 1)
    assert kl("again", "--temperature", 1) == one
    # Prompt number n draws with seed + n, so that another seed moves every prompt's draw.
    for other in (greedy, kl("two", "--temperature", 1, "--seed", 7)):
        assert all(a != b for a, b in zip(one, other, strict=True))


@pytest.mark.usefixtures("plain_pictures")
def test_an_engine_serves_all_texts_of_a_cell(
    tiny_pair: TinyPair, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    original = Engine.generate

    def generate(self: Engine, prompts: list[list[int]], *arguments: Any, **named: Any) -> Any:
        calls.append(len(prompts))
        return original(self, prompts, *arguments, **named)

    monkeypatch.setattr(Engine, "generate", generate)
    assert drift(tiny_pair, config, tmp_path, *methods("sd", "dustin")).code == 0
    assert calls == [3, 3]
    # What is done is not done again, and a further method leaves it alone.
    monkeypatch.setattr(drift_stage, "stepper_of", None)
    assert drift(tiny_pair, config, tmp_path, *methods("dustin")).code == 0
    monkeypatch.undo()
    monkeypatch.setattr(Engine, "generate", generate)
    found = document(drift(tiny_pair, config, tmp_path, *methods("dustin", "streaming"), "--json"))
    assert calls == [3, 3, 3]
    assert list(found["summary"]) == ["dustin-k64", "streaming-k64"]


@pytest.mark.usefixtures("plain_pictures")
@pytest.mark.parametrize("batch", [1, 2])
def test_documents_that_are_done_are_not_measured_again(
    tiny_pair: TinyPair, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    options = (*methods("dustin", "snapkv-8"), "--batch", batch)
    whole = document(drift(tiny_pair, config, tmp_path / "whole", *options, "--json"))
    measured: list[int] = []
    original = FullVerification.drift

    def interrupt(self: FullVerification, index: int, *arguments: Any) -> Any:
        measured.append(index)
        if len(measured) in (2, 6):
            raise KeyboardInterrupt
        return original(self, index, *arguments)

    monkeypatch.setattr(FullVerification, "drift", interrupt)
    for cell in ("dustin-k64", "snapkv-8-k64"):
        ended = drift(tiny_pair, config, tmp_path / "run", *options)
        assert (ended.code, ended.out) == (INTERRUPTED, "")
        assert ended.error.startswith(f"interrupted; 1 of 3 documents of {cell} were done and are kept: run the same")
    found = document(drift(tiny_pair, config, tmp_path / "run", *options, "--json"))
    assert len(measured) == 6 + 2
    for one, other in zip(found["documents"], whole["documents"], strict=True):
        for name, cell in one["cells"].items():
            for figure, value in cell.items():
                assert value == pytest.approx(other["cells"][name][figure], abs=1e-6), (name, figure)


def test_ctrl_c_between_steps_ends_it(
    tiny_pair: TinyPair, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine delivers what it has; half a text is no measurement."""

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupt)
    ended = drift(tiny_pair, config, tmp_path)
    assert (ended.code, ended.out) == (INTERRUPTED, "")
    assert ended.error.startswith("interrupted; 0 of 3 documents of dustin-k64 were done")
    assert not (tmp_path / "drift" / "results.json").exists()


def test_the_table_stands_by_budget_and_best_first(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    options = (*methods("streaming", "dustin", "sd"), "--budget", 32, "--budget", 64)
    shown = drift(tiny_pair, config, tmp_path, *options, "--plot", tmp_path / "curves.png")
    assert shown.code == 0, shown.err
    folder = tmp_path / "drift"
    summary = read_json(folder / "results.json")["summary"]
    names = [line.split()[0] for line in shown.out.splitlines()[2:-1]]
    best = [sorted((f"streaming-k{k}", f"dustin-k{k}"), key=lambda name: summary[name]["kl"]["mean"]) for k in (64, 32)]
    assert names == ["sd", *best[0], *best[1]]
    assert shown.out.splitlines()[-1] == "  ".join(str(folder / f"results.{kind}") for kind in ("json", "md", "png"))
    text = (folder / "results.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Full verification",
        "## k = 64",
        "## k = 32",
    ]
    assert "3 prompts of up to 96 tokens, 12 generated behind each, 1 at a time, greedy" in text
    part = summary["dustin-k32"]["by_tokens"][1]
    assert f"{part['kl']:.4f} ({part['agreement']:.2f})" in text
    assert (folder / "results.png").read_bytes()[1:4] == b"PNG"
    assert (tmp_path / "curves.png").read_bytes() == (folder / "results.png").read_bytes()
    assert str(tmp_path) not in text + json.dumps(read_json(folder / "results.json"))


@pytest.mark.usefixtures("plain_pictures")
def test_other_inputs_are_refused_by_field(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    assert drift(tiny_pair, config, tmp_path).code == 0
    for options, message in (
        (("--tokens", 13), "tokens = 12, now 13"),
        (("--temperature", 1), "temperature = 0.0, now 1.0"),
        (("--seed", 1), "seed = 0, now 1"),
        (("--batch", 2), "batch = 1, now 2"),
        (("--bucket", 6), "bucket = 5, now 6"),
        (("--context", 90), "data_sha256 = "),
    ):
        other = drift(tiny_pair, config, tmp_path, *options)
        assert (other.code, other.out) == (CONFLICT, "")
        assert f"drift: made with {message}" in other.error
    assert drift(tiny_pair, config, tmp_path, "--tokens", 13, "--overwrite").code == 0
    with locked(tmp_path):
        busy = drift(tiny_pair, config, tmp_path)
    assert busy.code == CONFLICT and "another dustin-profile is working in it" in busy.error


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--method", "eagle"], USAGE, "--method eagle: unknown"),
        (["--budget", 5], USAGE, "--budget: "),
        (["--temperature", -0.5], USAGE, "--temperature -0.5: give 0, which is greedy, or more"),
        (["--temperature", "nan"], USAGE, "--temperature nan: give 0"),
        (["--context", 4090], CAPACITY, "--context with --tokens: 4102 tokens exceed the model's context of 4096"),
        (["--context", 9000], CAPACITY, "--context with --tokens: 9012 tokens exceed the model's context of 4096"),
        (["--data", "nowhere.txt"], MISSING, "nowhere.txt: no such file"),
    ],
)
def test_bad_options(
    options: list[object], code: int, message: str, tiny_pair: TinyPair, config: Path, tmp_path: Path
) -> None:
    refused = drift(tiny_pair, config, tmp_path / "run", *options)
    assert (refused.code, refused.out) == (code, "")
    assert refused.error.startswith(message)
    assert not (tmp_path / "run" / "drift").exists()


def test_a_method_that_the_config_cannot_serve_is_refused(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    served = load_config(config)
    bare = served.selection.model_copy(update={"retrieval_heads": ()})
    save_config(served.model_copy(update={"selection": bare}), tmp_path / "old.yaml")
    refused = drift(tiny_pair, tmp_path / "old.yaml", tmp_path / "run", *methods("compresskv"))
    assert refused.code == CONFIG
    assert refused.error.startswith("--method compresskv needs selection.retrieval_heads")


@pytest.mark.usefixtures("plain_pictures")
def test_a_damaged_result_is_named(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    assert drift(tiny_pair, config, tmp_path).code == 0
    rows = tmp_path / "drift" / "rows" / "dustin-k64.jsonl"
    whole = rows.read_text()
    first = json.loads(whole.splitlines()[0])
    del first["tau"]
    rows.write_text(json.dumps(first) + "\n")
    broken = drift(tiny_pair, config, tmp_path)
    assert broken.code == MISSING
    assert broken.error.endswith(f"{first['id']} has no tau; delete the file to measure its documents again")
    rows.write_text(whole[:-20])  # killed while it wrote
    assert drift(tiny_pair, config, tmp_path).code == 0
    assert len(rows.read_text().splitlines()) == 3


@pytest.mark.usefixtures("plain_pictures")
def test_every_method_is_measured(tiny_pair: TinyPair, config: Path, tmp_path: Path) -> None:
    from dustin_runtime.method_names import FULL, METHODS

    found = document(drift(tiny_pair, config, tmp_path, *methods(*METHODS), "--budget", 32, "--batch", 3, "--json"))
    assert len(found["summary"]) == len(METHODS)
    for cell in found["summary"].values():
        assert cell["kl"]["mean"] < 1e-9 if cell["method"] in FULL else cell["kl"]["mean"] > 1e-9, cell["method"]
