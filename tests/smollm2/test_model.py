"""The module that is trained is the decoder that serves; what is exported is what was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_pair import TinyPair
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.errors import ConfigError
from dustin_runtime.loading import open_pair
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.tokenizer import tokenizer_hash
from dustin_runtime.models.weights import random_decoder
from recipes.smollm2_135m.export import export, round_as_stored
from recipes.smollm2_135m.heldout import closeness
from recipes.smollm2_135m.model import Stack, draft_and_target, strongest

LENGTH = 96
LAYERS = (0, 3, 3)


@pytest.fixture(scope="module")
def target(tiny_pair: TinyPair) -> Decoder:
    return open_pair(str(tiny_pair.target), "self:1", offline=True).load_target(torch.float32, "cpu")


def some_ids(rows: int = 2) -> Tensor:
    return torch.randint(0, 2000, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def served(model: Decoder, ids: Tensor) -> Tensor:
    start = torch.zeros(len(ids), dtype=torch.int64)
    return model.logits(model.forward(ids, start, model.cache(len(ids), LENGTH), dense_attention))


def perturbed(model: Stack) -> Stack:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


@torch.no_grad()
def test_target_equals_the_runtimes_decoder(target: Decoder) -> None:
    _, frozen = draft_and_target(target, LAYERS, LENGTH)
    assert torch.allclose(frozen(some_ids()) @ frozen.head.T, served(target, some_ids()), rtol=1e-4, atol=1e-4)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


@torch.no_grad()
def test_exported_draft_equals_the_module(target: Decoder, tiny_pair: TinyPair, tmp_path: Path) -> None:
    """Every parameter was moved, so a tensor under a wrong name or in a wrong place shows."""
    draft = perturbed(Stack(target, LAYERS, LENGTH))
    tokenizer = tokenizer_hash(open_pair(str(tiny_pair.target), "self:1", offline=True).tokenizer)
    expected = draft(some_ids()) @ draft.head.T
    loaded = {}
    for kind in ("float32", "bfloat16", "int8"):
        export(draft, tmp_path / kind, tokenizer, kind)
        pair = open_pair(str(tiny_pair.target), str(tmp_path / kind), offline=True)
        loaded[kind] = served(pair.load_draft(target), some_ids())
    assert torch.allclose(loaded["float32"], expected, rtol=1e-4, atol=1e-4)
    assert 0 < float((loaded["bfloat16"] - expected).abs().mean()) < 0.1
    round_as_stored(draft)
    assert torch.allclose(loaded["int8"], draft(some_ids()) @ draft.head.T, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_strongest_channels_of_an_mlp_are_kept(target: Decoder, tiny_pair: TinyPair, tmp_path: Path) -> None:
    ffn = target.shape.ffn
    gate_up, down = target.weights.layers[0].gate_up.clone(), target.weights.layers[0].down.clone()
    weak = torch.tensor([3, 70, 71])
    down[:, weak] *= 1e-3
    kept = strongest(gate_up, down, ffn - 3)
    assert sorted({*range(ffn)} - {*kept.tolist()}) == weak.tolist()
    whole, same = Stack(target, LAYERS, LENGTH), Stack(target, LAYERS, LENGTH, ffn=ffn)
    assert torch.equal(whole(some_ids()), same(some_ids()))
    narrow = Stack(target, LAYERS, LENGTH, ffn=40)
    tokenizer = tokenizer_hash(open_pair(str(tiny_pair.target), "self:1", offline=True).tokenizer)
    export(narrow, tmp_path, tokenizer, "float32")
    loaded = open_pair(str(tiny_pair.target), str(tmp_path), offline=True).load_draft(target)
    assert loaded.shape.ffn == 40
    assert torch.allclose(served(loaded, some_ids()), narrow(some_ids()) @ narrow.head.T, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="ffn 200"):
        Stack(target, LAYERS, LENGTH, ffn=200)


def test_recomputed_activations_give_the_same_gradients(target: Decoder) -> None:
    gradients = []
    for recompute in (False, True):
        draft = Stack(target, LAYERS, LENGTH, recompute=recompute)
        draft(some_ids()).square().mean().backward()
        gradients.append([parameter.grad for parameter in draft.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert one is not None and other is not None
        assert torch.equal(one, other)


def test_the_same_layer_twice_is_trained_twice(target: Decoder) -> None:
    draft = Stack(target, LAYERS, LENGTH)
    second, third = list(draft.each_layer())[1:]
    assert torch.equal(second.qkv, third.qkv) and second.qkv is not third.qkv
    assert draft.shape.layers == 3


def test_layers_and_families_that_cannot_be_trained_are_refused(target: Decoder) -> None:
    with pytest.raises(ConfigError, match="layer 4: the target has layers 0 to 3"):
        Stack(target, (0, 4), LENGTH)
    shape = target.shape.model_copy(update={"family": "qwen2", "qkv_bias": True})
    with pytest.raises(ConfigError, match="family qwen2"):
        Stack(random_decoder(shape, torch.float32, "cpu"), (0,), LENGTH)


def test_the_target_is_as_close_to_itself_as_can_be(target: Decoder) -> None:
    draft, frozen = draft_and_target(target, range(4), LENGTH)
    same = closeness(draft, frozen, some_ids(3), frozen.head, rows=2, chunk=50, autocast=False)
    assert same["kl"] == pytest.approx(0, abs=1e-6)
    assert (same["overlap"], same["top1"]) == (pytest.approx(1, abs=1e-6), 1)
    other = closeness(perturbed(draft), frozen, some_ids(3), frozen.head, rows=2, chunk=50, autocast=False)
    assert other["kl"] > 0.01 and other["overlap"] < 0.99 and other["top1"] < 1
    assert list(other["top1_at"]) == ["0"]


def test_shipped_draft_is_loaded_by_its_recipe(
    target: Decoder, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dustin_runtime import pairs, recipe_files
    from recipes.smollm2_135m import ship

    tokenizer = tokenizer_hash(open_pair(str(tiny_pair.target), "self:1", offline=True).tokenizer)
    export(Stack(target, LAYERS, LENGTH), tmp_path / "run" / "draft", tokenizer, "int8")
    (tmp_path / "recipes" / "models").mkdir(parents=True)
    for module in (pairs, recipe_files, ship):
        monkeypatch.setattr(module, "recipes_folder", lambda: tmp_path / "recipes")
    ship.main(ship.parser().parse_args([str(tmp_path / "run"), "--tokenizer-vocab", "2000"]))
    pairs._model.cache_clear()
    pair = open_pair(str(tiny_pair.target), f"recipe:{ship.NAME}", offline=True)
    assert pair.draft_shape == target.shape.model_copy(update={"layers": 3})
    assert pair.load_draft(target).weights.head is target.weights.head
    pairs._model.cache_clear()
