"""Whole commands on two tiny models: what they print, where, and how they exit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import SEARCH, SRH, TRACE, Outcome, dustin_profile, dustin_run
from tiny_pair import TinyPair, write_model
from transformers import PreTrainedTokenizerFast

import dustin_runtime
from dustin_profile.traces.store import TraceStore
from dustin_runtime.config import DustinConfig, Split, load_config, save_config
from dustin_runtime.files import read_json, write_json
from dustin_runtime.pairs import all_pairs
from dustin_runtime.pricing import DEVICES

pytestmark = pytest.mark.usefixtures("plain_pictures")


class Searched:
    """A finished run."""

    def __init__(self, run: Path, pair: TinyPair, outcome: Outcome) -> None:
        self.run, self.pair, self.outcome = run, pair, outcome
        self.baseline = run / "results.json"
        self.results: dict[str, Any] = read_json(self.baseline)

    def check(self, config: Path | None = None, baseline: Path | None = None, *options: object) -> Outcome:
        return dustin_profile(
            "check", config or self.run, "--baseline", baseline or self.baseline, *self.pair.options, *options
        )

    def generate(self, *options: object) -> Outcome:
        return dustin_run("generate", "--config", self.run, *self.pair.options, *options)


@pytest.fixture(scope="module")
def searched(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Searched:
    run = tmp_path_factory.mktemp("searched") / "run"
    outcome = dustin_profile("search", *tiny_pair.options, "--run-dir", run, *SEARCH, "--json")
    assert outcome.code == 0, outcome.err
    return Searched(run, tiny_pair, outcome)


def one_document(outcome: Outcome) -> dict[str, Any]:
    """The JSON document that stdout consists of."""
    assert outcome.code == 0, outcome.err
    assert outcome.out.endswith("\n") and outcome.out.count("\n") == 1
    document: dict[str, Any] = json.loads(outcome.out)
    return document


def files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_search_prints_its_results_and_writes_them(searched: Searched) -> None:
    document = one_document(searched.outcome)
    for picture in ("arr.png", "srh/heads-target.png", "srh/heads-draft.png"):
        assert (searched.run / picture).read_bytes().startswith(b"\x89PNG")
    assert document == searched.results
    assert document["kind"] == "dustin-results"
    assert set(files(searched.run)) >= {
        *("config.yaml", "results.json", "results.md", "arr.png", "search/inputs.json", "search/study.log"),
        *("srh/heads-target.json", "srh/heads-target.png", "srh/heads-draft.json", "srh/heads-draft.png"),
        *("traces/manifest.json", "traces/inputs.json", "traces/00000.safetensors", "traces/00004.safetensors"),
    }
    assert not [name for name in files(searched.run) if name.endswith(".tmp")]
    config = load_config(searched.run)
    assert config.selection.model_dump(mode="json") == document["selection"]
    assert config.pair.model_dump() == document["pair"]
    assert config.provenance == document["provenance"]
    assert config.depth == document["depth"] == 4
    assert config.guard is not None and config.guard.model_dump(mode="json") == document["guard"]
    assert config.guard.budget == config.selection.budget in config.guard.sizes
    assert config.guard.documents == len(document["documents"]["search"]) and config.guard.estimate.rms < 0.2
    assert "Guard: a step's ARR is estimated as" in (searched.run / "results.md").read_text()
    assert len(document["documents"]["search"]) + len(document["documents"]["reported"]) == 5
    assert not set(document["documents"]["search"]) & set(document["documents"]["reported"])
    policies = document["policies"]
    assert all(policies["oracle"]["arr"]["mean"] >= policy["arr"]["mean"] for policy in policies.values())


def test_nothing_emitted_names_a_path_or_a_user(searched: Searched) -> None:
    for name in ("config.yaml", "results.json", "results.md", "traces/inputs.json", "srh/heads-target.json"):
        text = (searched.run / name).read_text()
        assert str(searched.pair.target.parent) not in text, name
        assert str(Path.home()) not in text.replace("/roots", ""), name


def test_a_finished_run_is_repeated_without_loading_a_model(searched: Searched, monkeypatch: Any) -> None:
    monkeypatch.setattr("dustin_runtime.models.weights.load_decoder", None)
    before = files(searched.run)
    again = dustin_profile("search", *searched.pair.options, "--run-dir", searched.run, *SEARCH, "--json")
    assert one_document(again)["policies"] == searched.results["policies"]
    changed = {name for name, content in files(searched.run).items() if before.get(name) != content}
    pictures = {"arr.png", "srh/heads-target.png", "srh/heads-draft.png"}  # which this test does not draw
    assert changed <= {"seconds.json", "config.yaml", "results.json", "search/study.log"} | pictures
    assert pictures <= changed


@pytest.mark.parametrize(("command", "options"), [("srh", SRH), ("trace", TRACE)])
def test_earlier_stages_print_one_document(searched: Searched, command: str, options: list[str]) -> None:
    document = one_document(
        dustin_profile(command, *searched.pair.options, "--run-dir", searched.run, *options, "--json")
    )
    if command == "srh":
        assert list(document) == ["target", "draft"]
        assert document["target"] == read_json(searched.run / "srh" / "heads-target.json")
        assert [len(layer) for layer in document["draft"]["ranking"]] == [4, 4, 4]
    else:
        store = TraceStore.open(searched.run / "traces", read_json(searched.run / "traces" / "inputs.json"), [])
        assert document["documents"] == len(store) == 5
        assert document["windows"] == 20
        assert document["bytes"] == sum(path.stat().st_size for path in (searched.run / "traces").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("command", "options", "expected"),
    [
        ("srh", SRH, ["target: tiny-target, 6 of 6 needles accepted", "heads-draft.json", "heads-draft.png"]),
        ("trace", TRACE, ["5 documents, 20 windows"]),
        ("search", SEARCH, ["oracle", "hybrid (Dustin-H)", "StreamingLLM", "history: target layer", "config.yaml"]),
    ],
)
def test_results_are_tables_on_stdout_and_progress_is_on_stderr(
    searched: Searched, command: str, options: list[str], expected: list[str]
) -> None:
    shown = dustin_profile(command, *searched.pair.options, "--run-dir", searched.run, *options)
    assert shown.code == 0
    for text in expected:
        assert text in shown.out
    assert "6 of 6 needles accepted; halves of the needles agree on" in shown.err
    quiet = dustin_profile(command, *searched.pair.options, "--run-dir", searched.run, *options, "--quiet")
    assert quiet.err == ""
    assert quiet.out == shown.out


def test_self_drafts_other_settings_and_samplers(tiny_pair: TinyPair, tmp_path: Path) -> None:
    options = ["--target", tiny_pair.target, "--draft", "self:2", "--offline", "--run-dir", tmp_path]
    options += [*SEARCH, "--lookahead", "proposals", "--evaluation", "all", "--width", "5", "--depth", "3"]
    options += ["--sampler", "tpe", "--trials", "5", "--heuristic", "k", "--sink", "2", "--recent", "8", "--seed", "3"]
    results = one_document(dustin_profile("search", *options, "--json"))
    assert results["pair"]["draft"]["id"] == "self:2"
    assert results["depth"] == 3
    assert results["traces"] | {"width": 5, "lookahead": "proposals"} == results["traces"]
    assert sum(len(heads) for heads in results["heads"]["evaluation"].values()) == 24
    assert (results["selection"]["sink"], results["selection"]["window"]) == (2, 8)
    assert results["m"]["trials"] == 5
    found = load_config(tmp_path)
    assert found.provenance["arguments"]["sampler"] == "tpe"
    assert found.selection.split is None and "split" not in results["selection"]
    assert "fit_split" not in read_json(tmp_path / "search" / "inputs.json")
    fitted = one_document(dustin_profile("search", *options, "--fit-split", "--overwrite", "--json"))
    learned = load_config(tmp_path).selection
    assert learned.split is not None and learned.split != Split()
    assert fitted["selection"] == learned.model_dump(mode="json") | {"split": learned.split.model_dump(mode="json")}
    assert fitted["policies"] == results["policies"]
    checked = dustin_profile("check", tmp_path, "--baseline", tmp_path / "results.json", *options[:5], "--json")
    assert abs(one_document(checked)["difference"]) < 1e-6


def test_check_passes_untouched(searched: Searched) -> None:
    verdict = one_document(searched.check(None, None, "--json"))
    assert verdict["passed"]
    assert abs(verdict["difference"]) < 1e-6
    reported = searched.results["policies"]["hybrid"]["per_document"]
    assert {name: before for name, before, _ in verdict["rows"]} == reported
    for name, (before, now) in verdict["policies"].items():
        assert now == pytest.approx(before, abs=1e-6), name
    shown = searched.check(searched.run / "config.yaml")
    assert shown.code == 0
    assert "passed: hybrid" in shown.out
    assert "mean, streaming" in shown.out


def test_check_fails_with_its_code_when_a_score_is_perturbed(searched: Searched, tmp_path: Path) -> None:
    baseline = read_json(searched.baseline)
    scores = baseline["policies"]["hybrid"]["per_document"]
    scores |= {name: score + 0.05 for name, score in scores.items()}
    write_json(tmp_path / "results.json", baseline)
    failed = searched.check(None, tmp_path / "results.json", "--json")
    assert failed.code == 3
    assert failed.error.startswith("ARR is -0.0500 against the baseline, more than the tolerance 0.005 below it")
    verdict = json.loads(failed.out)
    assert not verdict["passed"]
    assert verdict["difference"] == pytest.approx(-0.05, abs=1e-5)
    shown = searched.check(None, tmp_path / "results.json")
    assert shown.code == 3
    assert "FAILED: hybrid -0.05" in shown.out
    assert searched.check(None, tmp_path / "results.json", "--tolerance", 0.051).code == 0


def test_check_fails_when_the_config_asks_the_worst_layer(searched: Searched, tmp_path: Path) -> None:
    config = load_config(searched.run)
    levels = searched.results["layers"]["target_history_arr"]
    worst = levels.index(min(levels))
    assert worst != config.selection.history.layer
    heads = searched.results["heads"]["history"][str(worst)]
    save_config(changed(config, m=0, history={"layer": worst, "heads": heads}), tmp_path / "config.yaml")
    failed = searched.check(tmp_path / "config.yaml", None, "--tolerance", 0.0005)
    assert failed.code == 3
    assert "ARR is -0." in failed.error


def test_check_measures_the_configs_own_heads_and_split(searched: Searched, tmp_path: Path) -> None:
    config = load_config(searched.run)
    history = config.selection.history
    other_history = {"layer": history.layer, "heads": [head for head in range(6) if head not in history.heads]}
    other_lookahead = [{"layer": entry.layer, "heads": [entry.heads[3]]} for entry in config.selection.lookahead]
    cases: list[dict[str, Any]] = [{"m": 0}, {"m": 0, "history": other_history}, {"sink": 0, "window": 0}]
    cases += [{"m": 44}, {"m": 44, "lookahead": other_lookahead}]
    found = {0.0}
    for case in cases:
        save_config(changed(config, **case), tmp_path / "config.yaml")
        verdict = one_document(searched.check(tmp_path / "config.yaml", None, "--tolerance", 1, "--json"))
        found.add(round(verdict["difference"], 6))
    assert len(found) == 1 + len(cases)


def changed(config: DustinConfig, **selection: Any) -> DustinConfig:
    data = config.model_dump(mode="json")
    data["selection"] |= selection
    return DustinConfig.model_validate(data)


def test_check_finds_moved_models_by_their_content(searched: Searched, tmp_path: Path) -> None:
    for side in ("target", "draft"):
        shutil.copytree(getattr(searched.pair, side), tmp_path / f"copied-{side}")
    moved = TinyPair(tmp_path / "copied-target", tmp_path / "copied-draft")
    assert Searched(searched.run, moved, searched.outcome).check().code == 0


def test_check_refuses_to_compare_unlike_things(
    searched: Searched, tmp_path: Path, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    def refused(message: str, config: DustinConfig | None = None, *options: object, **changes: Any) -> None:
        baseline = read_json(searched.baseline)
        for key, value in changes.items():
            part, _, field = key.partition("__")
            if field:
                baseline[part][field] = value
            else:
                baseline[part] = value
        write_json(tmp_path / "results.json", baseline)
        if config:
            save_config(config, tmp_path / "config.yaml")
        outcome = searched.check(tmp_path / "config.yaml" if config else None, tmp_path / "results.json", *options)
        assert outcome.code == 4, outcome
        assert outcome.out == ""
        assert outcome.error.startswith(message), outcome.error

    config = load_config(searched.run)
    (tmp_path / "text.txt").write_text("Another text, long enough for many prompts. " * 2000)
    refused("document topics#", traces__context=255)
    text = tmp_path / "text.txt"
    refused(f"--data {text}: has no document topics#", None, "--data", text)
    refused("budget: the baseline has 64, now it is 65: compare like with like", changed(config, budget=65))
    refused("depth: the baseline has 4, now it is 3", config.model_copy(update={"depth": 3}))
    refused("dtype: the baseline has float32, now it is bfloat16", None, "--dtype", "bfloat16")
    refused("pair.shared_vocab: the baseline has 1999, now it is 2000", pair__shared_vocab=1999)
    refused(f"{tmp_path / 'results.json'}: version 99 is newer than this dustin", version=99)
    other = write_model(tmp_path / "tiny-draft", "draft", 99, small_tokenizer)
    refused("models.draft.sha256: the baseline has", None, "--draft", other)


def test_check_says_where_documents_and_baselines_are_missing(searched: Searched, tmp_path: Path) -> None:
    baseline = read_json(searched.baseline)
    baseline["traces"]["data"] = "books.txt"
    write_json(tmp_path / "results.json", baseline)
    absent = searched.check(None, tmp_path / "results.json")
    assert absent.code == 6
    assert absent.error.endswith("the baseline was measured on books.txt: say where with --data")
    for content, message in (
        ("{}", "not a results file"),
        ("[1]", "not a results file"),
        ('{"kind": "dustin-results"}', "has no depth"),
        ("{", "not readable as JSON"),
    ):
        (tmp_path / "results.json").write_text(content)
        outcome = searched.check(None, tmp_path / "results.json")
        assert outcome.code == 6
        assert outcome.error.startswith(f"{tmp_path / 'results.json'}: {message}")
    assert searched.check(None, tmp_path / "nowhere.json").code == 6


def test_documents_with_queries_are_checked_with_the_template_they_were_searched_with(
    tiny_pair: TinyPair, tmp_path: Path, small_tokenizer: PreTrainedTokenizerFast
) -> None:
    """A tokenizer with a chat template, and documents that are not to be put into it."""
    for side in ("target", "draft"):
        shutil.copytree(getattr(tiny_pair, side), tmp_path / side)
        (tmp_path / side / "chat_template.jinja").write_text(
            "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}"
        )
    text = (Path(__file__).parents[2] / "profile" / "test_data.py").read_text()
    rows = [{"context": f"{n} {text}", "query": "What is tested?", "answer": "Documents are." * 9} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pair = TinyPair(tmp_path / "target", tmp_path / "draft")
    options = [*pair.options, "--run-dir", tmp_path / "run", *SEARCH, "--data", tmp_path / "rows.jsonl"]
    results = one_document(dustin_profile("search", *options, "--template", "raw", "--json"))
    assert results["template"] == "raw"
    searched = Searched(tmp_path / "run", pair, Outcome(0, "", ""))
    assert searched.check(None, None, "--data", tmp_path / "rows.jsonl").code == 0
    conflict = dustin_profile("trace", *options[: -len(SEARCH) - 2], *TRACE, *options[-2:])
    assert conflict.code == 4
    assert "traces: made with data_sha256 = " in conflict.error


def test_models_may_be_named_as_for_search(searched: Searched) -> None:
    """`--pair` and `--rope` are options of check and drift too, and are not passed over in silence."""
    for command in (["check", searched.run, "--baseline", searched.baseline], ["drift", searched.run]):
        wrong = dustin_profile(*command, *searched.pair.options, "--rope", "yarn:2")
        assert wrong.code == 2
        assert wrong.error.startswith("--rope yarn:2: the config was searched with the models' own scaling")
        both = dustin_profile(*command, *searched.pair.options, "--pair", "qwen7b:0.5b")
        assert both.code == 2
        other = dustin_profile(*command, "--pair", "smollm2", "--offline")
        assert other.code == 7
        assert other.error.startswith("pair.target.layers: the config was made for tiny-target with 4, smollm2 has 30")


def test_a_rope_override_is_recorded_and_served(searched: Searched, tmp_path: Path) -> None:
    options = [*searched.pair.options, "--rope", "linear:2"]
    results = one_document(dustin_profile("search", *options, "--run-dir", tmp_path, *SEARCH, "--json"))
    assert results["traces"]["models"]["rope"]["factor"] == 2
    assert results["policies"] != searched.results["policies"]
    config = load_config(tmp_path)
    assert config.rope is not None and (config.rope.type, config.rope.factor) == ("linear", 2)
    check = ["check", tmp_path, "--baseline", tmp_path / "results.json", *searched.pair.options]
    assert dustin_profile(*check).code == dustin_profile(*check, "--rope", "linear:2").code == 0
    assert dustin_profile(*check, "--rope", "linear:3").error.endswith("searched with linear:2; leave the option out")
    served = ["generate", "Text", "--config", tmp_path, "--max-new-tokens", 4, "--json"]
    plain = one_document(dustin_run(*served, *searched.pair.options))
    assert one_document(dustin_run(*served, *options))["rows"] == plain["rows"]


PROMPT = "The assert statement is a convenient way to insert debugging assertions into a program. " * 6


@pytest.mark.parametrize("method", ["vanilla", "sd", "dustin", "dustin-t", "dustin-d", "streaming"])
def test_generate_with_every_method(searched: Searched, method: str) -> None:
    document = one_document(
        searched.generate(PROMPT, "Short.", "--method", method, "--max-new-tokens", 9, "--ignore-eos", "--json")
    )
    assert document["method"] == method
    assert [len(row["tokens"]) for row in document["rows"]] == [9, 9]
    assert [row["finished"] for row in document["rows"]] == ["length", "length"]
    figures = document["statistics"]
    assert figures["tokens"] == 16  # the first of each row comes from its prefill
    assert len(figures["acceptance_per_position"]) == (0 if method == "vanilla" else 4)
    assert 1 <= figures["tau"] <= 5
    if method in ("vanilla", "sd"):
        assert "budget" not in document
    else:
        assert document["budget"] == 64
        assert figures["kept_tokens_per_step"] <= 64


def test_generate_compares_and_changes_budget_and_m(searched: Searched) -> None:
    everything = searched.generate(
        *(PROMPT, "--budget", 400, "--m", 100, "--max-new-tokens", 12, "--compare", "vanilla", "--json")
    )
    document = one_document(everything)
    assert document["budget"] == 400
    assert document["compare"] | {"equal_rows": 1, "common_prefix": 1, "equal_tokens": 1} == document["compare"]
    assert document["statistics"]["kept_tokens_per_step"] < 400
    little = one_document(
        searched.generate(PROMPT, "--budget", 24, "--m", 4, "--max-new-tokens", 12, "--compare", "sd", "--json")
    )
    assert little["compare"]["method"] == "sd"
    assert little["compare"]["common_prefix"] < 1
    assert little["statistics"]["kept_tokens_per_step"] == 24
    for options, message in (
        (("--budget", 20), "--budget: budget: 20 leaves no token to choose"),
        (("--m", 45), "--m: m: 45 is out of range; give 0 to budget - sink - window = 44"),
        (("--m", -1), "--m: m: Input should be greater than or equal to 0"),
    ):
        refused = searched.generate(PROMPT, *options)
        assert refused.code == 2
        assert refused.error.startswith(message)


def test_generate_reads_files_and_jsonl_and_stops(searched: Searched, tmp_path: Path) -> None:
    rows = [{"text": "One\u2028two"}, {"text": PROMPT}]
    (tmp_path / "rows.jsonl").write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    (tmp_path / "prompt.txt").write_text("From a file.")
    options = ["--file", tmp_path / "prompt.txt", "--jsonl", tmp_path / "rows.jsonl", "--field", "text"]
    options += ["--prompt-tokens", 20, "--max-new-tokens", 8, "--ignore-eos"]
    document = one_document(searched.generate("First.", *options, "--json"))
    assert [row["prompt_tokens"] for row in document["rows"]][3] == 20
    assert len(document["rows"]) == 4
    text = document["rows"][0]["text"]
    stopped = one_document(searched.generate("First.", *options, "--stop", text[3:5], "--json"))
    assert stopped["rows"][0]["finished"] == "stop"
    assert stopped["rows"][0]["text"] == text[: text.index(text[3:5])]
    absent = searched.generate("--jsonl", tmp_path / "rows.jsonl")
    assert absent.code == 6
    assert absent.error == f"{tmp_path / 'rows.jsonl'}:1: has no text field 'prompt'; name it with --field"


def test_generate_streams_text_on_stdout_and_figures_on_stderr(searched: Searched) -> None:
    options = ["--max-new-tokens", 10, "--ignore-eos"]
    text = one_document(searched.generate(PROMPT, *options, "--json"))["rows"][0]["text"]
    one = searched.generate(PROMPT, *options, "--compare", "vanilla")
    assert one.out == f"{text}\n"
    for figure in ("dustin: ", "tokens/s, tau ", "accepted per position", "prefix tokens read per step", "vanilla: "):
        assert figure in one.err
    assert "agreement with vanilla: " in one.err
    several = searched.generate(PROMPT, "x", *options)
    assert several.out.startswith(f"[0] {text}\n[1] ")


def test_generate_needs_no_config_for_full_verification(tiny_pair: TinyPair) -> None:
    plain = one_document(dustin_run("generate", "Text", *tiny_pair.options, "--max-new-tokens", 6, "--json"))
    assert plain["method"] == "sd"
    vanilla = ["generate", "Text", *tiny_pair.options, "--max-new-tokens", 6, "--method", "vanilla", "--json"]
    assert one_document(dustin_run(*vanilla))["rows"] == plain["rows"]


@pytest.mark.parametrize("pair", [pair.name for pair in all_pairs()])
def test_dry_runs_need_no_hub(pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["search", "--pair", pair, "--dry-run", "--offline"]
    prices = one_document(dustin_profile(*command, "--json"))
    assert prices["pair"] == pair
    priced = {(row["device"], row["stage"]): row for row in prices["stages"]}
    assert {stage for _, stage in priced} == {"srh", "trace", "search"}
    assert {"this cpu", "h200"} <= {device for device, _ in priced}
    assert all(row["seconds"] > 0 for row in priced.values())
    assert priced["h200", "trace"]["disk_bytes"] > 0
    assert priced["h200", "trace"]["gpu_bytes"] > 2 * prices["target"]["parameters"]
    assert not list(tmp_path.iterdir())


def test_dry_runs_of_parts_and_of_other_models(tiny_pair: TinyPair, tmp_path: Path) -> None:
    shown = dustin_profile("trace", *tiny_pair.options, "--dry-run", "--run-dir", tmp_path / "run", *TRACE)
    assert shown.code == 0
    assert "tiny-target" in shown.out
    prices = one_document(dustin_profile("srh", *tiny_pair.options, "--dry-run", "--length", "256", "--json"))
    assert {row["stage"] for row in prices["stages"]} == {"srh"}
    assert prices["tensor_parallel"] == 1
    assert not (tmp_path / "run").exists()


def test_a_dry_run_prices_a_split_target_in_one_process(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dustin_profile.prices.measure_cpu", lambda: DEVICES["cpu"])
    command = ["trace", *tiny_pair.options, "--dry-run", "--run-dir", tmp_path / "run", *TRACE, "--tensor-parallel"]
    shown = " ".join(dustin_profile(*command, 2).out.split())
    assert "the target split over 2 devices" in shown and "does not fit" not in shown
    one, two = (one_document(dustin_profile(*command, team, "--json"))["stages"] for team in (1, 2))
    assert [row["devices"] for row in two] == [2, 2]
    assert "memory of each" in shown and all(row["device_bytes"] < 0.6 * row["gpu_bytes"] for row in two)
    assert all(
        split["seconds"] > 0.9 * whole["seconds"] for split, whole in zip(two, one, strict=True)
    )  # one processor
    refused = dustin_profile(*command, 4)
    assert (refused.code, refused.error[:33]) == (2, "4 ranks cannot share 6 query head")


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("dustin_profile", ["--help"]),
        ("dustin_profile", ["search", "--help"]),
        ("dustin_profile", ["check", "--help"]),
        ("dustin_profile", ["--version"]),
        ("dustin_profile", ["search", "--pair", "nonsense"]),
        ("dustin_runtime", ["--help"]),
        ("dustin_runtime", ["generate", "--help"]),
    ],
)
def test_help_loads_nothing_heavy(module: str, arguments: list[str]) -> None:
    script = f"""
import sys
from {module}.cli.app import main
try:
    main()
except SystemExit:
    pass
heavy = {{"torch", "transformers", "tokenizers", "pandas", "matplotlib", "numpy", "scipy", "optuna", "datasets"}}
print("HEAVY", sorted(heavy & sys.modules.keys()))
"""
    found = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    assert found.stdout.endswith("HEAVY []\n"), found.stdout[-200:]


def test_help_lists_commands_options_and_exit_codes() -> None:
    text = dustin_profile("--help").out
    for word in ("search", "srh", "trace", "check", "drift", "report", "pairs", "env"):
        assert f"  {word} " in text
    for word in ("Exit codes: 0 done", "--version"):
        assert word in text
    options = dustin_profile("search", "--help", environment={"COLUMNS": "200"}).out
    for word in ("--pair", "--dry-run", "--sampler", "--json", "--seed", "--device", "--dtype", "--offline"):
        assert word in options
    assert "Exit codes: 0 done" in dustin_run("--help").out


def test_version_and_env() -> None:
    assert dustin_profile("--version") == Outcome(0, f"{dustin_runtime.__version__}\n", "")
    assert dustin_run("--version") == Outcome(0, f"{dustin_runtime.__version__}\n", "")
    facts = one_document(dustin_profile("env", "--json"))
    assert facts["dustin"] == dustin_runtime.__version__
    assert {"python", "torch", "transformers", "device", "platform"} <= facts.keys()
    assert "torch" in dustin_profile("env").out


@pytest.mark.parametrize(("program", "package"), [("profile search", "profile"), ("run generate", "runtime")])
def test_the_shell_completes_pairs(tmp_path: Path, program: str, package: str) -> None:
    name = f"dustin-{program.split()[0]}"
    (tmp_path / name).write_text(f"from dustin_{package}.cli.app import main\nmain()\n")
    variable = f"_{name.replace('-', '_').upper()}_COMPLETE"
    words = {"COMP_WORDS": f"dustin-{program} --pair qwen7", "COMP_CWORD": "3"}
    completed = subprocess.run(
        [sys.executable, tmp_path / name],
        env=os.environ | words | {variable: "complete_bash"},
        capture_output=True,
        text=True,
    )
    expected = [pair.name for pair in all_pairs() if pair.name.startswith("qwen7")]
    assert completed.stdout.split() == expected
    assert len(expected) > 1
