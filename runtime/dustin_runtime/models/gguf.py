"""GGUF files as models: shape, and weights under their Hugging Face names, dequantised one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from dustin_runtime.errors import ConfigError, MissingError
from dustin_runtime.models.gguf_header import GgufHeader, TensorInfo, read_header
from dustin_runtime.models.shape import ModelShape, shape_from_hf

if TYPE_CHECKING:
    from dustin_runtime.parallel.shards import Cut
    from dustin_runtime.parallel.split import Part

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LAYER_MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Each would change the arithmetic of a layer; absent, or of the value given here, it does not.
_REFUSED_UNLESS = {
    "expert_count": 0,
    "attention.scale": 0.0,
    "attention.temperature_scale": 0.0,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_CHUNK = 1 << 22  # values dequantised at a time: bounds the temporary arrays to a few dozen MB
_ROW = 1 << 14  # values per row handed to numpy: below it the interpreter dominates, above it the cache does


@dataclass(frozen=True)
class GgufFile:
    """A readable GGUF model. `names` maps each Hugging Face tensor name to its tensor in the file."""

    header: GgufHeader
    shape: ModelShape
    names: Mapping[str, TensorInfo]

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The file's key-value pairs."""
        return self.header.metadata

    def tensors(
        self, dtype: torch.dtype = torch.float32, share: Part | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of which something is wanted in turn; memory holds one of them and a chunk of a few dozen MB."""
        for name in self.names:
            if share and not share.holds(name):
                continue
            yield name, self.tensor(name, dtype, share)

    def tensor(self, name: str, dtype: torch.dtype = torch.float32, share: Part | None = None) -> torch.Tensor:
        """One tensor by its Hugging Face name, in the layout of `transformers`: `[out, in]` or `[out]`, on the CPU.

        Args:
            share: what to read of it; all if not given.

        Raises:
            MissingError: the file has changed or shrunk since it was opened.
        """
        info = self.names[name]
        cut = share.cut(name) if share else None
        values = _cut_out(self.header.path, info, dtype, cut) if cut else _dequantised(self.header.path, info, dtype)
        if self.metadata["general.architecture"] == "llama" and (".attn_q." in info.name or ".attn_k." in info.name):
            return _half_rotation(values, values.shape[0] // self.shape.head_size)  # a share has whole heads
        return values


def read_gguf(path: Path) -> GgufFile:
    """Open a GGUF model: its metadata is read and checked against its tensors, the weights are not read yet.

    Raises:
        MissingError: the file is absent, not GGUF, damaged, truncated, or lacks a tensor.
        ConfigError: an architecture, setting, tensor or encoding in it is not supported; it is named.
    """
    header = read_header(path)
    shape = _shape(header)
    if shape.layers > len(header.tensors):
        raise MissingError(f"{path}: {len(header.tensors)} tensors for {shape.layers} layers; download it again")
    expected = _layout(shape)
    for name, (theirs, size) in expected.items():
        if (found := header.tensors.get(theirs)) is None:
            raise MissingError(f"{path}: tensor {theirs} ({name}) is missing; convert the model again")
        if found.shape != size:
            raise ConfigError(f"{path}: tensor {theirs} is {list(found.shape)}, its metadata say {list(size)}")
    known = {theirs for theirs, _ in expected.values()} | {_ROPE_FACTORS}
    if unknown := sorted(header.tensors.keys() - known):
        raise ConfigError(f"{path}: tensor {unknown[0]} is not part of a supported {shape.family} model")
    _check_encodings(header)
    return GgufFile(header, shape, {name: header.tensors[theirs] for name, (theirs, _) in expected.items()})


def _layout(shape: ModelShape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Hugging Face name to GGUF name and size, of every tensor that a model of this shape has."""
    queries, keys = shape.query_heads * shape.head_size, shape.kv_heads * shape.head_size
    sizes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (shape.hidden,),
        "self_attn.q_proj": (queries, shape.hidden),
        "self_attn.k_proj": (keys, shape.hidden),
        "self_attn.v_proj": (keys, shape.hidden),
        "self_attn.o_proj": (shape.hidden, queries),
        "post_attention_layernorm": (shape.hidden,),
        "mlp.gate_proj": (shape.ffn, shape.hidden),
        "mlp.up_proj": (shape.ffn, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.ffn),
    }
    if shape.qk_norm:
        sizes |= {"self_attn.q_norm": (shape.head_size,), "self_attn.k_norm": (shape.head_size,)}
    layout: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("token_embd.weight", (shape.vocab, shape.hidden))
    }
    for layer in range(shape.layers):
        for module, size in sizes.items():
            ours, theirs = f"model.layers.{layer}.{module}", f"blk.{layer}.{_LAYER_MODULES[module]}"
            layout[f"{ours}.weight"] = (f"{theirs}.weight", size)
            if shape.qkv_bias and module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                layout[f"{ours}.bias"] = (f"{theirs}.bias", size[:1])
    layout["model.norm.weight"] = ("output_norm.weight", (shape.hidden,))
    if not shape.tied:
        layout["lm_head.weight"] = ("output.weight", (shape.vocab, shape.hidden))
    return layout


def _shape(header: GgufHeader) -> ModelShape:
    """The model's shape: its metadata, read as the Hugging Face config they were made from."""
    path, metadata = header.path, header.metadata
    name = metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise ConfigError(f"{path}: architecture {name or 'not given'} is not supported (supported: {supported})")

    def given(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{name}.{key}")
        if isinstance(value, list):
            raise ConfigError(f"{path}: {name}.{key} differs between layers: not supported")
        if value is not None and not isinstance(value, int | float):
            raise ConfigError(f"{path}: {name}.{key} is {value!r}, not a number; convert the model again")
        return default if value is None else value

    def need(key: str) -> Any:
        if not (value := given(key)) or value < 0:
            raise ConfigError(f"{path}: {name}.{key} is missing or not positive; convert the model again")
        return value

    for key, neutral in _REFUSED_UNLESS.items():
        if given(key, neutral) != neutral:
            raise ConfigError(f"{path}: {name}.{key} = {given(key)} is not supported")
    if (embedding := header.tensors.get("token_embd.weight")) is None:
        raise MissingError(f"{path}: tensor token_embd.weight is missing; convert the model again")
    heads = need("attention.head_count")
    head_size = given("attention.key_length") or need("embedding_length") // heads
    for key in ("rope.dimension_count", "attention.value_length"):
        if given(key, head_size) != head_size:
            raise ConfigError(f"{path}: {name}.{key} {given(key)} is not the head size {head_size}; not supported")
    context = need("context_length")
    theta = given("rope.freq_base", 10000.0)
    config = {
        "architectures": [_ARCHITECTURES[name]],
        "num_hidden_layers": need("block_count"),
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": given("attention.head_count_kv", heads),
        "head_dim": head_size,
        "vocab_size": embedding.shape[0],
        # Beyond a sliding window the model would need windowed attention, which it does not need within it.
        "max_position_embeddings": min(context, given("attention.sliding_window") or context),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(header, name, theta, head_size),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    return shape_from_hf(config, str(path))


def _rope_scaling(header: GgufHeader, architecture: str, theta: float, head_size: int) -> dict[str, Any]:
    """RoPE scaling in the terms of a Hugging Face config; `default` when there is none."""

    def given(key: str) -> Any:
        return header.metadata.get(f"{architecture}.rope.scaling.{key}")

    kind = given("type") or "none"
    if _ROPE_FACTORS in header.tensors:
        if kind != "none":
            raise ConfigError(f"{header.path}: {_ROPE_FACTORS} together with rope.scaling.type {kind}: not supported")
        return _llama3_scaling(header, theta, head_size)
    scaling = {
        "rope_type": "default" if kind == "none" else kind,
        "factor": given("factor"),
        "original_max_position_embeddings": given("original_context_length"),
        "beta_fast": given("yarn_beta_fast"),
        "beta_slow": given("yarn_beta_slow"),
    }
    return {key: value for key, value in scaling.items() if value is not None}


def _llama3_scaling(header: GgufHeader, theta: float, head_size: int) -> dict[str, Any]:
    """Recover Llama 3's scaling from the divisors that it gives each frequency, the only trace a GGUF file keeps.

    The largest divisor is the factor. The three other numbers are those that every Llama 3 publishes; they are accepted
    only if they reproduce the whole tensor.
    """
    found = _dequantised(header.path, header.tensors[_ROPE_FACTORS], torch.float32).double()
    factor = float(found.max())
    if bool((found == 1.0).all()):
        return {"rope_type": "default"}
    wavelength = 2 * math.pi * theta ** (torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    low, high, original = _LLAMA3.values()
    kept = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    expected = 1.0 / ((1.0 - kept) / factor + kept)
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-4):
        raise ConfigError(f"{header.path}: {_ROPE_FACTORS} holds other factors than Llama 3's: not supported")
    return {"rope_type": "llama3", "factor": round(factor, 4), **_LLAMA3}


def _check_encodings(header: GgufHeader) -> None:
    """Refuse an encoding that cannot be decoded now, rather than in the middle of loading."""
    for kind, info in {info.kind: info for info in header.tensors.values()}.items():
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
        except NotImplementedError:
            raise ConfigError(f"{header.path}: tensor {info.name} is encoded as {kind.name}: not supported") from None


def _dequantised(path: Path, info: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
    """Read and dequantise a tensor chunk by chunk. A chunk is whole blocks, whatever the tensor's own rows are."""
    block, block_bytes = GGML_QUANT_SIZES[info.kind]
    values = torch.empty(info.shape, dtype=dtype)
    flat = values.view(-1)
    with path.open("rb") as handle:
        handle.seek(info.offset)
        for start in range(0, flat.numel(), _CHUNK):
            count = min(_CHUNK, flat.numel() - start)
            raw = np.fromfile(handle, np.uint8, count // block * block_bytes)
            if raw.size != count // block * block_bytes:
                raise MissingError(f"{path}: truncated in tensor {info.name}; download it again")
            flat[start : start + count] = _values(raw, info.kind, count)
    return values


def _cut_out(path: Path, info: TensorInfo, dtype: torch.dtype, cut: Cut) -> torch.Tensor:
    """The same of some rows, or some columns.

    Rows are whole blocks, one row behind the other. A block cannot be cut: of columns the blocks that cover them are
    read and dequantised, and what lies beyond the cut at either end is dropped.
    """
    height, width = (1, *info.shape)[-2:]
    if cut.axis == 0 and len(info.shape) > 1:
        rows, columns = cut.part, range(width)
    else:
        rows, columns = range(height), cut.part
    block, block_bytes = GGML_QUANT_SIZES[info.kind]
    first, last = columns.start // block, -(-columns.stop // block)
    try:
        size = (height, width // block * block_bytes)
        stored = np.memmap(path, np.uint8, "r", info.offset, size)[:, first * block_bytes : last * block_bytes]
    except ValueError:
        raise MissingError(f"{path}: truncated in tensor {info.name}; download it again") from None
    values = torch.empty((len(rows), len(columns)), dtype=dtype)
    wide = (last - first) * block
    at_once = max(_CHUNK // max(wide, 1), 1)
    skipped = columns.start - first * block
    for begin in range(0, len(rows), at_once):
        raw = np.array(stored[rows.start + begin : min(rows.start + begin + at_once, rows.stop)])
        covering = _values(raw, info.kind, len(raw) * wide).view(len(raw), wide)
        values[begin : begin + len(raw)] = covering[:, skipped : skipped + len(columns)]
    return values if len(info.shape) > 1 else values[0]


def _values(raw: np.ndarray[Any, np.dtype[np.uint8]], kind: GGMLQuantizationType, count: int) -> torch.Tensor:
    """`count` values of whole blocks, in one dimension, dequantised in rows of the size that is fastest."""
    rows = raw.reshape(count // _ROW if count % _ROW == 0 else 1, -1)
    return torch.from_numpy(dequantize(rows, kind)).view(-1)


def _half_rotation(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the row order of llama.cpp's Llama conversion.

    It pairs dimensions 2i and 2i + 1 of a head for rotation; `transformers` pairs i and i + head_size / 2.
    """
    pairs = weight.view(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
