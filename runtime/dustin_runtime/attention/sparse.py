"""Causal attention of a few new tokens over chosen positions of the cache (arXiv 2606.24957, section 4.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dustin_runtime.attention.dense import dense_reference
from dustin_runtime.attention.rest import RestTokens, save_queries
from dustin_runtime.cache import WHOLE, Ring
from dustin_runtime.kernels import usable
from dustin_runtime.scaled import Held, at_slots


class SparseAttention:
    """Verification over a list of kept prefix positions plus the new tokens; implements `policies.Verification`.

    Keys keep their absolute RoPE positions: nothing is evicted or renumbered.

    Args:
        kept: [layers or 1, batch, kv_heads or 1, k] int64 prefix positions, -1 where a row keeps fewer than k. A size
            of 1 means one list for all layers, or for all KV heads.
            On a GPU the kernel may read it while its predecessor still runs, so an ordinary operation has to lie
            between what writes it and the first use; in a decoder that is the embedding.
        ring: in which slots of the cache positions lie.
        full: [batch] bool, rows that read everything instead of their list; None for none. Like `kept`, the kernel may
            read it early.
        estimate: [batch] fp64, what the list was estimated to recover (`judge.judge`), for those who evaluate it.
        rest: of all layers, what stands in for the tokens that are not listed; None for nothing.
        rest_read: [batch] fp32, how many of these a KV head reads, mean over layers and heads.
        saved: [layers, batch, slots, query_heads, head_size], where queries are put (`save_queries`); None for nowhere.
    """

    def __init__(
        self,
        kept: Tensor,
        ring: Ring = WHOLE,
        *,
        full: Tensor | None = None,
        estimate: Tensor | None = None,
        rest: RestTokens | None = None,
        rest_read: Tensor | None = None,
        saved: Tensor | None = None,
    ) -> None:
        self.lists = kept
        self.ring = ring
        self.full = full
        self.estimate = estimate
        self.rest = rest
        self.rest_read = rest_read
        self.saved = saved

    def __call__(self, layer: int, q: Tensor, k: Held, v: Held, start: Tensor) -> Tensor:
        kept, rest = self.kept(layer), self.rest.of(layer) if self.rest else None
        saved = None if self.saved is None else self.saved[layer]
        if usable(q, heads_of=q.shape[3]):
            from dustin_runtime.kernels.sparse import sparse_attention

            out = sparse_attention(q, k, v, start, kept, ring=self.ring, full=self.full, rest=rest, saved=saved)
            if self.full is not None:
                from dustin_runtime.kernels.dense import dense_rows

                dense_rows(q, k, v, start, self.full, out)
            return out
        if saved is not None:
            save_queries(saved, q, start)
        if self.full is not None:
            return mixed_reference(q, k, v, start, kept, self.full, rest)
        return sparse_reference(q, k, v, start, kept, self.ring, rest)

    def tokens_read(self, lengths: Tensor) -> Tensor:
        """[batch] fp32, prefix tokens that each KV head read, mean over layers and heads, and those of `rest`."""
        read = (self.lists >= 0).sum(dim=(0, 2, 3), dtype=torch.float32)
        lists = self.lists.shape[0] * self.lists.shape[2]
        read = read / lists if lists > 1 else read
        if self.rest_read is not None:
            read = read + self.rest_read
        return read if self.full is None else torch.where(self.full, lengths.float(), read)

    def kept(self, layer: int) -> Tensor:
        """[batch, kv_heads or 1, k]; of rows that are `full`, what they would have read."""
        return self.lists[layer if self.lists.shape[0] > 1 else 0]


def sparse_reference(
    q: Tensor, k: Held, v: Held, start: Tensor, kept: Tensor, ring: Ring = WHOLE, rest: RestTokens | None = None
) -> Tensor:
    """The plain reference: gather, then masked attention.

    Args:
        q: [batch, tokens, query_heads, head_size]; k, v: [batch, slots, kv_heads, head_size]; start: [batch].
        kept: [batch, kv_heads or 1, k].
        rest: [batch, ...], of which every query sees its head's; or None.

    Returns:
        [batch, tokens, query_heads, head_size].
    """
    batch, tokens, query_heads, head_size = q.shape
    kv_heads = k.shape[2]
    group = query_heads // kv_heads
    positions, visible = _listed(kept, start, tokens)
    slots = ring.slots(positions).clamp(min=0)
    gathered_k, gathered_v = (at_slots(x, slots, q.dtype) for x in (k, v))
    packed = q.view(batch, tokens, kv_heads, group, head_size).permute(0, 2, 3, 1, 4)
    rows, seen = packed.reshape(batch, kv_heads, -1, head_size), visible.repeat(1, 1, group, 1)
    if rest is None:
        out = F.scaled_dot_product_attention(rows, gathered_k, gathered_v, attn_mask=seen)
    else:
        out = _attend_with_rest(rows, gathered_k, gathered_v, seen, rest, tokens)
    out = out.view(batch, kv_heads, group, tokens, head_size)
    return out.permute(0, 3, 1, 2, 4).reshape(q.shape)


def _attend_with_rest(rows: Tensor, k: Tensor, v: Tensor, seen: Tensor, rest: RestTokens, tokens: int) -> Tensor:
    """Attention of rows [batch, kv_heads, group * tokens, head_size] to the keys they see, and to their head's rest."""
    exact = torch.promote_types(rows.dtype, torch.float32)
    q, scale = rows.to(exact), rows.shape[3] ** -0.5
    size = (*rows.shape[:2], -1, rows.shape[3])
    rest_keys, rest_values = (x.to(exact).view(size).repeat_interleave(tokens, dim=2) for x in rest[:2])
    bias = rest.bias.to(exact).view(*rows.shape[:2], -1, 1).repeat_interleave(tokens, dim=2)
    scores = (q @ k.to(exact).transpose(2, 3) * scale).masked_fill(~seen, float("-inf"))
    weights = torch.cat((scores, (q * rest_keys).sum(dim=3, keepdim=True) * scale + bias), dim=3).softmax(dim=3)
    out: Tensor = weights[..., :-1] @ v.to(exact) + weights[..., -1:] * rest_values
    return out.to(rows.dtype)


def mixed_reference(
    q: Tensor, k: Held, v: Held, start: Tensor, kept: Tensor, full: Tensor, rest: RestTokens | None = None
) -> Tensor:
    """The plain reference of rows that read everything, where `full` [batch] bool says so, among others; shapes as of
    `sparse_reference`, of a cache that keeps all."""
    everything = dense_reference(q, k, v, start)
    return torch.where(full[:, None, None, None], everything, sparse_reference(q, k, v, start, kept, rest=rest))


def sparse_by_query_head(q: Tensor, k: Held, v: Held, start: Tensor, kept: Tensor) -> Tensor:
    """The same with a list for every query head; a key is read by each that lists it.

    Args:
        kept: [batch, query_heads, k].
    """
    group = q.shape[2] // k.shape[2]
    out = torch.empty_like(q)
    for member in range(group):  # one query head of every KV head at a time
        heads = slice(member, None, group)
        attend = SparseAttention(kept[:, heads].contiguous().unsqueeze(0))
        out[:, :, heads] = attend(0, q[:, :, heads].contiguous(), k, v, start)
    return out


def sparse_rows(q: Tensor, k: Held, start: Tensor, kept: Tensor) -> Tensor:
    """Softmax rows of the attention that `sparse_reference` computes; shapes as there, of a cache that keeps all.

    Returns:
        [batch, kv_heads, group, tokens, k + tokens] fp32: over the list, then over the new tokens.
    """
    batch, tokens, _, head_size = q.shape
    kv_heads = k.shape[2]
    positions, visible = _listed(kept, start, tokens)
    keys = at_slots(k, positions.clamp(min=0), torch.float32).float()
    packed = q.float().view(batch, tokens, kv_heads, -1, head_size).permute(0, 2, 3, 1, 4)
    scores = packed @ keys.transpose(2, 3).unsqueeze(2) * head_size**-0.5
    rows: Tensor = scores.masked_fill(~visible.unsqueeze(2), float("-inf")).softmax(dim=-1)
    return rows


def _listed(kept: Tensor, start: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """What a list and the new tokens are together.

    Returns:
        positions: [batch, kv_heads or 1, k + tokens]; visible: [batch, kv_heads or 1, tokens, k + tokens] bool.
    """
    order = torch.arange(tokens, device=kept.device)
    new = (start.unsqueeze(1) + order).unsqueeze(1).expand(-1, kept.shape[1], -1)
    prefix_visible = (kept >= 0).unsqueeze(2).expand(-1, -1, tokens, -1)
    new_visible = (order <= order.unsqueeze(1)).expand(*kept.shape[:2], -1, -1)
    return torch.cat((kept, new), dim=2), torch.cat((prefix_visible, new_visible), dim=3)
