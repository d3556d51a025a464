"""Rotary position embedding (arXiv 2104.09864), rotate-half layout, with the scalings of the supported families."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dustin_runtime.models.shape import ModelShape, RopeScaling


def inverse_frequencies(head_size: int, theta: float, rope: RopeScaling) -> tuple[Tensor, float]:
    """Angular speed of each pair of channels, and the factor on cos and sin.

    Returns:
        frequencies: [head_size / 2] fp32, radians per position.
        attention_factor: 1 except for YaRN.
    """
    exponent = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    base = 1.0 / theta**exponent
    if rope.type == "linear":
        return base / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(base, rope), 1.0
    if rope.type == "yarn":
        factor = rope.attention_factor
        return _yarn(base, head_size, theta, rope), factor if factor is not None else 0.1 * math.log(rope.factor) + 1.0
    return base, 1.0


def _llama3(base: Tensor, rope: RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between blended."""
    assert rope.original_context is not None
    turns = rope.original_context * base / (2 * math.pi)  # over the trained context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * base / rope.factor + blend * base
    scaled = torch.where(turns < rope.low_freq_factor, base / rope.factor, blended)
    return torch.where(turns > rope.high_freq_factor, base, scaled)


def _yarn(base: Tensor, head_size: int, theta: float, rope: RopeScaling) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): a ramp over channels between interpolated and kept frequencies."""
    assert rope.original_context is not None
    trained = rope.original_context

    def channel_with(turns: float) -> float:
        return head_size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(channel_with(rope.beta_fast)), 0)
    high = min(math.ceil(channel_with(rope.beta_slow)), head_size - 1)
    ramp = ((torch.arange(head_size // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


class Rope:
    """Tables of cos and sin up to a length; `models.ops.rope_append` applies them."""

    def __init__(self, shape: ModelShape, length: int, device: torch.device | str = "cpu") -> None:
        frequencies, factor = inverse_frequencies(shape.head_size, shape.rope_theta, shape.rope)
        angles = torch.outer(torch.arange(length).float(), frequencies)
        self.cos = (angles.cos() * factor).to(device)  # [length, head_size / 2] fp32
        self.sin = (angles.sin() * factor).to(device)
