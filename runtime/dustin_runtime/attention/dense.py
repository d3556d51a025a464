"""Causal attention of new tokens over the whole cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dustin_runtime.attention import flash
from dustin_runtime.kernels import usable
from dustin_runtime.scaled import Held, plain

MOST_TOKENS = 65
"""New tokens up to which the split kernel serves (the deepest verification); more are a prefill."""


def dense_attention(layer: int, q: Tensor, k: Held, v: Held, start: Tensor) -> Tensor:
    """Attend to everything; implements `models.decoder.Attention` (shapes there). Rows may differ in length."""
    if usable(q, heads_of=q.shape[3]) and q.shape[1] <= MOST_TOKENS:
        from dustin_runtime.kernels.dense import dense_attention as kernel

        return kernel(q, k, v, start)
    if flash.usable(q):
        # It takes 16 bits: of a cache of 8, a copy of what this layer shows, freed before the next layer's is made.
        return flash.flash_attention(q, plain(k, q.dtype), plain(v, q.dtype))
    return dense_reference(q, k, v, start)


class FullAttention:
    """Verification with the whole cache; implements `policies.Verification`."""

    def __call__(self, layer: int, q: Tensor, k: Held, v: Held, start: Tensor) -> Tensor:
        return dense_attention(layer, q, k, v, start)

    def tokens_read(self, lengths: Tensor) -> Tensor:
        return lengths.float()

    def kept(self, layer: int) -> None:
        return None


def dense_reference(q: Tensor, k: Held, v: Held, start: Tensor) -> Tensor:
    """The plain reference: masked attention over `k.shape[1]` positions."""
    k, v = plain(k, q.dtype), plain(v, q.dtype)
    batch, tokens, query_heads, head_size = q.shape
    extent, kv_heads = k.shape[1], k.shape[2]
    group = query_heads // kv_heads
    last = start.unsqueeze(1) + torch.arange(tokens, device=start.device)  # [batch, tokens]
    visible = torch.arange(extent, device=start.device) <= last.unsqueeze(2)  # [batch, tokens, extent]
    # The query heads of a KV head are packed as rows of one tile, so that no key is copied or read twice.
    packed = q.view(batch, tokens, kv_heads, group, head_size).permute(0, 2, 3, 1, 4)
    mask = visible.unsqueeze(1).expand(batch, group, tokens, extent).reshape(batch, 1, group * tokens, extent)
    out = F.scaled_dot_product_attention(
        packed.reshape(batch, kv_heads, -1, head_size), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
    )
    out = out.view(batch, kv_heads, group, tokens, head_size)
    return out.permute(0, 3, 1, 2, 4).reshape(q.shape)
