"""GGUF models: shape, names, row order, streaming, and every way in which a file can be unusable."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf_files import FFN, HEAD, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, fields_of, tensors_of, write
from hypothesis import given, settings
from hypothesis import strategies as st

from dustin_runtime.errors import ConfigError, DustinError, MissingError
from dustin_runtime.models.gguf import read_gguf
from dustin_runtime.models.gguf_header import read_header
from dustin_runtime.models.source import resolve


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order: within a head, row i of the first half is followed by row i of the second."""
    rows = []
    for head in np.split(weight, heads):
        half = len(head) // 2
        rows += [head[index] for pair in range(half) for index in (pair, pair + half)]
    return np.stack(rows)


def test_llama_rows_return_to_the_hugging_face_order(tmp_path: Path) -> None:
    stored = tensors_of()
    original = {name: values.copy() for name, values in stored.items()}
    for layer in range(LAYERS):
        stored[f"blk.{layer}.attn_q.weight"] = permuted(stored[f"blk.{layer}.attn_q.weight"], HEADS)
        stored[f"blk.{layer}.attn_k.weight"] = permuted(stored[f"blk.{layer}.attn_k.weight"], KV_HEADS)
    model = read_gguf(write(tmp_path / "m.gguf", stored, fields_of()))
    loaded = dict(model.tensors())
    assert loaded.keys() == model.names.keys()
    for ours, info in model.names.items():
        assert np.array_equal(loaded[ours].numpy(), original[info.name]), ours
    assert model.shape.tied
    assert "lm_head.weight" not in loaded


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_rows_stay_and_its_extras_are_found(architecture: str, tmp_path: Path) -> None:
    stored = tensors_of(architecture, tied=False)
    model = read_gguf(write(tmp_path / "m.gguf", stored, fields_of(), architecture))
    loaded = dict(model.tensors())
    assert np.array_equal(loaded["model.layers.1.self_attn.k_proj.weight"].numpy(), stored["blk.1.attn_k.weight"])
    assert np.array_equal(loaded["lm_head.weight"].numpy(), stored["output.weight"])
    assert len(loaded) == len(stored)
    assert (model.shape.family, model.shape.tied) == (architecture, False)
    assert (model.shape.qkv_bias, model.shape.qk_norm) == (architecture == "qwen2", architecture == "qwen3")


def test_shape_holds_the_numbers_that_were_meant(tmp_path: Path) -> None:
    shape = read_gguf(write(tmp_path / "m.gguf", tensors_of(), fields_of())).shape
    assert (shape.layers, shape.hidden, shape.ffn, shape.vocab) == (LAYERS, HIDDEN, FFN, VOCAB)
    assert (shape.query_heads, shape.kv_heads, shape.head_size) == (HEADS, KV_HEADS, HEAD)
    assert (shape.context, shape.rope_theta, shape.norm_eps) == (512, 50000.0, 1e-5)  # not the 32-bit neighbour of 1e-5
    assert shape.rope.type == "default"


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_tensors_equal_the_librarys(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tensors_of("qwen2"), fields_of(), "qwen2", GGMLQuantizationType[kind])
    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    model = read_gguf(path)
    for name, values in model.tensors(dtype):
        tensor = stored[model.names[name].name]
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        assert values.dtype == dtype
        assert torch.equal(values, expected.to(dtype)), name


def test_header_equals_the_librarys_reading(tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        writer.add_custom_alignment(64)
        writer.add_array("test.strings", ["", "é", "漢字"])
        writer.add_array("test.numbers", [1, -2, 3])
        writer.add_bool("test.flag", True)
        writer.add_uint64("test.large", 1 << 40)

    path = write(tmp_path / "m.gguf", tensors_of(), fields_of(), kind=GGMLQuantizationType.Q8_0, edit=edit)
    header, theirs = read_header(path), GGUFReader(path)
    assert {name: (info.offset, info.size, info.kind) for name, info in header.tensors.items()} == {
        tensor.name: (tensor.data_offset, tensor.n_bytes, tensor.tensor_type) for tensor in theirs.tensors
    }
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert header.metadata[key] == pytest.approx(field.contents()), key


ROPES = [
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"type": "linear", "factor": 4.0}),
    (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
        {"type": "yarn", "factor": 4.0, "original_context": 128},
    ),
    ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, {"type": "yarn", "original_context": 512}),
    ({"rope.scaling.type": "none"}, {"type": "default"}),
]


@pytest.mark.parametrize(("fields", "expected"), ROPES)
def test_rope_scaling_is_read(fields: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    rope = read_gguf(write(tmp_path / "m.gguf", tensors_of(), fields_of() | fields)).shape.rope
    assert rope.model_dump() | expected == rope.model_dump()


def llama3_divisors(factor: float, low: float = 1.0, high: float = 4.0, original: int = 8192) -> np.ndarray:
    """As a converter writes them, frequency by frequency."""
    divisors = []
    for i in range(0, HEAD, 2):
        wavelength = 2 * math.pi * 50000.0 ** (i / HEAD)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    tensors = tensors_of() | {"rope_freqs.weight": llama3_divisors(32.0)}
    rope = read_gguf(write(tmp_path / "m.gguf", tensors, fields_of())).shape.rope
    assert (rope.type, rope.factor, rope.original_context) == ("llama3", 32.0, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)


def test_divisors_of_another_scaling_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of() | {"rope_freqs.weight": llama3_divisors(32.0, original=4096)}
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        read_gguf(write(tmp_path / "m.gguf", tensors, fields_of()))


def test_sliding_window_limits_the_context(tmp_path: Path) -> None:
    fields = fields_of() | {"attention.sliding_window": 256}
    assert read_gguf(write(tmp_path / "m.gguf", tensors_of(), fields)).shape.context == 256


REFUSED = [
    ({"rope.scaling.type": "longrope"}, "longrope"),
    ({"expert_count": 8}, "expert_count"),
    ({"attention.scale": 0.5}, "attention.scale"),
    (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_attn_factor": 1.5},
        "yarn_attn_factor",
    ),
    ({"rope.dimension_count": 8}, "rope.dimension_count"),
    ({"feed_forward_length": [FFN, FFN]}, "feed_forward_length"),
    ({"attention.head_count": 0}, "attention.head_count"),
    ({"context_length": "long"}, "context_length"),
    ({"feed_forward_length": 128}, r"ffn_gate\.weight is \[96, 64\]"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED)
def test_settings_the_decoder_lacks_are_refused_by_name(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        read_gguf(write(tmp_path / "m.gguf", tensors_of(), fields_of() | fields))
    assert "m.gguf" in str(caught.value)


def test_unknown_architecture_tensor_and_encoding_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(ConfigError, match="gemma3"):
        read_gguf(write(path, tensors_of(), fields_of(), "gemma3"))
    biased = tensors_of() | {"blk.0.attn_q.bias": np.zeros(HIDDEN, dtype=np.float32)}
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_q\.bias"):
        read_gguf(write(path, biased, fields_of()))
    whole_numbers = tensors_of() | {"output_norm.weight": np.zeros(HIDDEN, dtype=np.int8)}
    with pytest.raises(ConfigError, match=r"output_norm\.weight is encoded as I8"):
        read_gguf(write(path, whole_numbers, fields_of()))
    with pytest.raises(ConfigError, match="llama-gguf-split"):
        read_gguf(write(path, tensors_of(), fields_of(), edit=lambda writer: writer.add_uint16("split.count", 3)))


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = tensors_of()
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(MissingError, match=r"blk\.1\.ffn_up\.weight"):
        read_gguf(write(tmp_path / "m.gguf", tensors, fields_of()))


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 0.9999), replacement=st.binary(max_size=12))
def test_cut_or_overwritten_files_end_in_one_line(
    share: float, replacement: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    whole = folder / "whole.gguf"
    if not whole.exists():
        write(whole, tensors_of(), fields_of())
    data = whole.read_bytes()
    damaged = folder / "damaged.gguf"
    damaged.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(MissingError, match=r"damaged\.gguf") as caught:
        read_gguf(damaged)
    assert "\n" not in str(caught.value)
    header = 2048  # well inside metadata and tensor descriptions
    at = int(header * share)
    damaged.write_bytes(data[:at] + replacement + data[at + len(replacement) :])
    said = "damaged.gguf"  # the damage may fall into a value that remains valid
    try:
        read_gguf(damaged)
    except DustinError as error:
        said = str(error)
    assert "damaged.gguf" in said


def test_text_and_absent_files_are_missing_models(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("no model")
    with pytest.raises(MissingError, match="not a GGUF file"):
        read_gguf(tmp_path / "m.gguf")
    with pytest.raises(MissingError, match=r"absent\.gguf: no such file"):
        read_gguf(tmp_path / "absent.gguf")


def test_file_that_shrinks_after_opening_is_reported(tmp_path: Path) -> None:
    model = read_gguf(write(tmp_path / "m.gguf", tensors_of(), fields_of()))
    os.truncate(tmp_path / "m.gguf", 20000)
    with pytest.raises(MissingError, match="truncated in tensor"):
        list(model.tensors())


def test_smollm2_answers_in_the_transformers_model() -> None:
    """Wrong rows, names or values anywhere would leave no sense in what it says."""
    from transformers import LlamaConfig, LlamaForCausalLM

    source = resolve("smollm2", offline=True)
    model = read_gguf(source.path)
    shape = model.shape
    assert (shape.context, shape.rope_theta, shape.parameters) == (8192, 100000.0, 134515008)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.kv_heads,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        reference = LlamaForCausalLM(config)
    reference.load_state_dict(dict(model.tensors()), assign=True, strict=False)
    reference.tie_weights()
    reference.model.rotary_emb = type(reference.model.rotary_emb)(config)
    tokenizer = source.tokenizer()
    for question, answer in {
        "The capital of Italy is": " Rome",
        "The opposite of hot is": " cold",
        "The capital of France is": " Paris",
    }.items():
        with torch.no_grad():
            logits = reference(torch.tensor([tokenizer.encode(question)])).logits
        assert tokenizer.decode(int(logits[0, -1].argmax())) == answer


def test_streaming_holds_one_tensor() -> None:
    """The whole model is 538 MB in 32 bits, its largest tensor 113 MB."""
    script = (
        "import resource, sys; from pathlib import Path; from dustin_runtime.models.gguf import read_gguf\n"
        "model = read_gguf(Path(sys.argv[1])); peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "for name, _ in model.tensors(): pass\n"
        "print(peak() - before)"
    )
    path = resolve("smollm2", offline=True).path
    result = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 250 * 1024


@pytest.mark.qwen
def test_real_qwen_files_open_and_decode() -> None:
    folder = os.environ.get("DUSTIN_QWEN_PAIR")
    if not folder:
        pytest.skip("DUSTIN_QWEN_PAIR is not set")
    for path in Path(folder).glob("Qwen2.5-Coder-*.gguf"):
        model = read_gguf(path)
        assert model.shape.qkv_bias
        assert model.shape.norm_eps == 1e-6
        values = model.tensor("model.layers.0.mlp.down_proj.weight")
        assert 0.001 < float(values.std()) < 0.1
