"""Logits agree with transformers, for every family and switch; attention is injected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.scoring import attention_rows
from dustin_runtime.attention.sparse import SparseAttention
from dustin_runtime.attention.tap import QueryTap
from dustin_runtime.errors import CapacityError, ConfigError, MissingError
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape, check_context, shape_from_hf
from dustin_runtime.models.weights import build, load_decoder, random_decoder, safetensors_in

SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e5,
}
LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}
PLAIN = {"rope_type": "default", "rope_theta": 1e5}
CASES = {
    "llama-tied": ("Llama", PLAIN, {"tie_word_embeddings": True}),
    "llama-linear": ("Llama", LINEAR, {}),
    "llama-llama3": ("Llama", LLAMA3, {}),
    "llama-yarn": ("Llama", YARN, {}),
    "mistral": ("Mistral", PLAIN, {"head_dim": 16, "sliding_window": None}),
    "qwen2-tied": ("Qwen2", PLAIN, {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", YARN, {}),
    "qwen3": ("Qwen3", PLAIN, {"head_dim": 12}),
    "qwen3-yarn-tied": ("Qwen3", YARN, {"head_dim": 16, "tie_word_embeddings": True}),
}


def reference(case: str, folder: Path) -> transformers.PreTrainedModel:
    family, rope, extra = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL, rope_parameters=dict(rope), **extra)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    model.save_pretrained(folder, max_shard_size="40KB")  # several shards
    return model


def ours(folder: Path) -> Decoder:
    shape = shape_from_hf(json.loads((folder / "config.json").read_text()))
    return load_decoder(folder, shape, torch.float32, "cpu")


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_equal_transformers_prefill_in_chunks_and_ragged_batches(case: str, tmp_path: Path) -> None:
    expected_model = reference(case, tmp_path)
    model = ours(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = torch.randint(0, 96, (2, 150), generator=torch.Generator().manual_seed(1))
    expected = expected_model(ids).logits

    whole = model.logits(model.forward(ids, torch.zeros(2, dtype=torch.long), model.cache(2, 150), dense_attention))
    torch.testing.assert_close(whole, expected, rtol=2e-4, atol=2e-4)

    cache, start, parts = model.cache(2, 160), 0, []
    for size in (70, 1, 79):
        chunk = ids[:, start : start + size]
        parts.append(model.logits(model.forward(chunk, torch.full((2,), start), cache, dense_attention)))
        start += size
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=2e-4, atol=2e-4)

    # Rows of unequal length: each is prefilled alone, then both decode together.
    cache = model.cache(2, 160)
    lengths = torch.tensor([37, 120])
    for row in range(2):
        model.forward(
            ids[row : row + 1, : lengths[row]], torch.zeros(1, dtype=torch.long), cache.row(row), dense_attention
        )
    new = torch.stack([ids[row, lengths[row] : lengths[row] + 5] for row in range(2)])
    ragged = model.logits(model.forward(new, lengths, cache, dense_attention))
    for row in range(2):
        torch.testing.assert_close(ragged[row], expected[row, lengths[row] : lengths[row] + 5], rtol=2e-4, atol=2e-4)


@torch.no_grad()
def test_a_list_of_every_position_is_full_attention_and_a_short_one_is_masked_attention() -> None:
    model = random_decoder(shape(), torch.float64, "cpu")
    ids = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([20, 34])
    cache = model.cache(2, 64)
    for row in range(2):
        model.forward(
            ids[row : row + 1, : lengths[row]], torch.zeros(1, dtype=torch.long), cache.row(row), dense_attention
        )
    new = ids[:, :4]
    every = torch.arange(40).expand(1, 2, 1, 40)
    every = torch.where(every < lengths.view(1, 2, 1, 1), every, -1)
    full = model.forward(new, lengths, cache, dense_attention)
    torch.testing.assert_close(model.forward(new, lengths, cache, SparseAttention(every)), full, rtol=1e-10, atol=1e-10)

    kept = torch.tensor([[0, 3, 7, 19, -1], [1, 2, 30, 32, 33]])

    def masked(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        allowed = torch.zeros(2, 4, k.shape[1], dtype=torch.bool)
        for row in range(2):
            allowed[row, :, kept[row][kept[row] >= 0]] = True
            for token in range(4):
                allowed[row, token, lengths[row] : lengths[row] + token + 1] = True
        k, v = (x.repeat_interleave(2, dim=2).transpose(1, 2) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=allowed.unsqueeze(1)
        ).transpose(1, 2)

    expected = model.forward(new, lengths, cache, masked)
    for view in (kept.view(1, 2, 1, 5), kept.view(1, 2, 1, 5).expand(3, 2, 2, 5)):
        torch.testing.assert_close(
            model.forward(new, lengths, cache, SparseAttention(view)), expected, rtol=1e-10, atol=1e-10
        )
    assert (full - expected).abs().max() > 1e-3


@torch.no_grad()
def test_attention_rows_are_the_weights_transformers_computes(tmp_path: Path) -> None:
    expected_model = reference("qwen2-yarn", tmp_path)
    expected_model.set_attn_implementation("eager")
    model = ours(tmp_path)
    ids = torch.randint(0, 96, (1, 90), generator=torch.Generator().manual_seed(2))
    expected = expected_model(ids, output_attentions=True).attentions
    heads = [5, 0, 3]
    tap = QueryTap(dense_attention, range(3))
    cache = model.cache(1, 100)
    model.forward(ids, torch.zeros(1, dtype=torch.long), cache, tap)
    position = torch.tensor([[10, 89]])
    for layer in range(3):
        rows = torch.zeros(1, 2, 3, 100)
        q = tap.queries[layer][:, position[0]][:, :, heads]
        for entries, part in attention_rows(q, cache.keys[layer], heads, 3, position):
            rows[:, :, entries] = part
        want = expected[layer][0][heads][:, position[0]].transpose(0, 1)
        torch.testing.assert_close(rows[0, :, :, :90], want, rtol=1e-4, atol=1e-5)
        assert not rows[0, 0, :, 11:].any()


def shape(**changes: object) -> ModelShape:
    fields = {"family": "llama", "layers": 3, "hidden": 32, "ffn": 48, "query_heads": 4, "kv_heads": 2, "head_size": 8,
              "vocab": 50, "context": 64, "tied": True}  # fmt: skip
    return ModelShape(**(fields | changes))


def test_first_layers_share_the_weights() -> None:
    model = random_decoder(shape(), torch.float32, "cpu")
    draft = model.first_layers(2)
    assert draft.shape.layers == 2
    assert draft.weights.layers[1].qkv is model.weights.layers[1].qkv


def test_context_and_damage_are_refused_in_one_line(tmp_path: Path) -> None:
    model = random_decoder(shape(), torch.float32, "cpu")
    check_context(model.shape, 64, "--prompt")
    with pytest.raises(CapacityError, match="--prompt: 65 tokens exceed the model's context of 64"):
        check_context(model.shape, 65, "--prompt")
    reference("llama-tied", tmp_path)
    tensors = dict(safetensors_in(tmp_path))
    good = shape_from_hf(json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(MissingError, match=r"tensors are missing, model\.norm\.weight"):
        build(good, [(k, v) for k, v in tensors.items() if k != "model.norm.weight"], torch.float32, "cpu")
    with pytest.raises(MissingError, match=r"unexpected tensor model\.surprise"):
        build(good, [("model.surprise", torch.zeros(1))], torch.float32, "cpu")
    with pytest.raises(MissingError, match="its config says"):
        build(good, [("model.norm.weight", torch.zeros(1))], torch.float32, "cpu")
    shard = next(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(MissingError, match="download it again"):
        list(safetensors_in(tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 4}, "evenly"),
        ({"hidden_size": None}, "not a number"),
        ({"vocab_size": -1}, "vocab: "),
    ],
)
def test_unknown_switches_are_refused_by_name(change: dict[str, object], words: str) -> None:
    config = {**SMALL, "architectures": ["LlamaForCausalLM"]}
    assert shape_from_hf(config).layers == 3
    with pytest.raises(ConfigError, match=words):
        shape_from_hf(config | change)


def test_mistral_context_ends_at_its_sliding_window() -> None:
    config = {**SMALL, "architectures": ["MistralForCausalLM"], "sliding_window": 100}
    assert shape_from_hf(config).context == 100


def test_a_pass_that_ends_early_leaves_later_layers_alone() -> None:
    shape = ModelShape(
        family="llama", layers=3, hidden=24, ffn=32, query_heads=2, kv_heads=1, head_size=12, vocab=40, context=64
    )
    model = random_decoder(shape, torch.float64, "cpu")
    whole, cut = (model.cache(1, 8) for _ in range(2))
    ids, start = torch.tensor([[3, 1, 2]]), torch.zeros(1, dtype=torch.long)
    attended: list[int] = []

    def attend(layer: int, *given: Any) -> Tensor:
        attended.append(layer)
        return dense_attention(layer, *given)

    taps = [QueryTap(dense_attention, range(shape.layers)), QueryTap(attend, range(shape.layers), until=1)]
    model.forward(ids, start, whole, taps[0], 3)
    model.forward(ids, start, cut, taps[1], 3, until=1)
    assert attended == [0]  # nobody reads what the last one would attend to
    assert list(taps[1].queries) == [0, 1]
    assert all(torch.equal(taps[1].queries[layer], taps[0].queries[layer]) for layer in (0, 1))
    assert torch.equal(cut.keys[:2, :, :3], whole.keys[:2, :, :3])
    assert not cut.keys[2:].any()
