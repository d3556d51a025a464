"""`dustin-run bench` on a CPU, on tiny real models and on noise: its document, what is called synthetic, refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Outcome, dustin_run
from tiny_pair import TinyPair

from dustin_runtime.bench import grid, grid_report, subject
from dustin_runtime.config import AdaptiveBudget, DustinConfig, Estimate, Guard, save_config
from dustin_runtime.engine import Engine
from dustin_runtime.loading import open_pair
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.pairs import ModelRecipe, PairRecipe

LICENSE = Path(__file__).parents[2] / "LICENSE"
SMALL = ["--batch", 2, "--context", 64, "--steps", 3, "--repeats", 1, "--budget", 40, "--draft-budget", 16]
ROW = {
    *("method", "batch", "context", "depth", "budget", "draft_reads", "kv_dtype", "tokens_per_s", "tau", "alpha"),
    *("acceptance_per_position", "step_ms", "prefill_s", "roofline_ms", "over_roofline", "components_ms"),
    *("components_gb_per_s", "peak_memory_gib", "synthetic"),
}
OK, USAGE, CAPACITY, MISSING, CONFIG, INTERRUPTED = 0, 2, 5, 6, 7, 130
EVERY_METHOD = ["vanilla", "sd", "magicdec", "dustin", "dustin-t", "dustin-d", "streaming"]


def bench(pair: TinyPair, *options: object) -> Outcome:
    return dustin_run("bench", *pair.options, *options)


def methods(*names: str) -> list[str]:
    return [part for name in names for part in ("--method", name)]


def lines(outcome: Outcome) -> list[str]:
    """The rows on stdout, without the header."""
    assert outcome.code == OK, outcome.err
    header, *rows = outcome.out.splitlines()
    assert header.split()[:5] == ["method", "draft", "reads", "kv", "batch"]
    return rows


def table(markdown: str) -> list[list[str]]:
    """Cells of the Markdown's rows."""
    rows = [line for line in markdown.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_every_method_on_real_models_and_text(tiny_pair: TinyPair, tmp_path: Path) -> None:
    path = tmp_path / "new" / "grid.json"
    both = ["--draft-cache", "full", "--draft-cache", "sink+window"]
    given = methods("dustin", "magicdec", "vanilla", "dustin-t", "sd", "dustin-d", "streaming", "sd")
    shown = bench(tiny_pair, "--file", LICENSE, *SMALL, *given, *both, f"--json={path}")
    printed, document = lines(shown), json.loads(path.read_text())
    assert document["kind"] == "dustin-bench"
    assert document["pair"] == "tiny-target / tiny-draft"
    assert document["device"].startswith("CPU") and document["dtype"] == document["kv_dtype"] == "float32"
    assert {"dustin", "torch", "python"} <= document["versions"].keys()
    assert document["roofline"] == {"device": "cpu", "bytes_per_s": 10e9}
    assert document["command"].startswith("dustin-run bench --target tiny-target --draft tiny-draft --offline ")
    assert document["command"].endswith(" --json=grid.json")
    assert (document["steps"], document["selection"]["budget"]) == (3, 40)
    rows = document["rows"]
    sparse = ("dustin", "dustin-t", "dustin-d", "streaming")
    cases = [("vanilla", None), ("dustin", "all"), ("dustin", 16), ("magicdec", 16)]
    cases += [("dustin-t", "all"), ("dustin-t", 16), ("sd", "all"), ("dustin-d", "all"), ("dustin-d", 16)]
    cases += [("streaming", "all"), ("streaming", 16)]
    assert [(row["method"], row["draft_reads"]) for row in rows] == cases  # vanilla first, each case once
    for row in rows:
        assert row.keys() == ROW
        assert (row["batch"], row["context"]) == (2, 64)
        assert row["depth"] == (0 if row["method"] == "vanilla" else 4)
        assert row["budget"] == (40 if row["method"] in sparse else None)
        assert row["alpha"] == pytest.approx(row["tokens_per_s"] / rows[0]["tokens_per_s"])
        assert 1 <= row["tau"] <= row["depth"] + 1
        assert len(row["acceptance_per_position"]) == row["depth"]
        assert row["prefill_s"] > 0 and row["step_ms"] > 0
        assert row["over_roofline"] == pytest.approx(row["step_ms"] / row["roofline_ms"])
        assert sum(row["components_ms"].values()) == pytest.approx(row["step_ms"])
        expected = {"verify_attention", "linears", "rest"}
        expected |= {"draft"} if row["depth"] else set()
        expected |= {"selection"} if row["method"] in sparse else set()
        expected |= {"scores"} if row["method"] in ("dustin", "dustin-t", "dustin-d") else set()
        assert row["components_ms"].keys() == expected
        assert row["peak_memory_gib"] is None
    assert rows[0]["alpha"] == 1
    markdown = path.with_suffix(".md").read_text()
    assert markdown == grid_report.markdown(document)
    for text in (path.read_text(), markdown, shown.out):
        assert str(tmp_path) not in text
        assert str(tiny_pair.target.parent) not in text
    assert "0.01 TB/s (cpu)" in markdown
    assert "H200" not in markdown
    # Nothing is synthetic, and nothing says so.
    assert document["synthetic"] == [] and all(row["synthetic"] == [] for row in rows)
    assert {cells[0] for cells in table(markdown)} == {"real"}
    assert len(table(markdown)) == len(printed) == len(rows)
    assert not [line for line in printed if "[" in line]
    assert "ynthetic" not in markdown


def test_guarded_rows_say_how_many_steps_were_full(tiny_pair: TinyPair, tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    given = methods("dustin", "vanilla", "sd")
    shown = lines(bench(tiny_pair, "--file", LICENSE, *SMALL, *given, "--full-every", 2, "--json", path))
    vanilla, dustin, sd = json.loads(path.read_text())["rows"]
    assert dustin.keys() == ROW | {"full_steps_share", "kept_tokens_per_step", "rule"}
    assert dustin["rule"] == "every2"
    assert dustin["full_steps_share"] == pytest.approx(2 / 3)  # 3 warm up, so the timed ones are the 4th to 6th
    assert 40 < dustin["kept_tokens_per_step"] < 64 + 40
    assert vanilla.keys() == sd.keys() == ROW
    assert re.search(r"66\.7% in full, \d+ tokens read", next(row for row in shown if "dustin" in row))
    assert "dustin, batch 2, context 64: 66.7% of steps verified in full" in path.with_suffix(".md").read_text()
    refused = bench(tiny_pair, "--file", LICENSE, *SMALL, *given[2:], "--full-every", 2)
    assert refused.code == USAGE and "--full-every: method vanilla cannot" in refused.err
    lacking = bench(tiny_pair, "--file", LICENSE, *SMALL, *given, "--guard", 0.5)
    assert lacking.code == CONFIG and "--guard needs guard" in lacking.err


def test_what_a_method_does_beside_the_drafting_is_timed_apart(tiny_pair: TinyPair, tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    shown = bench(tiny_pair, "--file", LICENSE, *SMALL, *methods("dustin-rest", "dustin"), f"--json={path}")
    assert len(lines(shown)) == 2
    document = json.loads(path.read_text())
    by_method = {row["method"]: row["components_ms"] for row in document["rows"]}
    assert by_method["dustin-rest"].keys() == by_method["dustin"].keys() | {"lists"}
    assert by_method["dustin-rest"]["lists"] > 0
    markdown = path.with_suffix(".md").read_text()
    place = [cell.strip() for cell in markdown.split("| data |")[1].splitlines()[0].split("|")].index("lists ms") + 1
    assert {row[1]: row[place] != "" for row in table(markdown)} == {"dustin-rest": True, "dustin": False}


def test_batches_and_contexts_are_compared_each_with_its_own_vanilla(tiny_pair: TinyPair, tmp_path: Path) -> None:
    path = tmp_path / "grid"
    sizes = ["--batch", 1, "--batch", 3, "--context", 40, "--context", 32, "--batch", 1, "--steps", 1]
    lines(bench(tiny_pair, "--file", LICENSE, *sizes, *methods("sd", "vanilla"), "--json", path))
    rows = json.loads(path.read_text())["rows"]
    assert path.with_suffix(".md").exists()
    cases = [(context, batch, method) for context in (40, 32) for batch in (1, 3) for method in ("vanilla", "sd")]
    assert [(row["context"], row["batch"], row["method"]) for row in rows] == cases
    for vanilla, row in zip(rows[::2], rows[1::2], strict=True):
        assert row["alpha"] == pytest.approx(row["tokens_per_s"] / vanilla["tokens_per_s"])
    (alone,) = lines(bench(tiny_pair, "--file", LICENSE, *sizes[:2], *sizes[4:6], *methods("sd"), "--json", path))
    assert json.loads(path.read_text())["rows"][0]["alpha"] is None
    assert alone.split()[0] == "sd"


def test_real_acceptance_is_the_models_and_steps_are_those_asked_for(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft of all the target's layers is always right. Components are timed over the whole context."""
    launched, extents = [], []
    step, components = Engine.step, grid._components

    def count(engine: Engine, state: Any) -> Any:
        launched.append(engine.stepper.policy.name)
        return step(engine, state)

    def see(stepper: Any, state: Any, repeats: int) -> Any:
        extents.append(state.extent)
        return components(stepper, state, repeats)

    monkeypatch.setattr(Engine, "step", count)
    monkeypatch.setattr(grid, "_components", see)
    path = tmp_path / "grid.json"
    itself = TinyPair(tiny_pair.target, Path("self:4"))
    options = ["--batch", 2, "--context", 50, "--steps", 6, "--depth", 2, "--json", path]
    lines(bench(itself, "--file", LICENSE, *options, *methods("vanilla", "sd")))
    vanilla, drafted = json.loads(path.read_text())["rows"]
    assert vanilla["tau"] == 1
    assert drafted["tau"] == 3
    assert drafted["acceptance_per_position"] == [1, 1]
    assert launched == [name for name in ("vanilla", "sd") for _ in range(grid.WARM_UP + 6)]
    assert min(extents) >= 50


def test_forced_acceptance_is_said_and_differs_from_row_to_row(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seeds = tmp_path / "grid.json", []
    fill = Engine.fill

    def see(engine: Engine, prompts: Any, capacity: int, draws: Any) -> Any:
        seeds.append([draw.seed for draw in draws])
        return fill(engine, prompts, capacity, draws)

    monkeypatch.setattr(Engine, "fill", see)
    options = ["--batch", 8, "--context", 32, "--steps", 60, "--force-acceptance", 2.5, "--json", path]
    printed = lines(bench(tiny_pair, "--file", LICENSE, *options, *methods("vanilla", "sd")))
    document = json.loads(path.read_text())
    vanilla, forced = document["rows"]
    assert document["synthetic"] == vanilla["synthetic"] == forced["synthetic"] == ["acceptance forced to 2.5"]
    assert all(line.endswith("  [acceptance forced to 2.5]") for line in printed)
    assert vanilla["tau"] == 1
    assert forced["tau"] == pytest.approx(2.5, abs=0.3)
    assert seeds == [list(range(8))] * 2


def model(layers: int, heads: int) -> ModelRecipe:
    sizes = {"hidden": 32, "ffn": 64, "kv_heads": 2, "head_size": 8, "vocab": 1200, "context": 128}
    shape = ModelShape.model_validate({"family": "llama", "layers": layers, "query_heads": heads, **sizes})
    return ModelRecipe(hub="org/noise", shape=shape, tokenizer_vocab=1100)


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known pair that is tiny."""
    recipe = PairRecipe(
        aliases=("noise",), target=model(4, 4), draft=model(2, 4), depth=3, budget=48, source="made up for a test"
    )
    monkeypatch.setattr(subject, "find_pair", lambda alias: recipe)


NOISE = ["bench", "--pair", "noise", "--random-weights", "--synthetic-context", "--device", "cpu"]


@pytest.mark.usefixtures("noise")
def test_noise_is_called_synthetic_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    options = ["--batch", 2, "--context", 200, "--steps", 40, "--repeats", 1, "--force-acceptance", 3, "--json", path]
    given = [*NOISE, *options, *methods(*EVERY_METHOD), "--draft-cache", "sink+window"]
    printed = lines(dustin_run(*given))
    document = json.loads(path.read_text())
    said = ["random weights", "acceptance forced to 3.0", "synthetic context"]
    assert document["synthetic"] == said
    assert document["pair"] == "noise"
    assert document["selection"]["budget"] == 48
    assert [row["method"] for row in document["rows"]] == EVERY_METHOD
    for row, line in zip(document["rows"], printed, strict=True):
        assert row["synthetic"] == said
        assert line.endswith(f"  [{', '.join(said)}]")
        assert row.keys() == ROW
        assert row["prefill_s"] is None
        assert row["tau"] == pytest.approx(3, abs=0.5) if row["depth"] else row["tau"] == 1
        assert row["draft_reads"] == {"vanilla": None, "sd": "all"}.get(row["method"], 512)
    markdown = path.with_suffix(".md").read_text()
    assert f"**Synthetic: {', '.join(said)}.**" in markdown
    assert {cells[0] for cells in table(markdown)} == {"synthetic"}


def test_a_synthetic_context_of_real_weights_is_said(tiny_pair: TinyPair, tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    (printed,) = lines(bench(tiny_pair, "--synthetic-context", *SMALL, *methods("dustin"), "--json", path))
    assert printed.endswith("  [synthetic context]")
    document = json.loads(path.read_text())
    assert document["rows"][0]["synthetic"] == document["synthetic"] == ["synthetic context"]


def test_a_known_pair_is_timed_from_its_shapes(tmp_path: Path) -> None:
    options = ["--batch", 1, "--context", 32, "--steps", 2, "--repeats", 1, "--depth", 1, "--json", tmp_path / "x.json"]
    weights = ["bench", "--pair", "smollm2", "--random-weights", "--synthetic-context", "--device", "cpu"]
    (printed,) = lines(dustin_run(*weights, *options, *methods("dustin"), "--dtype", "bfloat16"))
    assert printed.endswith("  [random weights, synthetic context]")
    document = json.loads((tmp_path / "x.json").read_text())
    assert (document["pair"], document["dtype"], document["selection"]["budget"]) == ("smollm2", "bfloat16", 256)


def served(pair: TinyPair, path: Path, **changes: Any) -> Path:
    opened = open_pair(str(pair.target), str(pair.draft), offline=True)
    selection = subject.spread(opened.target_shape, opened.draft_shape, 44)
    save_config(DustinConfig(pair=opened.identity(), depth=2, selection=selection, **changes), path)
    return path


def test_what_the_options_do_not_go_with_is_said_before_anything_is_loaded(tiny_pair: TinyPair, tmp_path: Path) -> None:
    estimate = Estimate(intercept=0.1, history=0.4, lookahead=0.4, rms=0.02, overestimate=0.03)
    guard = Guard(budget=44, estimate=estimate, sizes=(44, 64), across=estimate, documents=3, errors_of="held_out")
    adaptive = AdaptiveBudget(target_arr=0.9, sizes=(44, 64))
    config = served(tiny_pair, tmp_path / "config.yaml", guard=guard, adaptive_budget=adaptive)
    given = ["--config", config, "--synthetic-context", *methods("vanilla", "dustin", "streaming"), "--context", 5000]
    found = bench(tiny_pair, *given, "--depth", 3, "--draft-cache", "sink+window")
    said = [line.split(": ")[1] for line in found.err.splitlines() if line.startswith("warning: ")]
    assert (found.code, said) == (CAPACITY, ["guard.depth", "guard.draft_cache", "adaptive_budget"])
    assert "warning: " not in bench(tiny_pair, *given, "--budget", 44).err


def test_a_config_gives_heads_depth_and_budget(tiny_pair: TinyPair, tmp_path: Path) -> None:
    config, path = served(tiny_pair, tmp_path / "config.yaml"), tmp_path / "grid.json"
    options = ["--synthetic-context", *SMALL[:8], *methods("dustin"), "--config", config, "--json", path]
    lines(bench(tiny_pair, *options))
    document = json.loads(path.read_text())
    assert (document["rows"][0]["depth"], document["rows"][0]["budget"]) == (2, 44)
    assert document["rows"][0]["draft_reads"] == "all"
    windowed = served(tiny_pair, tmp_path / "windowed.yaml", draft_cache="sink+window")
    lines(bench(tiny_pair, *options[:-3], windowed, *options[-2:]))
    assert json.loads(path.read_text())["rows"][0]["draft_reads"] == 44
    other = dustin_run(*NOISE[:1], "--pair", "smollm2", *NOISE[3:], "--config", config)
    assert (other.code, other.out) == (CONFIG, "")
    assert other.error.startswith("pair.target.layers: the config was made for tiny-target with 4, ")
    assert "SmolLM2-135M-Instruct has 30" in other.error


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither weights are read nor noise is made."""
    monkeypatch.setattr("dustin_runtime.models.weights.load_decoder", None)
    monkeypatch.setattr(subject, "random_decoder", None)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--method dustn", USAGE, "--method dustn: unknown (known: vanilla, sd, magicdec, triforce, dustin, "),
        ("--draft-cache window", USAGE, "--draft-cache window: give full or sink+window"),
        ("--force-acceptance 0.9", USAGE, "--force-acceptance 0.9: a step of 4 drafts emits 1 to 5 tokens; give"),
        ("--force-acceptance 5.1", USAGE, "--force-acceptance 5.1: a step of 4 drafts emits 1 to 5 tokens; give"),
        ("--force-acceptance 3 --depth 1", USAGE, "--force-acceptance 3: a step of 1 drafts emits 1 to 2 tokens"),
        ("--force-acceptance nan", USAGE, "--force-acceptance nan: a step of 4 drafts"),
        ("--budget 20", USAGE, "--budget: budget: 20 leaves no token to choose; give more than sink + window"),
        ("--budget -1", USAGE, "--budget: budget: Input should be greater than or equal to 1"),
        ("--m 9999", USAGE, "--m: m: 9999 is out of range; give 0 to budget - sink - window = 492"),
        ("--context 4090", CAPACITY, "--context 4090 with 64 steps: 44"),
        ("--steps 9000", CAPACITY, "--context 64 with 9000 steps: "),
        ("--synthetic-context", USAGE, "what fills the context? give either --file with text to prefill or --synth"),
        ("--random-weights --pair smollm2", USAGE, "--random-weights cannot read --file; give --synthetic-context"),
        ("--pair smollm2", USAGE, "give --pair, or --target and --draft, not both"),
        ("--context 3000", MISSING, "short.txt: N tokens of text do not fill a context of 3000; give more --file"),
        ("--file empty.txt", MISSING, "empty.txt: empty; give a text file"),
        ("--file none.txt", MISSING, "none.txt: no such file"),
        ("--file binary.txt", MISSING, "binary.txt: binary; give a text file"),
        ("--file short.txt", MISSING, "short.txt, short.txt: N tokens of text do not fill a context of 64; give"),
        ("--config none.yaml", MISSING, "none.yaml: no such file"),
        ("--device tpu", USAGE, "--device tpu: unknown"),
        ("--device cuda:99", CAPACITY, "--device cuda:99: "),
        ("--dtype int8", USAGE, "--dtype int8: unknown"),
        ("--json .", USAGE, "--json .: is a folder; name a file"),
        ("--json grid.md", USAGE, "--json grid.md: the Markdown would replace it; give another ending"),
        ("--json short.txt/grid.json", MISSING, "--json short.txt/grid.json: cannot be written ("),
        ("--json /proc/none/grid.json", MISSING, "--json /proc/none/grid.json: cannot be written ("),
    ],
)
def test_what_is_refused_before_anything_is_loaded(
    options: str, code: int, message: str, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (("empty.txt", b"\n"), ("binary.txt", b"a\0"), ("short.txt", b"Too short.")):
        Path(name).write_bytes(content)
    base = tiny_pair.options[: -2 if "--device" in options else None]
    refused = dustin_run("bench", *base, "--file", "short.txt", "--context", 64, *options.split())
    assert (refused.code, refused.out) == (code, ""), refused
    assert refused.err == f"error: {refused.error}\n"
    error = refused.error
    if "N tokens" in message:  # the tests' tokenizer is trained on Python's topics, which differ between versions
        error = re.sub(r"\d+ tokens", "N tokens", error)
    assert error.startswith(message), error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["binary.txt", "empty.txt", "short.txt"]


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "x", "--draft", "self:1"], "what fills the context? give either --file with text to prefill or"),
        (["--synthetic-context", "--random-weights"], "--random-weights needs --pair, whose shapes it takes, and no"),
        (["--synthetic-context", "--random-weights", "--pair", "smollm2", "--draft", "self:1"], "--random-weights nee"),
        (["--synthetic-context", "--random-weights", "--pair", "smolm"], "unknown pair 'smolm': did you mean smollm2"),
        (["--synthetic-context"], "which models? give --config, --pair, or both --target and --draft"),
    ],
)
def test_combinations_that_make_no_sense(options: list[str], message: str) -> None:
    refused = dustin_run("bench", *options, "--device", "cpu")
    assert (refused.code, refused.out) == (USAGE, "")
    assert refused.err == f"error: {refused.error}\n"
    assert refused.error.startswith(message), refused.error


def after(calls: int) -> Callable[[Engine, Any], Any]:
    """`Engine.step` that is interrupted as by Ctrl-C in the step after so many."""
    step, left = Engine.step, [calls]

    def stepped(engine: Engine, state: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return step(engine, state)

    return stepped


@pytest.mark.parametrize("filled", [["--file", LICENSE], ["--synthetic-context"]])
def test_an_interruption_ends_the_run_and_keeps_the_rows_before_it(
    filled: list[object], tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "grid.json"
    monkeypatch.setattr(Engine, "step", after(12))
    given = [*filled, "--batch", 2, "--context", 32, "--steps", 8, "--json", path]
    outcome = bench(tiny_pair, *given, *methods("vanilla", "sd", "dustin"))
    assert outcome.code == INTERRUPTED
    assert outcome.err == "error: interrupted\n"
    assert len(outcome.out.splitlines()) == 2  # the header and vanilla
    assert [row["method"] for row in json.loads(path.read_text())["rows"]] == ["vanilla"]


def test_no_memory_is_one_line(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*arguments: object, **named: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch.nn.functional, "linear", exhausted)
    outcome = bench(tiny_pair, "--synthetic-context", *SMALL, *methods("vanilla"))
    assert (outcome.code, outcome.out) == (CAPACITY, "")
    assert outcome.error.startswith("out of memory: lower the context, the batch or the budgets")
