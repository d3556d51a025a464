"""Keys and values in 8 bits: float8_e4m3fn, with a scale for each KV head of a sequence in a layer.

A scale is set once, by the largest value of the prompt's first chunk, and then holds for the sequence: nothing that is
stored is ever converted again, and a CUDA graph can hold the scales' addresses. Later values may be larger, so the
scale leaves them room; those larger still are clamped. Room costs no precision, for e4m3 is a floating format: its
relative precision is the same from 448 down to 1/64. With `HEADROOM` a KV head's values have all of it down to a 200th
of the largest, and below that err by no more than a 3500th of the largest, which itself may be off by a 16th.

Scales are powers of two, so that dividing and multiplying by them is exact, in 16 bits too: a value is rounded once,
when it is stored, and every reader sees the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dustin_runtime.errors import UsageError

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The format's largest value."""
HEADROOM = 64.0
"""How much larger than all of the first chunk a later value may be, at least. A prompt may be its first token alone, of
which later values were found to be up to 43 times as large (SmolLM2-135M)."""


@dataclass(frozen=True)
class Scaled:
    """Cached keys or values, to be multiplied by their scale.

    Attributes:
        stored: [..., slots, kv_heads, head_size] float8_e4m3fn.
        scale: [..., kv_heads] fp32 powers of two.
    """

    stored: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """Of what is stored."""
        return self.stored.shape


Held = Tensor | Scaled
"""Cached keys or values of a layer, [batch, slots, kv_heads, head_size], or of several."""


def parts(held: Held) -> tuple[Tensor, Tensor | None]:
    """What lies in memory, and its scale if it has one."""
    return (held.stored, held.scale) if isinstance(held, Scaled) else (held, None)


def shown(held: Held, extent: int) -> Held:
    """The first `extent` slots."""
    if isinstance(held, Scaled):
        return Scaled(held.stored[..., :extent, :, :], held.scale)
    return held[..., :extent, :, :]


def of_layer(held: Held, layer: int) -> Held:
    """One layer of several."""
    return Scaled(held.stored[layer], held.scale[layer]) if isinstance(held, Scaled) else held[layer]


def plain(held: Held, dtype: torch.dtype) -> Tensor:
    """As a tensor of `dtype`; what is not scaled comes back as it is. A copy: for references, and once a prompt."""
    if isinstance(held, Scaled):
        return held.stored.to(dtype).mul_(held.scale.to(dtype)[..., None, :, None])
    return held


def at_slots(held: Held, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """What lies in some slots, `plain`.

    Args:
        held: of one layer; slots: [batch, kv_heads or 1, n] int64.

    Returns:
        [batch, kv_heads, n, head_size].
    """
    stored, scale = parts(held)
    index = slots.unsqueeze(3).expand(-1, stored.shape[2], -1, stored.shape[3])
    found = bits(stored).transpose(1, 2).gather(2, index)
    return found if scale is None else found.view(E4M3).to(dtype).mul_(scale.to(dtype)[..., None, None])


def bits(stored: Tensor) -> Tensor:
    """A view that torch can gather from and copy into: it has not all of that for 8-bit floats."""
    return stored.view(torch.uint8) if stored.dtype == E4M3 else stored


def scale_for(largest: Tensor) -> Tensor:
    """The scale of what has this largest absolute value: the power of two that leaves it `HEADROOM`, or just more."""
    _, exponent = torch.frexp(largest.float() * (HEADROOM / LARGEST))
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def narrowed(x: Tensor, scale: Tensor) -> Tensor:
    """x as it is stored; what exceeds the format is clamped.

    Args:
        x: [batch, tokens, kv_heads, head_size]; scale: [batch, kv_heads].
    """
    return (x.float() / scale[:, None, :, None]).clamp(-LARGEST, LARGEST).to(E4M3)


def pick_kv_dtype(asked: str, device: str) -> torch.dtype | None:
    """What the target's keys and values are stored in; None for the model's dtype.

    Args:
        asked: `auto` or `fp8`.
        device: of torch.

    Raises:
        UsageError: it is neither, or the GPU cannot convert such numbers.
    """
    if asked == "auto":
        return None
    if asked != "fp8":
        raise UsageError(f"--kv-dtype {asked}: unknown; give auto, which is the model's, or fp8")
    if device.startswith("cuda") and (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        found = ".".join(map(str, capability))
        raise UsageError(
            f"--kv-dtype fp8: needs a GPU of compute capability 8.9 or more, this has {found}; leave it out"
        )
    return E4M3


def dtype_name(kv_dtype: torch.dtype | None, model: torch.dtype) -> str:
    """How records name what keys and values are stored in."""
    return str(kv_dtype or model).removeprefix("torch.")
