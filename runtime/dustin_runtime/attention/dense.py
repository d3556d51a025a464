"""Causal attention of a few new tokens over the whole cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_attention(layer: int, q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Tensor:
    """Full-cache attention; implements `models.decoder.Attention` (shapes there). Rows may differ in length."""
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
