"""Kernels that attend to the whole cache: ours, and those that a reader would compare it with.

Torch's flash attention, and with it flash-attn 2, gives every query head its own tile, so a key is read once per head
of its group. Given the heads of a group as if they were further tokens, it reads a key once; but then the causal mask
among the new tokens has to go. That costs nothing and changes no time, so it is a fair figure for a full cache.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention, dense_reference
from dustin_runtime.kernels import usable

Call = Callable[[Tensor, Tensor], Tensor]
"""Keys and values [batch, extent, kv_heads, head_size] to the result, in the layout of the queries as prepared."""
OURS = "dustin (Triton)"
REFERENCE = "torch reference"
UNPACKED = "torch flash, unpacked"
FLASHINFER_WORKSPACE = 256 * 2**20


@dataclass(frozen=True)
class FullKernel:
    """A way to attend to everything.

    Attributes:
        bind: from queries [batch, tokens, query_heads, head_size], keys like those to come, and `start`, to the call
            that is timed. Anything that a real engine does elsewhere (packing queries, plans) happens here.
        packed: the query heads of a KV head share a tile, so that each key is read once.
        causal: among the new tokens; a kernel without sees all of them.
        ragged: rows may differ in length.
        required: a wrong result is a reason to print nothing, not to leave this kernel out.
    """

    name: str
    bind: Callable[[Tensor, Tensor, Tensor], Call]
    packed: bool
    causal: bool = True
    ragged: bool = False
    required: bool = True

    def restore(self, out: Tensor, like: Tensor) -> Tensor:
        """A call's result in the shape of the queries."""
        if self.causal:
            return out.reshape(like.shape)
        batch, tokens, query_heads, head_size = like.shape
        kv_heads = out.shape[2]
        split = out.reshape(batch, tokens, query_heads // kv_heads, kv_heads, head_size)
        return split.transpose(2, 3).reshape(like.shape)

    def reference(self, q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Tensor:
        """What the result must be, in float64."""
        q, k, v = q.double(), k.double(), v.double()
        if self.causal:
            return dense_reference(q, k, v, start)
        last = start + q.shape[1] - 1
        each = [dense_reference(q[:, token : token + 1], k, v, last) for token in range(q.shape[1])]
        return torch.cat(each, dim=1)


def full_kernels(device: torch.device, dtype: torch.dtype, head_size: int) -> tuple[list[FullKernel], dict[str, str]]:
    """The kernels of this machine, and why others are missing, by name."""
    probe = torch.empty(1, 1, 1, head_size, dtype=dtype, device=device)
    ours = FullKernel(OURS if usable(probe, head_size) else REFERENCE, _bind_ours, packed=True, ragged=True)
    if device.type != "cuda":
        return [ours], dict.fromkeys((OURS, UNPACKED), "no CUDA device")
    if dtype not in (torch.bfloat16, torch.float16) or head_size > 256:
        return [ours], {"flash kernels": f"serve 16-bit types and head sizes up to 256, not {dtype} and {head_size}"}
    kernels = [
        ours,
        FullKernel("torch flash, packed", _bind_packed(_torch_flash), packed=True, causal=False),
        FullKernel(UNPACKED, _bind_plain(_torch_flash), packed=False),
    ]
    missing: dict[str, str] = {}
    for name, module, make in _OPTIONAL:
        try:
            kernels += make(importlib.import_module(module))
        except Exception as error:  # absent, or built for another torch, or without a compiler: all that counts is why
            missing[name] = " ".join(str(error).split())
    return kernels, missing


def _bind_ours(q: Tensor, k: Tensor, start: Tensor) -> Call:
    return lambda keys, values: dense_attention(0, q, keys, values, start)


def _bind_plain(attend: Callable[[Tensor, Tensor, Tensor, bool], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Call]:
    def bind(q: Tensor, k: Tensor, start: Tensor) -> Call:
        return lambda keys, values: attend(q, keys, values, True)

    return bind


def _bind_packed(attend: Callable[[Tensor, Tensor, Tensor, bool], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Call]:
    def bind(q: Tensor, k: Tensor, start: Tensor) -> Call:
        batch, tokens, _, head_size = q.shape
        kv_heads = k.shape[2]
        rows = q.view(batch, tokens, kv_heads, -1, head_size).transpose(2, 3).reshape(batch, -1, kv_heads, head_size)
        return lambda keys, values: attend(rows, keys, values, False)

    return bind


def _torch_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    # The public call aligns a causal mask to the first key; the operation behind it to the last.
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=q.shape[3] ** -0.5
    )
    return _first(out)


def _flash_attn_2(module: Any) -> list[FullKernel]:
    function = module.flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return _first(function(q, k, v, causal=causal))

    return [
        FullKernel("flash-attn 2, packed", _bind_packed(attend), packed=True, causal=False, required=False),
        FullKernel("flash-attn 2, unpacked", _bind_plain(attend), packed=False, required=False),
    ]


def _flash_attn_3(module: Any) -> list[FullKernel]:
    function = module.flash_attn_with_kvcache  # unlike flash_attn_func, it splits over keys by itself

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return _first(function(q, k, v, causal=causal, num_splits=0, pack_gqa=True))

    return [FullKernel("flash-attn 3", _bind_plain(attend), packed=True, required=False)]


def _flashinfer(module: Any) -> list[FullKernel]:
    def bind(q: Tensor, k: Tensor, start: Tensor) -> Call:
        batch, tokens, query_heads, head_size = q.shape
        extent, kv_heads = k.shape[1], k.shape[2]
        workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=q.device)
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        order = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        wrapper.plan(  # every row is one page
            order * tokens, order, order[:batch], torch.full_like(order[:batch], extent),
            query_heads, kv_heads, head_size, extent, causal=True, q_data_type=q.dtype, kv_data_type=k.dtype,
        )  # fmt: skip
        rows = q.reshape(batch * tokens, query_heads, head_size)

        def call(keys: Tensor, values: Tensor) -> Tensor:
            return _first(wrapper.run(rows, (keys.transpose(1, 2), values.transpose(1, 2))))

        return call

    return [FullKernel("flashinfer", bind, packed=True, required=False)]


_OPTIONAL: tuple[tuple[str, str, Callable[[Any], list[FullKernel]]], ...] = (
    ("flash-attn 2", "flash_attn", _flash_attn_2),
    ("flash-attn 3", "flash_attn_interface", _flash_attn_3),
    ("flashinfer", "flashinfer", _flashinfer),
)


def _first(out: Any) -> Tensor:
    found: Tensor = out if isinstance(out, Tensor) else out[0]
    return found
