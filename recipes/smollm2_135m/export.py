"""A trained draft as the folder that the runtime loads: layers and final norm; embedding and head are the target's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dustin_runtime.errors import ConfigError
from dustin_runtime.files import atomic_path, digest_file, write_json
from dustin_runtime.models.headless import KEY, SCALE, quantised
from dustin_runtime.models.shape import ModelShape
from recipes.smollm2_135m.model import Stack

Format = Literal["int8", "bfloat16", "float32"]
FORMATS: tuple[Format, ...] = get_args(Format)

WEIGHTS = "model.safetensors"


def config_of(shape: ModelShape, tokenizer: str) -> dict[str, Any]:
    """The `config.json` of a draft with these layers.

    Args:
        tokenizer: hash of the target's.

    Raises:
        ConfigError: RoPE is scaled, which is not written here.
    """
    if shape.rope.type != "default":
        raise ConfigError(f"rope {shape.rope.type}: a draft with scaled RoPE is not written here")
    architecture = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}[shape.family]
    return {
        "architectures": [architecture],
        "hidden_act": "silu",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied,
        KEY: {"embedding": "target", "tokenizer": tokenizer},
    }


def named_weights(model: Stack) -> Iterator[tuple[str, Tensor]]:
    """The trained tensors under their Hugging Face names, fp32, projections apart."""
    shape = model.shape
    query, kv = shape.query_heads * shape.head_size, shape.kv_heads * shape.head_size
    for index, layer in enumerate(model.each_layer()):
        at = f"model.layers.{index}."
        yield f"{at}input_layernorm.weight", layer.attention_norm
        for name, part in zip("qkv", layer.qkv.split((query, kv, kv)), strict=True):
            yield f"{at}self_attn.{name}_proj.weight", part
        yield f"{at}self_attn.o_proj.weight", layer.output
        yield f"{at}post_attention_layernorm.weight", layer.mlp_norm
        for name, part in zip(("gate", "up"), layer.gate_up.split(shape.ffn), strict=True):
            yield f"{at}mlp.{name}_proj.weight", part
        yield f"{at}mlp.down_proj.weight", layer.down
    yield "model.norm.weight", model.norm


@torch.no_grad()
def export(model: Stack, folder: Path, tokenizer: str, kind: Format) -> dict[str, str]:
    """Write the folder; returns the SHA-256 of its files, as a model recipe records them.

    Norms (5,000 numbers) stay in fp32 beside int8 matrices.
    """
    from safetensors.torch import save_file

    stored: dict[str, Tensor] = {}
    for name, weight in named_weights(model):
        if kind == "int8" and weight.dim() == 2:
            stored[name], stored[f"{name}{SCALE}"] = (x.cpu() for x in quantised(weight))
        else:
            stored[name] = weight.to(torch.bfloat16 if kind == "bfloat16" else torch.float32).contiguous().cpu()
    write_json(folder / "config.json", config_of(model.shape, tokenizer))
    with atomic_path(folder / WEIGHTS) as temporary:
        save_file(stored, temporary)
    return {name: digest_file(folder / name) for name in ("config.json", WEIGHTS)}


@torch.no_grad()
def round_as_stored(model: Stack) -> None:
    """Replace the matrices by what int8 keeps of them, so that what ships can be measured."""
    for layer in model.each_layer():
        for parameter in layer.parameters():
            if parameter.dim() == 2:
                matrix, scale = quantised(parameter)
                parameter.copy_(matrix.float() * scale.unsqueeze(1))
