"""Recipes of the repository, and what is said of broken ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dustin_runtime import pairs, recipe_files
from dustin_runtime.errors import ConfigError, UsageError
from dustin_runtime.models.shape import shape_from_hf
from dustin_runtime.pairs import all_pairs, find_model, find_pair

MODELS = sorted((recipe_files.recipes_folder() / "models").glob("*.yaml"))

PUBLISHED_PARAMETERS = {
    "Qwen/Qwen2.5-72B-Instruct": 72.7e9,
    "Qwen/Qwen2.5-32B-Instruct": 32.8e9,
    "Qwen/Qwen2.5-14B-Instruct": 14.8e9,
    "Qwen/Qwen2.5-7B-Instruct": 7.62e9,
    "Qwen/Qwen2.5-1.5B-Instruct": 1.54e9,
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494e9,
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": 1.54e9,
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": 0.494e9,
    "meta-llama/Llama-3.3-70B-Instruct": 70.6e9,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03e9,
    "meta-llama/Llama-3.2-3B-Instruct": 3.21e9,
    "meta-llama/Llama-3.2-1B-Instruct": 1.24e9,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134.5e6,
    "recipe:smollm2-135m-draft": 42.5e6,  # 28.3 of them are its target's embedding
}

# arXiv 2606.24957, Table 5.
PAPER_PAIRS = {
    "qwen72b:0.5b": ("Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", 4),
    "qwen32b:0.5b": ("Qwen/Qwen2.5-32B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", 4),
    "qwen14b:0.5b": ("Qwen/Qwen2.5-14B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", 3),
    "qwen7b:0.5b": ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", 3),
    "llama70b:1b": ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", 4),
    "llama8b:1b": ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", 3),
}

LLAMA = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-05, "vocab_size": 128256}
LLAMA_ROPE = {
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
}

# What the models' own config.json files say.
CONFIGS = {
    "Qwen/Qwen2.5-72B-Instruct": {
        **QWEN, "hidden_size": 8192, "intermediate_size": 29568, "max_position_embeddings": 32768,
        "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8, "sliding_window": 131072,
        "tie_word_embeddings": False, "vocab_size": 152064,
    },
    "Qwen/Qwen2.5-32B-Instruct": {
        **QWEN, "hidden_size": 5120, "intermediate_size": 27648, "max_position_embeddings": 32768,
        "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8, "sliding_window": 131072,
        "tie_word_embeddings": False, "vocab_size": 152064,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        **QWEN, "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131072,
        "tie_word_embeddings": False, "vocab_size": 152064,
    },
    "Qwen/Qwen2.5-1.5B-Instruct": {
        **QWEN, "hidden_size": 1536, "intermediate_size": 8960, "max_position_embeddings": 32768,
        "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "sliding_window": 32768,
        "tie_word_embeddings": True, "vocab_size": 151936,
    },
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": {
        **QWEN, "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "sliding_window": 32768,
        "tie_word_embeddings": True, "vocab_size": 151936,
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        **LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
        "rope_scaling": {**LLAMA_ROPE, "factor": 8.0}, "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.2-1B-Instruct": {
        **LLAMA, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 500000.0,
        "rope_scaling": {**LLAMA_ROPE, "factor": 32.0}, "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.2-3B-Instruct": {
        **LLAMA, "head_dim": 128, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "num_attention_heads": 24, "num_hidden_layers": 28, "num_key_value_heads": 8, "rope_theta": 500000.0,
        "rope_scaling": {**LLAMA_ROPE, "factor": 32.0}, "tie_word_embeddings": True,
    },
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        **LLAMA, "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192,
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "rope_theta": 100000,
        "rope_scaling": None, "tie_word_embeddings": True, "vocab_size": 49152,
    },
}  # fmt: skip


def test_every_model_recipe_is_counted_and_none_is_missing() -> None:
    loaded = {pairs._model(path.stem).hub for path in MODELS}
    assert loaded == set(PUBLISHED_PARAMETERS)


@pytest.mark.parametrize(("hub", "published"), PUBLISHED_PARAMETERS.items())
def test_shape_has_the_published_number_of_parameters(hub: str, published: float) -> None:
    recipe = find_model(hub)
    assert recipe is not None
    assert recipe.shape.parameters == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("hub", CONFIGS)
def test_shape_is_that_of_the_published_config(hub: str) -> None:
    recipe = find_model(hub)
    assert recipe is not None
    assert recipe.shape == shape_from_hf(CONFIGS[hub])


def test_yarn_doubles_the_context_of_every_qwen_model() -> None:
    for path in MODELS:
        recipe = pairs._model(path.stem)
        if recipe.shape.family == "qwen2":
            assert recipe.shape.with_rope(recipe.rope_options["yarn"]).context == 65536


@pytest.mark.parametrize(("alias", "expected"), PAPER_PAIRS.items())
def test_pairs_of_the_paper(alias: str, expected: tuple[str, str, int]) -> None:
    pair = find_pair(alias)
    assert (pair.target_id, pair.draft_id, pair.depth) == expected
    assert pair.budget == 512


def test_larger_drafts_are_run_at_their_targets_depth() -> None:
    for small, large in (
        ("qwen72b:0.5b", "qwen72b:1.5b"),
        ("qwen14b:0.5b", "qwen14b:1.5b"),
        ("llama8b:1b", "llama8b:3b"),
    ):
        assert find_pair(small).target == find_pair(large).target
        assert find_pair(small).depth == find_pair(large).depth


def test_every_alias_resolves_to_its_pair() -> None:
    known = all_pairs()
    assert len(known) == len(list((recipe_files.recipes_folder() / "pairs").iterdir()))
    for pair in known:
        for alias in pair.aliases:
            assert find_pair(alias.upper()) is pair


def test_padded_vocabularies_differ_but_the_tokenizer_does_not() -> None:
    pair = find_pair("qwen72b:0.5b")
    assert (pair.target.shape.vocab, pair.draft.shape.vocab) == (152064, 151936)
    assert pair.target.tokenizer_vocab == pair.draft.tokenizer_vocab == 151665


def test_embedded_pair_drafts_with_what_lies_beside_its_recipe() -> None:
    pair = find_pair("smollm2")
    assert (pair.target_id, pair.draft_id, pair.budget) == ("smollm2", "recipe:smollm2-135m-draft", 256)
    assert pair.draft.shape == pair.target.shape.model_copy(update={"layers": 4})
    assert pair.draft.weights is not None
    folder = recipe_files.recipes_folder() / pair.draft.weights.folder
    assert sum(path.stat().st_size for path in folder.iterdir()) < 16e6


def test_unknown_pair_offers_the_nearest_and_the_command_that_lists() -> None:
    with pytest.raises(UsageError) as caught:
        find_pair("qwen72:0.5b")
    message = str(caught.value)
    assert "qwen72b:0.5b" in message
    assert "dustin-profile pairs" in message
    with pytest.raises(UsageError, match=r"unknown pair '\.\./models/x'"):
        find_pair("../models/x")


def test_unknown_hub_id_has_no_recipe() -> None:
    assert find_model("somebody/some-model") is None
    assert find_model("somebody/Qwen2.5-7B-Instruct") is None


def test_completion() -> None:
    assert recipe_files.complete_pair("LLAMA8B:") == ["llama8b:1b", "llama8b:3b"]
    assert set(recipe_files.complete_pair("")) == {pair.name for pair in all_pairs()}
    assert recipe_files.complete_pair("zz") == []


def test_installed_recipes_come_before_the_repositorys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "runtime" / "dustin_runtime"
    package.mkdir(parents=True)
    monkeypatch.setattr(recipe_files, "__file__", str(package / "recipe_files.py"))
    assert recipe_files.recipes_folder.__wrapped__() == (tmp_path / "site" / "recipes").resolve()
    (package / "recipes").mkdir()
    assert recipe_files.recipes_folder.__wrapped__() == (package / "recipes").resolve()


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, json, dustin_profile.cli.pairs as cli; light = list(sys.modules);"
        "import dustin_runtime.pairs, dustin_runtime.pricing; print(json.dumps([light, list(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    command, library = (set(names) for names in json.loads(done.stdout))
    assert not command & {"torch", "pydantic", "ruamel.yaml", "rich.table"}
    assert not library & {"torch", "numpy", "transformers"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the recipes that a test may break."""
    copy = tmp_path / "recipes"
    shutil.copytree(recipe_files.recipes_folder(), copy)
    for module in (pairs, recipe_files):
        monkeypatch.setattr(module, "recipes_folder", lambda: copy)
    for cached in (pairs._pair, pairs._model):
        cached.cache_clear()
    yield copy
    for cached in (pairs._pair, pairs._model):
        cached.cache_clear()


PAIR, MODEL = "pairs/qwen7b_0.5b.yaml", "models/qwen2.5-7b-instruct.yaml"


@pytest.mark.parametrize(
    ("file", "old", "new", "key"),
    [
        (PAIR, "depth: 3", "depth: 0", "depth"),
        (PAIR, "depth: 3", "depth: three", "depth"),
        (PAIR, "depth: 3\n", "", "depth"),
        (PAIR, "budget: 512", "budget: 20", "budget"),
        (PAIR, "budget:", "budgets:", "budget"),
        (PAIR, "depth:", "speed: 9\ndepth:", "speed"),
        (PAIR, "target: qwen2.5-7b-instruct", "target: qwen2.5-8b-instruct", "target"),
        (PAIR, "target: qwen2.5-7b-instruct", "target: [1]", "target"),
        (PAIR, "draft: qwen2.5-0.5b-instruct", "draft: self:28", "draft"),
        (PAIR, "draft: qwen2.5-0.5b-instruct", "draft: self:x", "draft"),
        (PAIR, "draft: qwen2.5-0.5b-instruct", "draft: llama-3.2-1b-instruct", "tokenizers"),
        (PAIR, "- qwen7b:0.5b", "- qwen8b:0.5b", "aliases"),
        (PAIR, "- qwen2.5-7b:0.5b", "- Qwen2.5-7b:0.5b", "aliases"),
        (PAIR, "depth: 3", "depth: 3\ndepth: 4", "YAML"),
        (PAIR, "depth: 3", "depth: {", "YAML"),
        (MODEL, "layers: 28", "layer: 28", "shape.layers"),
        (MODEL, "kv_heads: 4", "kv_heads: 5", "shape"),
        (MODEL, "factor: 2.0", "factor: 0.5", "rope_options.yarn.factor"),
        (MODEL, "tokenizer_vocab: 151665", "tokenizer_vocab: 200000", "tokenizer_vocab"),
        (MODEL, "hub: Qwen/Qwen2.5-7B-Instruct", "hub: Qwen/Qwen2.5-8B-Instruct", "hub"),
    ],
)
def test_broken_recipe_names_file_and_key(folder: Path, file: str, old: str, new: str, key: str) -> None:
    path = folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        find_pair("qwen7b:0.5b")
    message = str(caught.value)
    assert str(path) in message
    assert key in message.removeprefix(str(path))
    assert "\n" not in message


@pytest.mark.parametrize("content", [b"", b"- 1\n", b"\x00\xff\xfe"])
def test_recipe_that_is_no_mapping(folder: Path, content: bytes) -> None:
    (folder / PAIR).write_bytes(content)
    with pytest.raises(ConfigError, match="qwen7b_0"):
        find_pair("qwen7b:0.5b")


def test_alias_taken_twice_names_both_files(folder: Path) -> None:
    path = folder / PAIR
    path.write_text(path.read_text().replace("- qwen2.5-7b:0.5b", "- qwen72b:0.5b"))
    with pytest.raises(ConfigError, match=r"qwen7b_0\.5b\.yaml: aliases: 'qwen72b:0\.5b' is taken by qwen72b_0\.5b"):
        all_pairs()
