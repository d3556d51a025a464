"""Small GGUF files, written with the `gguf` package, for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, FFN, HEADS, KV_HEADS, HEAD, VOCAB, LAYERS = 64, 96, 4, 2, 16, 40, 2
LAYER = {
    "attn_norm.weight": (HIDDEN,),
    "attn_q.weight": (HEADS * HEAD, HIDDEN),
    "attn_k.weight": (KV_HEADS * HEAD, HIDDEN),
    "attn_v.weight": (KV_HEADS * HEAD, HIDDEN),
    "attn_output.weight": (HIDDEN, HEADS * HEAD),
    "ffn_norm.weight": (HIDDEN,),
    "ffn_gate.weight": (FFN, HIDDEN),
    "ffn_up.weight": (FFN, HIDDEN),
    "ffn_down.weight": (HIDDEN, FFN),
}
BIASES = {f"attn_{x}.bias": LAYER[f"attn_{x}.weight"][:1] for x in "qkv"}
NORMS = {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}


def tensors_of(architecture: str = "llama", *, tied: bool = True) -> dict[str, np.ndarray]:
    """Random tensors of a small model, under their GGUF names."""
    random = np.random.default_rng(0)
    extra = {"qwen2": BIASES, "qwen3": NORMS}.get(architecture, {})
    sizes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    sizes |= {f"blk.{layer}.{name}": size for layer in range(LAYERS) for name, size in (LAYER | extra).items()}
    if not tied:
        sizes["output.weight"] = (VOCAB, HIDDEN)
    return {name: random.standard_normal(size).astype(np.float32) for name, size in sizes.items()}


def fields_of(architecture: str = "llama") -> dict[str, Any]:
    """Metadata of that model, without the architecture's prefix."""
    return {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 50000.0,
        "rope.dimension_count": HEAD,
    }


def write(
    path: Path,
    tensors: dict[str, np.ndarray],
    fields: dict[str, Any],
    architecture: str = "llama",
    kind: GGMLQuantizationType | None = None,
    edit: Callable[[GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write a GGUF file; matrices are quantised to `kind` if one is given, and `edit` may add any metadata."""
    writer = GGUFWriter(path, architecture)
    for key, value in fields.items():
        name = f"{architecture}.{key}"
        if isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    edit(writer)
    for name, values in tensors.items():
        if kind is not None and values.ndim == 2:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
ALPHABET = sorted(ByteLevel.alphabet())
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "Ġ Ġ", "a b", "ab c", "Ã ©"]


def vocabulary(merges: list[str] = MERGES) -> list[tuple[str, int]]:
    """Tokens and their types: bytes, merged pieces, and one special token of each kind at the end."""
    merged = [merge.replace(" ", "") for merge in merges]
    return [(token, NORMAL) for token in (*ALPHABET, *merged)] + [
        ("<|end|>", CONTROL),
        ("<tool>", USER_DEFINED),
        ("[PAD0]", UNUSED),
        ("[PAD1]", UNUSED),
    ]


def write_tokenizer(
    path: Path,
    pre: str | None,
    merges: list[str] = MERGES,
    tokens: list[tuple[str, int]] | None = None,
    model: str = "gpt2",
    **fields: int | bool,
) -> Path:
    """A GGUF file that holds a tokenizer and no tensors; `fields` are keys below `tokenizer.ggml`."""
    entries = vocabulary(merges) if tokens is None else tokens

    def edit(writer: GGUFWriter) -> None:
        writer.add_string("tokenizer.ggml.model", model)
        if pre is not None:
            writer.add_string("tokenizer.ggml.pre", pre)
        writer.add_array("tokenizer.ggml.tokens", [token for token, _ in entries])
        writer.add_array("tokenizer.ggml.token_type", [kind for _, kind in entries])
        writer.add_array("tokenizer.ggml.merges", merges)
        for key, value in fields.items():
            if isinstance(value, bool):
                writer.add_bool(f"tokenizer.ggml.{key}", value)
            else:
                writer.add_uint32(f"tokenizer.ggml.{key}", value)

    return write(path, {}, {}, edit=edit)
