"""`dustin-run generate` on two tiny models: how tokens are drawn, rows and queue, what is printed when, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Outcome, dustin_run
from tiny_pair import TinyPair

import dustin_runtime.attention.window
from dustin_runtime.config import (
    AdaptiveBudget,
    DustinConfig,
    Estimate,
    Guard,
    LayerHeads,
    Selection,
    save_config,
)
from dustin_runtime.engine import Engine
from dustin_runtime.loading import open_pair

PROMPTS = ["The assert statement is convenient.", "x", "One prompt that is longer than the others. " * 4, "A list"]
OK, USAGE, CAPACITY, MISSING, CONFIG, INTERRUPTED = 0, 2, 5, 6, 7, 130
BUDGET = 24


def generate(pair: TinyPair, *options: object, prompts: list[str] = PROMPTS, new: int = 12) -> Outcome:
    return dustin_run("generate", *prompts, *pair.options, "--max-new-tokens", new, "--ignore-eos", *options)


def document(outcome: Outcome) -> dict[str, Any]:
    """The JSON document, which is all of stdout."""
    assert outcome.code == OK, outcome.err
    assert outcome.err == ""
    assert outcome.out.endswith("\n") and outcome.out.count("\n") == 1
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def tokens(outcome: Outcome) -> list[list[int]]:
    return [row["tokens"] for row in document(outcome)["rows"]]


@pytest.fixture(scope="module")
def greedy(tiny_pair: TinyPair) -> list[list[int]]:
    """The target's own texts."""
    return tokens(generate(tiny_pair, "--method", "vanilla", "--json"))


@pytest.fixture
def config(tiny_pair: TinyPair) -> DustinConfig:
    opened = open_pair(str(tiny_pair.target), str(tiny_pair.draft), offline=True)
    selection = Selection(
        budget=BUDGET,
        sink=4,
        window=8,
        m=6,
        history=LayerHeads(layer=2, heads=(0, 5)),
        lookahead=(LayerHeads(layer=1, heads=(0, 3)),),
    )
    return DustinConfig(pair=opened.identity(), depth=3, selection=selection)


@pytest.mark.parametrize(
    "options", [["--batch", 1], ["--batch", 3], ["--batch", 99], ["--eager", "--device", "cpu:0"], ["--depth", 1]]
)
@pytest.mark.parametrize("method", ["vanilla", "sd", "magicdec"])
def test_greedy_text_is_the_targets_whatever_the_rows(
    method: str, options: list[object], tiny_pair: TinyPair, greedy: list[list[int]]
) -> None:
    assert tokens(generate(tiny_pair, "--method", method, *options, "--json")) == greedy


def test_the_document_has_the_fields_that_scripts_read(tiny_pair: TinyPair) -> None:
    found = document(generate(tiny_pair, "--compare", "vanilla", "--batch", 2, "--json"))
    assert list(found) == ["kind", "method", "kv_dtype", "rows", "statistics", "compare"]
    assert (found["kind"], found["method"]) == ("dustin-generation", "sd")
    for row in found["rows"]:
        assert list(row) == ["text", "tokens", "finished", "prompt_tokens"]
        assert (len(row["tokens"]), row["finished"]) == (12, "length")
    figures = {"tokens", "steps", "tokens_per_s", "tau", "acceptance_per_position", "kept_tokens_per_step"}
    assert found["statistics"].keys() == figures | {"setup_s", "prefill_s", "decode_s"}
    agreement = {"rows": 4, "equal_rows": 4, "common_prefix": 1, "equal_tokens": 1}
    assert found["compare"].keys() == agreement.keys() | {"method", "statistics"}
    assert found["compare"] | agreement == found["compare"]


def test_seeds_repeat_and_differ_and_belong_to_prompts(tiny_pair: TinyPair) -> None:
    drawn = ["--temperature", 1.2, "--top-p", 0.9, "--json"]
    same = ["A list"] * 3
    first = tokens(generate(tiny_pair, *drawn, "--seed", 7, prompts=same))
    assert len({tuple(row) for row in first}) == 3
    assert tokens(generate(tiny_pair, *drawn, "--seed", 7, "--batch", 1, prompts=same)) == first
    assert tokens(generate(tiny_pair, *drawn, "--seed", 8, prompts=same[:2])) == first[1:]
    assert tokens(generate(tiny_pair, *drawn, prompts=same)) == tokens(
        generate(tiny_pair, *drawn, "--seed", 0, prompts=same)
    )
    largest = tokens(generate(tiny_pair, *drawn, "--seed", 2**62, prompts=same))
    assert len({tuple(row) for row in largest}) == 3


def test_temperature_and_top_p_narrow_what_is_drawn(tiny_pair: TinyPair, greedy: list[list[int]]) -> None:
    for options in (["--temperature", 0], ["--temperature", 1e-30], ["--temperature", 1, "--top-p", 1e-6]):
        assert tokens(generate(tiny_pair, *options, "--json")) == greedy
    hot = tokens(generate(tiny_pair, "--temperature", 1e9, "--json"))
    assert all(len(row) == 12 for row in hot)
    assert hot != greedy
    assert tokens(generate(tiny_pair, "--temperature", 1e9, "--method", "vanilla", "--json")) != greedy


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--temperature nan", USAGE, "--temperature nan: give 0, which is greedy, or more, up to 1e9"),
        ("--temperature inf", USAGE, "--temperature inf: give 0"),
        ("--temperature -1", USAGE, "--temperature -1.0: give 0"),
        ("--temperature 1e300", USAGE, "--temperature 1e+300: give 0"),
        ("--temperature 1 --top-p 0", USAGE, "--top-p 0.0: give more than 0 and at most 1"),
        ("--temperature 1 --top-p 1.5", USAGE, "--top-p 1.5: give more than 0 and at most 1"),
        ("--temperature 1 --top-p nan", USAGE, "--top-p nan: give more than 0 and at most 1"),
        ("--top-p 0.9", USAGE, "--top-p 0.9: greedy decoding draws nothing; give a --temperature above 0"),
        ("--stop=", USAGE, "--stop: is empty; give the text to end at"),
        ("--method magicdec --draft-budget 99999", USAGE, "draft budget: 99999 tokens exceed the model's context of "),
        ("--method triforce --draft-budget 99999", USAGE, "draft budget: 99999 tokens exceed the model's context of "),
        ("--method magic", USAGE, "--method magic: unknown (known: vanilla, sd, magicdec, triforce, dustin, "),
        ("--compare magic", USAGE, "--compare magic: unknown (known: vanilla, sd, magicdec, triforce, dustin, "),
        ("--compare dustin", USAGE, "--compare dustin needs --config: emit one with dustin-profile search"),
        ("--max-new-tokens 5000", CAPACITY, "prompt 0 with its output: 50"),
        ("--prompt-tokens 3 --max-new-tokens 4094", CAPACITY, "prompt 0 with its output: 4097 tokens exceed the"),
        ("--jsonl half.jsonl", MISSING, "half.jsonl:1: 'prompt' holds half a surrogate pair, which is no text"),
        ("--jsonl deep.jsonl", MISSING, "deep.jsonl:1: not JSON (maximum recursion depth exceeded"),
        ("--jsonl long.jsonl", MISSING, "long.jsonl:1: not JSON (Exceeds the limit"),
        ("\udcff\udcfe", USAGE, "prompt 4: is not UTF-8 text"),
    ],
)
def test_what_is_refused_before_weights_are_read(
    options: str, code: int, message: str, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dustin_runtime.models.weights.load_decoder", None)
    Path("half.jsonl").write_text('{"prompt": "a \\ud800"}')
    Path("deep.jsonl").write_text('{"prompt": ' + "[" * 100_000)
    Path("long.jsonl").write_text('{"prompt": ' + "1" * 10_000 + "}")
    refused = generate(tiny_pair, *options.split())
    assert (refused.code, refused.out) == (code, ""), refused
    assert refused.err == f"error: {refused.error}\n"
    assert refused.error.startswith(message), refused.error


@pytest.mark.parametrize("options", ["--seed -1", "--seed 9223372036854775808", "--batch 0", "--draft-budget 7"])
def test_numbers_out_of_range_are_refused(options: str, tiny_pair: TinyPair) -> None:
    refused = generate(tiny_pair, *options.split())
    assert (refused.code, refused.out) == (USAGE, "")
    assert options.split()[0] in refused.err
    assert "Traceback" not in refused.err


class DraftReads:
    """The sizes of the lists that drafts read, of every draft step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: set[int] = set()
        first_and_last = dustin_runtime.attention.window.first_and_last

        def see(lengths: Any, budget: int, sink: int) -> Any:
            kept = first_and_last(lengths, budget, sink)
            self.sizes.add(kept.shape[-1])
            return kept

        monkeypatch.setattr(dustin_runtime.attention.window, "first_and_last", see)

    def __call__(self) -> set[int]:
        found, self.sizes = self.sizes, set()
        return found


def test_a_windowed_draft_reads_as_many_tokens_as_it_is_told(
    tiny_pair: TinyPair, config: DustinConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, window = DraftReads(monkeypatch), config.model_copy(update={"draft_cache": "sink+window"})
    save_config(config, tmp_path / "full.yaml")
    save_config(window, tmp_path / "window.yaml")
    assert "draft_cache: sink+window" in (tmp_path / "window.yaml").read_text()
    full = document(generate(tiny_pair, "--config", tmp_path / "full.yaml", "--json"))
    assert (full["method"], full["budget"], reads()) == ("dustin", BUDGET, set())
    windowed = ["--config", tmp_path / "window.yaml", "--json"]
    found = document(generate(tiny_pair, *windowed))
    assert found["budget"] == BUDGET
    assert found["statistics"]["kept_tokens_per_step"] <= BUDGET
    assert len(found["statistics"]["acceptance_per_position"]) == 3
    assert reads() == {BUDGET}
    document(generate(tiny_pair, *windowed, "--budget", 30))
    assert reads() == {30}
    document(generate(tiny_pair, *windowed, "--draft-budget", 9))
    assert reads() == {9}
    document(generate(tiny_pair, *windowed, "--method", "magicdec"))
    assert reads() == {512}
    document(generate(tiny_pair, "--method", "magicdec", "--draft-budget", 8, "--json"))
    assert reads() == {8}
    document(generate(tiny_pair, "--method", "vanilla", "--draft-budget", 8, "--json"))
    assert reads() == set()


def with_guard(config: DustinConfig) -> DustinConfig:
    estimate = Estimate(intercept=0.1, history=0.4, lookahead=0.4, rms=0.02, overestimate=0.03)
    guard = Guard(budget=BUDGET, estimate=estimate, sizes=(24, 128), across=estimate, documents=3, errors_of="held_out")
    return config.model_copy(update={"guard": guard})


def test_a_guard_verifies_in_full_and_says_how_often(
    tiny_pair: TinyPair, config: DustinConfig, tmp_path: Path, greedy: list[list[int]]
) -> None:
    save_config(with_guard(config), tmp_path / "config.yaml")
    served = ["--config", tmp_path / "config.yaml"]
    for always in (["--guard", 1], ["--full-every", 1]):
        found = document(generate(tiny_pair, *served, *always, "--json"))
        assert [row["tokens"] for row in found["rows"]] == greedy
        assert found["statistics"]["full_steps_share"] == 1
    plain = document(generate(tiny_pair, *served, "--json"))
    assert "full_steps_share" not in plain["statistics"]
    none = document(generate(tiny_pair, *served, "--guard", 0, "--json"))
    assert [row["tokens"] for row in none["rows"]] == [row["tokens"] for row in plain["rows"]]
    assert "full_steps_share" not in none["statistics"]
    some = generate(tiny_pair, *served, "--full-every", 2, "--compare", "vanilla")
    assert re.search(r"dustin: .* prefix tokens read per step, [1-5]\d\.\d% of steps verified in full\n", some.err)
    assert re.search(r"vanilla: .* prefix tokens read per step\n", some.err)
    for target, size in ((1e-6, 24), (1, 128)):  # of those that the estimate was fitted at
        reached = document(generate(tiny_pair, *served, "--target-arr", target, "--json"))
        fixed = document(generate(tiny_pair, *served, "--budget", size, "--json"))
        assert reached["statistics"]["kept_tokens_per_step"] == pytest.approx(
            fixed["statistics"]["kept_tokens_per_step"]
        )
        assert reached["rule"] == f"arr{target:g}" and "rule" not in fixed


def test_a_budget_in_the_config_that_adapts_gives_way_to_one_that_is_asked_for(
    tiny_pair: TinyPair, config: DustinConfig, tmp_path: Path
) -> None:
    adaptive = with_guard(config).model_copy(update={"adaptive_budget": AdaptiveBudget(target_arr=1.0, sizes=(24, 32))})
    save_config(adaptive, tmp_path / "config.yaml")
    served = ["--config", tmp_path / "config.yaml", "--json"]
    found = [
        document(generate(tiny_pair, *served, *options))["statistics"]["kept_tokens_per_step"]
        for options in ([], ["--budget", 32], ["--target-arr", 1e-6], ["--budget", 24])
    ]
    assert found[0] == pytest.approx(found[1])  # the largest
    assert found[2] == pytest.approx(found[3])  # the smallest


def test_a_guard_and_budgets_that_the_options_do_not_go_with_are_said(
    tiny_pair: TinyPair, config: DustinConfig, tmp_path: Path
) -> None:
    adaptive = with_guard(config).model_copy(update={"adaptive_budget": AdaptiveBudget(target_arr=1.0, sizes=(24, 32))})
    save_config(adaptive, tmp_path / "config.yaml")
    served = ["--config", tmp_path / "config.yaml", "--max-new-tokens", 2]
    found = generate(tiny_pair, *served, "--depth", 2, "--draft-budget", 9, "--compare", "dustin-merged", prompts=["A"])
    said = [line for line in found.err.splitlines() if line.startswith("warning: ")]
    assert [line.split(": ")[1] for line in said] == ["guard.depth", "guard.draft_cache", "adaptive_budget"]
    assert "warning: " not in generate(tiny_pair, *served, "--budget", 24, "--depth", 2, prompts=["A"]).err


def test_audits_report_the_divergence_and_warn(tiny_pair: TinyPair, config: DustinConfig, tmp_path: Path) -> None:
    save_config(config, tmp_path / "config.yaml")
    served = ["--config", tmp_path / "config.yaml"]
    long = [PROMPTS[2] * 3, PROMPTS[2] * 2, "It is a list of names. " * 8, "Some statements are short. " * 9]
    plain = document(generate(tiny_pair, *served, "--json", prompts=long))
    found = generate(tiny_pair, *served, "--audit-share", 1, "--max-divergence", 0, "--json", prompts=long)
    audited = json.loads(found.out)
    assert [row["tokens"] for row in audited["rows"]] == [row["tokens"] for row in plain["rows"]]
    measured = audited["statistics"]["divergence"]
    assert measured.keys() == {"mean", "low", "high", "audits", "tokens", "unit"}
    assert measured["unit"] == "prompt" and measured["low"] <= measured["mean"] <= measured["high"]
    assert measured["audits"] == audited["statistics"]["steps"]
    warned = "above --max-divergence 0: give --guard, or raise it, or a larger --budget" in found.err
    assert warned == (measured["low"] > 0)
    assert found.err.count("dustin-run:") == warned
    quiet = generate(tiny_pair, *served, "--audit-share", 1, "--max-divergence", 1000, prompts=long)
    assert re.search(r"KL \d+\.\d+ \[\d+\.\d+, \d+\.\d+\] nats from full verification", quiet.err)
    assert "dustin-run:" not in quiet.err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--max-divergence", -1], USAGE, "--max-divergence -1.0: give 0 nats or more"),
        (["--audit-share", 2], USAGE, "--audit-share 2.0: give 0 to 1"),
        (["--audit-share", 0, "--max-divergence", 1], USAGE, "--max-divergence needs audited steps"),
        (["--max-divergence", 1, "--method", "sd"], USAGE, "--max-divergence: method sd verifies in full"),
        (["--guard", 0.5], CONFIG, "--guard needs guard, which the config lacks"),
        (["--target-arr", 0.5], CONFIG, "--target-arr needs guard"),
        (["--guard", 1.5], USAGE, "--guard 1.5: give 0, which is off, to 1"),
        (["--guard", 0.5, "--method", "vanilla"], USAGE, "--guard: method vanilla cannot; give one of dustin"),
        (["--full-every", 0], USAGE, "--full-every"),
        (["--target-arr", 0.5, "--budget", 24], USAGE, "--budget 24: --target-arr chooses the budget at every step"),
    ],
)
def test_guards_that_cannot_be_are_refused(
    options: list[object], code: int, message: str, tiny_pair: TinyPair, config: DustinConfig, tmp_path: Path
) -> None:
    save_config(config, tmp_path / "config.yaml")
    refused = generate(tiny_pair, "--config", tmp_path / "config.yaml", *options)
    assert (refused.code, refused.out) == (code, "")
    assert message in refused.err


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("heads: [0, 5]", "heads: [0, 6]", "selection.history.heads 6: tiny-target has query heads 0..5"),
        ("heads: [0, 3]", "heads: [0, 4]", "selection.lookahead.heads 4: tiny-draft has query heads 0..3"),
        ("layer: 2", "layer: 4", "selection.history.layer 4: tiny-target has layers 0..3"),
        ("draft_cache: full", "draft_cache: window", "draft_cache: Input should be 'full' or 'sink+window'"),
        ("query_heads: 6", "query_heads: 8", "pair.target.query_heads: the config was made for tiny-target with 8, "),
        ("layers: 3", "layers: 5", "pair.draft.layers: the config was made for tiny-draft with 5, tiny-draft has 3"),
    ],
)
def test_heads_that_the_models_do_not_have_are_refused_by_field(
    before: str, after: str, message: str, tiny_pair: TinyPair, config: DustinConfig, tmp_path: Path
) -> None:
    """The last two: heads that fit the models of the config, but not the loaded ones."""
    save_config(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert before in text
    (tmp_path / "config.yaml").write_text(text.replace(before, after, 1))
    refused = generate(tiny_pair, "--config", tmp_path / "config.yaml")
    assert (refused.code, refused.out) == (CONFIG, "")
    assert message in refused.error


class Watched(io.StringIO):
    """stdout that notes how many steps had been taken when text arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.at: list[tuple[int, str]] = []

    def write(self, text: str) -> int:
        self.at.append((self.steps, text))
        return super().write(text)


def test_texts_are_printed_as_they_end_and_one_is_streamed(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [row["text"] for row in document(generate(tiny_pair, "--json"))["rows"]]
    watched, step = Watched(), Engine.step

    def stepped(engine: Engine, state: Any) -> Any:
        watched.steps += 1
        return step(engine, state)

    monkeypatch.setattr(Engine, "step", stepped)
    monkeypatch.setattr("commands.io.StringIO", lambda: watched)
    generate(tiny_pair, "--batch", 1, "--method", "vanilla")
    printed = {text: at for at, text in watched.at}
    assert [printed[f"[{row}] {text}\n"] for row, text in enumerate(texts)] == [11, 22, 33, 44]
    watched = Watched()
    generate(tiny_pair, "--method", "vanilla", prompts=PROMPTS[:1])
    pieces = [(at, text) for at, text in watched.at if at and text in texts[0]]
    assert len({at for at, _ in pieces}) > 5
    assert texts[0] in watched.getvalue()


def test_a_row_that_ends_early_is_printed_first(tiny_pair: TinyPair) -> None:
    texts = [row["text"] for row in document(generate(tiny_pair, "--json"))["rows"]]
    stop = next(text for end in range(2, len(texts[1])) if (text := texts[1][end - 2 : end]) not in texts[0])
    shown = generate(tiny_pair, "--stop", stop, "--method", "vanilla", prompts=PROMPTS[:2])
    assert shown.out == f"[1] {texts[1][: texts[1].index(stop)]}\n[0] {texts[0]}\n"


def interrupt_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C in the step after so many."""
    step, left = Engine.step, [steps]

    def stepped(engine: Engine, state: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return step(engine, state)

    monkeypatch.setattr(Engine, "step", stepped)


def test_an_interruption_delivers_what_there_is(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = document(generate(tiny_pair, "--json"))["rows"]
    options = ["--method", "vanilla", "--batch", 1]
    with monkeypatch.context() as patch:
        interrupt_after(27, patch)
        outcome = generate(tiny_pair, *options, "--json", "--compare", "sd")
    assert outcome.code == INTERRUPTED
    assert outcome.err == "error: interrupted; 2 of 4 texts are complete\n"
    found = json.loads(outcome.out)
    assert list(found) == ["kind", "method", "kv_dtype", "rows", "statistics"]
    assert found["rows"][:2] == whole[:2]
    assert [row["finished"] for row in found["rows"]] == ["length", "length", None, None]
    assert [len(row["tokens"]) for row in found["rows"]] == [12, 12, 6, 0]
    assert found["rows"][2]["tokens"] == whole[2]["tokens"][:6]
    with monkeypatch.context() as patch:
        interrupt_after(27, patch)
        outcome = generate(tiny_pair, *options)
    assert outcome.code == INTERRUPTED
    assert outcome.error == "interrupted; 2 of 4 texts are complete"
    unfinished = f"[2, unfinished] {found['rows'][2]['text']}\n"
    assert outcome.out == "".join(f"[{row}] {whole[row]['text']}\n" for row in range(2)) + unfinished
    with monkeypatch.context() as patch:
        interrupt_after(40, patch)
        outcome = generate(tiny_pair, "--json", "--compare", "vanilla", "--batch", 4, new=35)
    assert outcome.code == INTERRUPTED
    found = json.loads(outcome.out)
    assert {row["finished"] for row in found["rows"]} == {"length"}
    assert found["compare"]["common_prefix"] < 1


PROGRAM = "from dustin_runtime.cli.app import main; main()"


def plain_sigint() -> None:
    """A shell's background jobs ignore SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_real_ctrl_c(tiny_pair: TinyPair) -> None:
    """After the first text is there, with dozens to come."""
    many = [f"Prompt {number}" for number in range(99)]
    options = [*tiny_pair.options, "--method", "vanilla", "--batch", "1", "--max-new-tokens", "150", "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "generate", *many, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # `communicate` passes what a buffer has read ahead by
        preexec_fn=plain_sigint,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.read(4)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    finally:
        process.kill()
    out, said = (first + rest).decode(), err.decode()
    assert process.returncode == INTERRUPTED, said
    assert "Traceback" not in said
    complete = re.search(r"error: interrupted; (\d+) of 99 texts are complete\n$", said)
    assert complete, said
    assert said.count("error: ") == 1
    count = int(complete[1])
    assert 1 <= count < 99
    ended = many[: min(count, 3)]
    known = generate(tiny_pair, "--method", "vanilla", "--json", prompts=ended, new=150)
    texts = [row["text"] for row in document(known)["rows"]]
    assert out.startswith("".join(f"[{index}] {text}\n" for index, text in enumerate(texts)))
    assert f"\n[{count - 1}] " in f"\n{out}"
    assert f"\n[{count}] " not in out


def test_ctrl_c_while_torch_is_imported_is_not_lost(tiny_pair: TinyPair) -> None:
    """Its C++ part looks for NumPy, and takes an exception of any kind for its absence."""
    script = f"""
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("numpy") and "torch" in sys.modules:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
{PROGRAM}
"""
    command = [sys.executable, "-c", script, "generate", "x", *tiny_pair.options, "--max-new-tokens", "4"]
    ended = subprocess.run(command, capture_output=True, text=True, preexec_fn=plain_sigint, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (INTERRUPTED, "", "error: interrupted\n")


def test_a_closed_pipe_is_no_error_and_a_poor_terminal_neither(tiny_pair: TinyPair) -> None:
    options = ["x", "y", "z", *tiny_pair.options, "--batch", "1", "--max-new-tokens", "60", "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "generate", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(4) == b"[0] "
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == b""
    process.stderr.close()
