"""Drafts that store their layers and final norm only: embedding and head are the target's.

Such a folder has a `config.json` of the ordinary kind with `"dustin": {"embedding": "target"}` in it, and safetensors
weights in bf16 (or fp16, fp32), or in int8 with one fp32 scale per output row (`NAME.weight` and `NAME.weight_scale`).
Half of a small model is its embedding; a draft that is distilled from its target needs no second copy of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dustin_runtime.errors import ConfigError, MissingError
from dustin_runtime.models.shape import ModelShape

KEY = "dustin"
SCALE = "_scale"
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Headless(NamedTuple):
    """What a config says about a draft without embedding and head."""

    tokenizer: str | None
    """Hash of the tokenizer that it was trained with; None where the config does not say."""


def headless(config: Mapping[str, Any], name: str) -> Headless | None:
    """Read the marker of a `config.json`; None for a model that is complete.

    Raises:
        ConfigError: the marker is not understood; it names the key.
    """
    if (marker := config.get(KEY)) is None:
        return None
    if not isinstance(marker, dict):
        raise ConfigError(f"{name}: {KEY}: must be an object such as {{'embedding': 'target'}}")
    if unknown := sorted(marker.keys() - {"embedding", "tokenizer"}):
        raise ConfigError(f"{name}: {KEY}.{unknown[0]}: unknown key")
    if (source := marker.get("embedding")) != "target":
        raise ConfigError(f"{name}: {KEY}.embedding: {source!r} is not supported (supported: 'target')")
    tokenizer = marker.get("tokenizer")
    if tokenizer is not None and not isinstance(tokenizer, str):
        raise ConfigError(f"{name}: {KEY}.tokenizer: must be the tokenizer's hash")
    return Headless(tokenizer)


def require_fit(
    marker: Headless, draft: tuple[str, ModelShape], target: tuple[str, ModelShape], tokenizer: str
) -> None:
    """Refuse a draft that was made for another target than the one whose embedding it would read.

    Args:
        draft, target: id and shape.
        tokenizer: hash of the target's.

    Raises:
        ConfigError: names the field that differs.
    """
    (name, ours), (target_name, theirs) = draft, target
    for key, field in (("hidden_size", "hidden"), ("vocab_size", "vocab")):
        if (have := getattr(ours, field)) != (want := getattr(theirs, field)):
            raise ConfigError(
                f"{name}: {key}: the draft takes embedding and head from a target of {have}, {target_name} has {want};"
                " give the target it was made for"
            )
    if marker.tokenizer not in (None, tokenizer):
        raise ConfigError(
            f"{name}: {KEY}.tokenizer: the draft was made with another tokenizer than {target_name}'s;"
            " give the target it was made for"
        )


def dequantised(tensors: Iterable[tuple[str, Tensor]], name: str) -> Iterator[tuple[str, Tensor]]:
    """Stored tensors as weights: int8 matrices times their rows' scales in fp32, others as they are.

    Args:
        tensors: by Hugging Face name, in any order; a matrix that waits for its scale is held.

    Raises:
        MissingError: a matrix without scale, a scale without matrix, or one that does not fit.
        ConfigError: a tensor is stored in another type.
    """
    matrices: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for key, tensor in tensors:
        kind = str(tensor.dtype).removeprefix("torch.")
        owner = key.removesuffix(SCALE)
        if owner != key:
            scales[owner] = tensor
        elif tensor.dtype == torch.int8:
            matrices[owner] = tensor
        elif tensor.dtype in FLOATS:
            yield key, tensor
            continue
        else:
            raise ConfigError(f"{name}: {key} is stored as {kind} (supported: int8 with scales, 16- and 32-bit floats)")
        if owner in matrices and owner in scales:
            yield owner, _scaled(owner, matrices.pop(owner), scales.pop(owner), name)
    if matrices:
        raise MissingError(f"{name}: {min(matrices)} is int8, but {min(matrices)}{SCALE} is missing; download it again")
    if scales:
        raise MissingError(f"{name}: unexpected tensor {min(scales)}{SCALE}: it belongs to no int8 matrix")


def _scaled(key: str, matrix: Tensor, scale: Tensor, name: str) -> Tensor:
    if matrix.dim() != 2 or scale.shape != matrix.shape[:1] or scale.dtype != torch.float32:
        kind = str(scale.dtype).removeprefix("torch.")
        raise MissingError(
            f"{name}: {key}{SCALE} is {kind} {list(scale.shape)}, {key} of {list(matrix.shape)} needs float32"
            f" {list(matrix.shape[:1])}"
        )
    return matrix.float() * scale.unsqueeze(1)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in int8, rounded to the nearest, and the scale of each output row, by which its largest entry is 127.

    Args:
        weight: [out, in].

    Returns:
        int8 [out, in]; fp32 [out].
    """
    wide = weight.float()
    scale = (wide.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scale.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8), scale
