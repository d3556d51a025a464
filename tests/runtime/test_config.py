"""The emitted YAML: what is written is read back, and what is wrong is refused by line, key and remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dustin_runtime import config as module
from dustin_runtime.config import (
    DustinConfig,
    LayerHeads,
    ModelIdentity,
    PairIdentity,
    Selection,
    load_config,
    save_config,
)
from dustin_runtime.errors import ConfigError, MissingError
from dustin_runtime.models.shape import ModelShape, RopeScaling

TARGET = ModelShape(
    family="qwen2",
    layers=28,
    hidden=1536,
    ffn=8960,
    query_heads=12,
    kv_heads=2,
    head_size=128,
    vocab=152064,
    context=32768,
)
DRAFT = TARGET.model_copy(
    update={"layers": 24, "hidden": 896, "query_heads": 14, "head_size": 64, "vocab": 151936, "tied": True}
)
CONFIG = DustinConfig(
    pair=PairIdentity(
        target=ModelIdentity.of("org/target", TARGET),
        draft=ModelIdentity.of("org/draft", DRAFT),
        tokenizer="5f" * 32,
        shared_vocab=151665,
    ),
    depth=4,
    selection=Selection(
        budget=512,
        sink=4,
        window=16,
        m=120,
        history=LayerHeads(layer=19, heads=(3, 11, 0, 7)),
        lookahead=(LayerHeads(layer=15, heads=(13, 1)), LayerHeads(layer=2, heads=(0, 5, 6, 4))),
        retrieval_heads=((7, 9),) * TARGET.layers,
    ),
    rope=RopeScaling(type="yarn", factor=2.0, original_context=32768),
    evidence={"split": "held_out", "arr": {"oracle": {"mean": 0.9, "low": None}}},
    provenance={"seed": 0, "data": "topics: é, #2", "arguments": {"lengths": [1024, 2048]}},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_config(CONFIG, tmp_path / "config.yaml")
    return tmp_path / "config.yaml"


def edit(path: Path, before: str, after: str) -> Path:
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, text
    path.write_text(text.replace(before, after), encoding="utf-8")
    return path


def refused(path: Path, kind: type[ConfigError | MissingError] = ConfigError) -> str:
    """The message, which has to be one line that names the file."""
    with pytest.raises(kind) as caught:
        load_config(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_a_config_survives_the_file(path: Path) -> None:
    assert load_config(path) == CONFIG
    assert load_config(path.parent) == CONFIG  # the run directory that holds it
    assert [line.split(":")[0] for line in path.read_text().splitlines() if line[0] not in "# -"] == [
        "schema_version",
        "pair",
        "depth",
        "selection",
        "draft_cache",
        "rope",
        "evidence",
        "provenance",
    ]
    again = path.parent / "again.yaml"
    save_config(load_config(path), again)
    assert again.read_bytes() == path.read_bytes()
    plain = CONFIG.model_copy(update={"rope": None})
    save_config(plain, again)
    assert load_config(again) == plain


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("budget: 512", "budgett: 512", "@: selection.budgett: unknown key; did you mean 'budget'?"),
        ("depth: 4", "depht: 4", "@: depht: unknown key; did you mean 'depth'?"),
        ("layer: 19", "layr: 19", "@: selection.history.layr: unknown key; did you mean 'layer'?"),
        ("layer: 15", "lay: 15", "@: selection.lookahead.0.lay: unknown key; did you mean 'layer'?"),
        ("factor: 2.0", "facter: 2.0", "@: rope.facter: unknown key; did you mean 'factor'?"),
        ("depth: 4", "depth: 4\nzzz: 1", "@: zzz: unknown key"),
        ("depth: 4\n", "", ": depth: is missing"),
        ("budget: 512", "budget: plenty", "@: selection.budget: Input should be a valid integer"),
        ("budget: 512", "budget: 1.5", "@: selection.budget: Input should be a valid integer"),
        ("budget: 512", "budget: [1]", "@: selection.budget: Input should be a valid integer"),
        ("budget: 512", "budget:", "@: selection.budget: Input should be a valid integer"),
        ("heads: [3, 11, 0, 7]", "heads: 3", "@: selection.history.heads: Input should be a valid tuple"),
        ("heads: [3, 11, 0, 7]", "heads: []", "@: selection.history.heads: Tuple should have at least 1 item"),
        ("heads: [3, 11, 0, 7]", "heads: [3, x]", "@: selection.history.heads.1: Input should be a valid integer"),
        ("draft_cache: full", "draft_cache: half", "@: draft_cache: Input should be 'full'"),
        ("depth: 4", "depth: 0", "@: depth: Input should be greater than or equal to 1"),
        ("depth: 4", "depth: 65", "@: depth: Input should be less than or equal to 64"),
        ("m: 120", "m: -1", "@: selection.m: Input should be greater than or equal to 0"),
        ("sink: 4", "sink: -4", "@: selection.sink: Input should be greater than or equal to 0"),
        ("m: 120", "m: 493", "@: selection: m: 493 is out of range; give 0 to budget - sink - window = 492"),
        (
            "budget: 512",
            "budget: 20",
            "@: selection: budget: 20 leaves no token to choose; give more than sink + wind",
        ),
        (
            "budget: 512",
            "budget: 19",
            "@: selection: budget: 19 leaves no token to choose; give more than sink + wind",
        ),
        ("layer: 19", "layer: 28", "@: selection.history.layer 28: org/target has layers 0..27"),
        ("layer: 19", "layer: -1", "@: selection.history.layer: Input should be greater than or equal to 0"),
        ("layer: 15", "layer: 24", "@: selection.lookahead.layer 24: org/draft has layers 0..23"),
        ("[3, 11, 0, 7]", "[3, 12, 0, 7]", "@: selection.history.heads 12: org/target has query heads 0..11"),
        ("[3, 11, 0, 7]", "[3, -1, 0, 7]", "@: selection.history.heads -1: org/target has query heads 0..11"),
        ("[13, 1]", "[14, 1]", "@: selection.lookahead.heads 14: org/draft has query heads 0..13"),
        ("[13, 1]", "[1, 1]", "@: selection.lookahead.heads of layer 15 repeat a head"),
        ("layer: 2", "layer: 15  # again", "@: selection.lookahead repeats a layer"),
        ("type: yarn", "type: ntk", "@: rope.type: Input should be 'default', 'linear', 'llama3' or 'yarn'"),
        (", original_context: 32768", "", "@rope: rope: rope type yarn needs original_context"),
        ("factor: 2.0", "factor: .inf", "@: rope.factor: Input should be a finite number"),
        ("depth: 4", "depth: 4\ndepth: 5", '@: not YAML (found duplicate key "depth"'),
        ("depth: 4", "depth: [4", "@selection: not YAML (expected"),
        ("seed: 0", "seed: 2001-99-99", ": not YAML (month must be in 1..12)"),
        ("depth: 4", "depth: " + "{a: " * 1000, ": not YAML (maximum recursion depth exceeded"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(path: Path, before: str, after: str, message: str) -> None:
    """`@` stands for the line that was edited last, `@key` for the line of that key."""
    edit(path, before, after)
    if found := re.match(r"@(\w*): ", message):
        line = line_of(path, f"{found[1]}:" if found[1] else after.splitlines()[-1])
        message = message.replace(found[0], f":{line}: ", 1)
    assert refused(path).startswith(message)


def line_of(path: Path, text: str) -> int:
    (line,) = [number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line]
    return line


def test_m_needs_a_draft_layer(path: Path) -> None:
    text = path.read_text()
    start, end = text.index("  lookahead:"), text.index("draft_cache")
    path.write_text(text[:start] + "  lookahead: []\n" + text[end:])
    assert refused(path) == f":{line_of(path, 'lookahead:')}: selection: m is 120 but lookahead names no draft layer"
    edit(path, "m: 120", "m: 0")
    assert load_config(path).selection.lookahead == ()


@pytest.mark.parametrize(
    ("added", "line", "message"),
    [
        ("adaptive_budget: {target_arr: 0.9}", 0, "adaptive_budget needs guard"),
        ("adaptive_budget:\n  target_arr: 0.9\n  sizes: [9, 4]", 2, "adaptive_budget: sizes [9, 4]: give budgets in"),
    ],
)
def test_a_fault_of_several_fields_names_the_line_of_one(path: Path, added: str, line: int, message: str) -> None:
    lines = path.read_text().count("\n")
    path.write_text(f"{path.read_text()}{added}\n")
    assert refused(path).startswith(f":{lines + 1 + line}: {message}")


def test_every_key_is_known_at_its_own_place(path: Path) -> None:
    assert "unknown key" in refused(edit(path, "depth: 4", "depth: 4\nbudget: 4"))


def test_a_newer_schema_is_refused_before_its_unknown_keys(path: Path) -> None:
    edit(path, "schema_version: 1", "schema_version: 2\nnew_feature: {a: 1}")
    assert refused(path) == ": schema_version 2 is not readable here (this is 1): upgrade dustin"


@pytest.mark.parametrize(("version", "message"), [("0", "search again"), ("one", "schema_version: Input should be a")])
def test_other_versions(path: Path, version: str, message: str) -> None:
    assert message in refused(edit(path, "schema_version: 1", f"schema_version: {version}"))


def test_a_file_without_a_version_is_no_config(path: Path) -> None:
    assert refused(edit(path, "schema_version: 1\n", "")) == ": schema_version: is missing"


def test_an_older_schema_is_migrated_step_by_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(data: dict[str, Any]) -> dict[str, Any]:
        data["depth"] = data.pop("gamma")
        return data | {"schema_version": 0}

    monkeypatch.setattr(module, "MIGRATIONS", {-1: rename, 0: lambda data: data | {"schema_version": 1}})
    edit(path, "depth: 4", "gamma: 4")
    edit(path, "schema_version: 1", "schema_version: -1")
    assert load_config(path) == CONFIG
    edit(path, "gamma: 4", "gamma: 0")
    assert refused(path) == ": depth: Input should be greater than or equal to 1"


def test_files_that_are_no_config(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    assert refused(path, MissingError) == ": no such file"
    with pytest.raises(MissingError, match=r"config\.yaml: no such file"):
        load_config(tmp_path)
    for content, message in (
        (b"", ": is empty"),
        (b"# nothing\n", ": is empty"),
        (b"- 1\n", ": must be a mapping of keys to values"),
        (b"text", ": must be a mapping of keys to values"),
        (b"a: b: c", ":1: not YAML (mapping values are not allowed here)"),
        (b"a: \x01", ": not YAML ("),
        (b"!!python/object/apply:os.system [touch x]", ": must be a mapping of keys to values"),
    ):
        path.write_bytes(content)
        assert refused(path).startswith(message), content
    path.write_bytes(b"\x7fELF\xff\xfe\x00")
    assert refused(path, MissingError).startswith(": not readable as text (")
    path.unlink()
    path.mkdir()
    with pytest.raises(MissingError):
        load_config(path)


@pytest.mark.parametrize(
    ("side", "field", "value", "message"),
    [
        ("target", "layers", 27, "pair.target.layers: the config was made for org/target with 28, copy has 27"),
        ("target", "family", "qwen3", "pair.target.family: the config was made for org/target with qwen2, copy has qw"),
        ("target", "hidden", 1024, "pair.target.hidden: "),
        ("draft", "query_heads", 16, "pair.draft.query_heads: the config was made for org/draft with 14, copy has 16"),
        ("draft", "kv_heads", 7, "pair.draft.kv_heads: "),
        ("draft", "head_size", 32, "pair.draft.head_size: "),
    ],
)
def test_a_config_of_another_pair_is_refused_by_the_field(side: str, field: str, value: Any, message: str) -> None:
    shapes = {"target": TARGET, "draft": DRAFT}
    shapes[side] = shapes[side].model_copy(update={field: value})
    with pytest.raises(ConfigError) as caught:
        CONFIG.require(("copy", shapes["target"]), ("copy", shapes["draft"]), CONFIG.pair.tokenizer)
    assert str(caught.value).startswith(message)
    assert "dustin-profile search" in str(caught.value)


def test_names_do_not_matter_but_the_tokenizer_does() -> None:
    # Padding of the vocabulary, context and RoPE may differ: they change neither layers nor heads.
    longer = TARGET.model_copy(update={"vocab": 151936, "context": 65536})
    CONFIG.require(("a copy", longer), ("another", DRAFT), CONFIG.pair.tokenizer)
    with pytest.raises(ConfigError, match=r"^pair\.tokenizer: "):
        CONFIG.require(("org/target", TARGET), ("org/draft", DRAFT), "00")


def test_an_invalid_config_cannot_be_built_either() -> None:
    for heads, fault in (
        (((7, 9),), r"retrieval_heads has 1 layers, org/target has \d+"),
        (
            ((7, 9),) * (TARGET.layers - 1) + ((12,),),
            r"retrieval_heads \d+: give some of org/target's query heads 0\.\.11",
        ),
    ):
        wrong = CONFIG.selection.model_copy(update={"retrieval_heads": heads})
        with pytest.raises(ValidationError, match=fault):
            DustinConfig.model_validate(CONFIG.model_dump() | {"selection": wrong.model_dump()})
    with pytest.raises(ValidationError, match="m: 493 is out of range"):
        Selection.model_validate(CONFIG.selection.model_dump() | {"m": 493})
    with pytest.raises(ValidationError):
        CONFIG.selection.m = 3  # type: ignore[misc]
