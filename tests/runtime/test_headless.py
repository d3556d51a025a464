"""Drafts without embedding and head: loaded next to their target, refused next to any other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_pair import TinyPair

from dustin_profile.prices import price
from dustin_profile.settings import HeadSettings, ModelSettings, Settings, choose_pair
from dustin_runtime import pairs, recipe_files
from dustin_runtime.config import DustinConfig, LayerHeads, Selection
from dustin_runtime.errors import ConfigError, DustinError, MissingError
from dustin_runtime.files import digest_file
from dustin_runtime.loading import open_configured, open_pair
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.headless import quantised
from dustin_runtime.models.shape import shape_from_hf

LAYERS = 2
NAME = "recipe:tiny-draft"
ONE = "model.layers.1.mlp.up_proj.weight"


def layers_of(target: Path) -> dict[str, torch.Tensor]:
    """The first layers and the norm of the tiny target."""
    found = load_file(target / "model.safetensors")
    wanted = (*(f"model.layers.{index}." for index in range(LAYERS)), "model.norm")
    return {name: tensor for name, tensor in found.items() if name.startswith(wanted)}


def write_draft(
    folder: Path, target: Path, kind: str = "float32", marker: Any = None, config: dict[str, Any] | None = None
) -> Path:
    """A draft that is the target's first layers, stored as `kind`."""
    folder.mkdir(parents=True, exist_ok=True)
    theirs = json.loads((target / "config.json").read_text())
    theirs |= {"num_hidden_layers": LAYERS, "dustin": marker or {"embedding": "target"}} | (config or {})
    (folder / "config.json").write_text(json.dumps(theirs))
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in layers_of(target).items():
        if kind == "int8" and tensor.dim() == 2:
            stored[name], stored[f"{name}_scale"] = quantised(tensor)
        else:
            stored[name] = tensor if kind == "int8" else tensor.to(getattr(torch, kind))
    save_file(stored, folder / "model.safetensors")
    return folder


def load(target: Path, draft: str) -> tuple[Decoder, Decoder]:
    pair = open_pair(str(target), draft, offline=True)
    model = pair.load_target(torch.float32, "cpu")
    return model, pair.load_draft(model)


def logits(model: Decoder) -> torch.Tensor:
    from dustin_runtime.attention.dense import dense_attention

    ids = torch.randint(0, model.shape.vocab, (1, 40), generator=torch.Generator().manual_seed(0))
    hidden = model.forward(ids, torch.zeros(1, dtype=torch.int64), model.cache(1, 40), dense_attention)
    return model.logits(hidden)


@torch.no_grad()
def test_layers_of_the_target_stored_apart_equal_its_first_layers(tiny_pair: TinyPair, tmp_path: Path) -> None:
    target, draft = load(tiny_pair.target, str(write_draft(tmp_path / "draft", tiny_pair.target)))
    assert draft.shape == target.shape.model_copy(update={"layers": LAYERS})
    assert draft.weights.embedding is target.weights.embedding
    assert draft.weights.head is target.weights.head
    assert torch.equal(logits(draft), logits(target.first_layers(LAYERS)))


@torch.no_grad()
@pytest.mark.parametrize(("kind", "close"), [("bfloat16", 2**-7), ("int8", 1 / 127)])
def test_stored_weights_are_within_rounding(tiny_pair: TinyPair, tmp_path: Path, kind: str, close: float) -> None:
    folder = write_draft(tmp_path / kind, tiny_pair.target, kind)
    whole = write_draft(tmp_path / "whole", tiny_pair.target)
    assert (folder / "model.safetensors").stat().st_size < 0.6 * (whole / "model.safetensors").stat().st_size
    _, draft = load(tiny_pair.target, str(folder))
    _, exact = load(tiny_pair.target, str(whole))
    for ours, theirs in zip(draft.weights.layers, exact.weights.layers, strict=True):
        error = (ours.gate_up - theirs.gate_up).abs()
        assert float((error / theirs.gate_up.abs().amax(1, keepdim=True)).max()) <= close / 2 * 1.001
        assert torch.allclose(ours.mlp_norm, theirs.mlp_norm, rtol=close)


def test_rows_of_zeros_survive_quantisation() -> None:
    values, scale = quantised(torch.tensor([[0.0, 0.0], [-2.0, 1.0]]))
    assert values.tolist() == [[0, 0], [-127, 64]]
    assert torch.isfinite(scale).all() and (scale > 0).all()


def spoil(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda t: t.pop(ONE.replace("up", "down")), MissingError, "is int8|mlp.down_proj.weight_scale"),
        (lambda t: t.pop("model.norm.weight"), MissingError, r"model\.norm\.weight"),
        (lambda t: t.pop(f"{ONE}_scale"), MissingError, r"up_proj\.weight_scale is missing"),
        (lambda t: t.update({f"{ONE}_scale": torch.ones(3)}), MissingError, r"up_proj\.weight_scale is float32 \[3\]"),
        (lambda t: t.update({f"{ONE}_scale": t[f"{ONE}_scale"].half()}), MissingError, "weight_scale is float16"),
        (lambda t: t.update({"model.norm.weight_scale": torch.ones(3)}), MissingError, "model.norm.weight_scale"),
        (lambda t: t.update({"model.embed_tokens.weight": torch.ones(3)}), MissingError, "embed_tokens"),
        (lambda t: t.update({"lm_head.weight": torch.ones(3)}), MissingError, "lm_head"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), MissingError, r"model\.norm\.weight is \[3\]"),
        (lambda t: t.update({ONE: t[ONE][:, :-1].contiguous()}), MissingError, r"up_proj\.weight is \["),
        (lambda t: t.update({ONE: t[ONE].to(torch.int32)}), ConfigError, r"up_proj\.weight is stored as int32"),
    ],
)
def test_wrong_tensors_are_named(
    tiny_pair: TinyPair, tmp_path: Path, change: Any, error: type[DustinError], said: str
) -> None:
    folder = write_draft(tmp_path / "draft", tiny_pair.target, "int8")
    spoil(change)(folder)
    with pytest.raises(error, match=said) as caught:
        load(tiny_pair.target, str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("marker", "config", "said"),
    [
        ("target", {}, "dustin: must be an object"),
        ({"embedding": "draft"}, {}, r"dustin\.embedding: 'draft' is not supported"),
        ({"tokenizer": "x"}, {}, r"dustin\.embedding: None is not supported"),
        ({"embedding": "target", "tokeniser": "x"}, {}, r"dustin\.tokeniser: unknown key"),
        ({"embedding": "target", "tokenizer": 3}, {}, r"dustin\.tokenizer: must be"),
        ({"embedding": "target", "tokenizer": "x"}, {}, r"dustin\.tokenizer: .*another tokenizer"),
        (None, {"hidden_size": 80}, r"hidden_size: .*80, tiny-target has 96"),
        (None, {"vocab_size": 2048}, r"vocab_size: .*2048, tiny-target has 2000"),
    ],
)
def test_another_target_or_an_unknown_marker_is_refused(
    tiny_pair: TinyPair, tmp_path: Path, marker: Any, config: dict[str, Any], said: str
) -> None:
    folder = write_draft(tmp_path / "draft", tiny_pair.target, marker=marker, config=config)
    with pytest.raises(ConfigError, match=said) as caught:
        open_pair(str(tiny_pair.target), str(folder), offline=True)
    assert "\n" not in str(caught.value)


def test_such_a_draft_is_no_target(tiny_pair: TinyPair, tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft", tiny_pair.target)
    with pytest.raises(ConfigError, match="has no embedding of its own"):
        open_pair(str(folder), "self:1", offline=True)


@pytest.fixture
def recipe(tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of recipes with `recipe:tiny-draft` in it, whose weights lie there too; its file."""
    copy = tmp_path / "recipes"
    shutil.copytree(recipe_files.recipes_folder(), copy, ignore=shutil.ignore_patterns("*.safetensors"))
    for module in (pairs, recipe_files):
        monkeypatch.setattr(module, "recipes_folder", lambda: copy)
    for cached in (pairs._pair, pairs._model):
        cached.cache_clear()
    folder = write_draft(copy / "tiny" / "draft", tiny_pair.target, "int8")
    shape = shape_from_hf(json.loads((folder / "config.json").read_text()))
    files = {name: digest_file(folder / name) for name in ("config.json", "model.safetensors")}
    stored = {"hub": NAME, "shape": shape.model_dump(), "weights": {"folder": "tiny/draft", "sha256": files}}
    path = copy / "models" / "tiny-draft.yaml"
    path.write_text(json.dumps(stored))
    yield path
    for cached in (pairs._pair, pairs._model):
        cached.cache_clear()


def configured(tiny_pair: TinyPair, draft: str) -> DustinConfig:
    heads = LayerHeads(layer=0, heads=(0,))
    selection = Selection(budget=64, sink=4, window=16, m=8, history=heads, lookahead=(heads,))
    return DustinConfig(
        pair=open_pair(str(tiny_pair.target), draft, offline=True).identity(), depth=3, selection=selection
    )


def test_weights_beside_a_recipe_go_through_the_ordinary_mechanism(tiny_pair: TinyPair, recipe: Path) -> None:
    pair = open_pair(str(tiny_pair.target), NAME, offline=True)
    assert (pair.draft_id, pair.draft_stores, pair.shared_vocab) == (NAME, "layers", 2000)
    assert pair.provenance()["draft"]["id"] == NAME
    assert pair.provenance()["draft"]["sha256"] != pair.provenance()["target"]["sha256"]
    again = open_configured(configured(tiny_pair, NAME), str(tiny_pair.target), None, offline=True)
    assert again.draft_shape.layers == LAYERS
    with pytest.raises(ConfigError, match=r"pair\.draft\.layers"):
        open_configured(configured(tiny_pair, "self:3"), str(tiny_pair.target), NAME, offline=True)


def test_it_is_priced_from_its_recipe_alone(
    tiny_pair: TinyPair, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(recipe.parents[1] / "tiny")
    models = ModelSettings(target=str(tiny_pair.target), draft=NAME, offline=True, device="cpu")
    settings = Settings(tmp_path, models=models, heads=HeadSettings(lengths=(512,)))
    priced = price(settings, choose_pair(models), ("srh",))
    assert priced["draft"]["layers"] == LAYERS


def test_a_pair_recipe_may_name_it(recipe: Path) -> None:
    pair_file = recipe.parents[1] / "pairs" / "smollm2.yaml"
    pair_file.write_text(pair_file.read_text().replace("smollm2-135m-draft", "tiny-draft"))
    assert pairs.find_pair("smollm2").draft_id == NAME


def replaced(old: str, new: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(path.read_text().replace(old, new)) and None


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda p: spoil(lambda t: t[ONE].zero_())(p.parents[1] / "tiny/draft"), MissingError, "weights.sha256.model"),
        (lambda p: (p.parents[1] / "tiny/draft/config.json").write_text("{}"), MissingError, "weights.sha256.config"),
        (lambda p: (p.parents[1] / "tiny/draft/model.safetensors").unlink(), MissingError, "no such file"),
        (replaced('"ffn": 128', '"ffn": 256'), ConfigError, r"shape\.ffn is 256, .*says 128"),
        (replaced("tiny/draft", "../draft"), ConfigError, r"weights: .*does not lie below"),
        (replaced('"config.json"', '"a/config.json"'), ConfigError, r"weights: .*not a file name"),
        (replaced('"config.json"', '"other.json"'), ConfigError, r"weights: .*must name config\.json"),
        (replaced("recipe:tiny", "org/tiny"), ConfigError, r"weights belong to a hub of recipe:NAME"),
        (lambda p: p.unlink(), MissingError, "no recipe of that name"),
    ],
)
def test_weights_that_are_not_the_recipes_are_refused(
    tiny_pair: TinyPair, recipe: Path, change: Any, error: type[DustinError], said: str
) -> None:
    change(recipe)
    with pytest.raises(error, match=said) as caught:
        open_pair(str(tiny_pair.target), NAME, offline=True)
    assert "\n" not in str(caught.value)
