"""What stands in for the tokens that sparse verification does not read: one key and one value for each query head.

Of the unread tokens R a query q needs two things: how much attention they hold together, log sum exp(q k_i) over R, and
the mean of their values under it. Around a query q0 whose attention is known, the first is to first order
`bias + q key`, where `key` is the mean of the keys of R under the attention of q0, for that is the gradient, and `bias`
makes it exact at q0. The second is taken as it was. So the rest enters a later query's softmax as one token more.
(The tangent is our own; `results/README.md` says what it is worth.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dustin_runtime.kernels import processors, usable
from dustin_runtime.scaled import Held, Scaled, bits, parts, plain


class RestTokens(NamedTuple):
    """One token for each query head.

    Attributes:
        keys, values: [..., batch, query_heads, head_size], whatever scales a cache has.
        bias: [..., batch, query_heads] fp32, added to the scaled logit; -inf where nothing is unread.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor

    def of(self, layer: int) -> RestTokens:
        """One layer of several."""
        return RestTokens(self.keys[layer], self.values[layer], self.bias[layer])


def save_queries(held: Tensor, q: Tensor, start: Tensor) -> None:
    """Put queries where their positions have their turns: the one of position p in slot `p % slots`.

    Args:
        held: [batch, slots, query_heads, head_size], as many slots as new tokens at least.
        q: [batch, tokens, query_heads, head_size]; start: [batch] int64, position of the first.
    """
    order, row = torch.arange(q.shape[1], device=q.device), torch.arange(len(q), device=q.device)
    held[row.unsqueeze(1), (start.unsqueeze(1) + order) % held.shape[1]] = q


def update_rest(
    out: RestTokens,
    q: Tensor,
    k: Held,
    v: Held,
    layer: Tensor,
    position: Tensor,
    unread: Tensor,
    weight: float = 1.0,
    share: float | None = None,
) -> None:
    """Make the tokens of some layers anew, in place. The layers are known on the device alone, so a CUDA graph can hold
    the call.

    Args:
        out: [layers, batch, ...].
        q: [turns, batch, queries, query_heads, head_size] of those layers, after RoPE; the tokens are the mean of what
            each query says.
        k, v: [layers, batch, columns, kv_heads, head_size], keys after RoPE.
        layer: [turns, batch] int64: whose turn it is in each sequence, no layer twice; -1 for none.
        position: [batch, queries] int64, ascending, below `columns`: where each query stands. It sees nothing behind.
        unread: [batch, columns] bool, what the tokens stand in for.
        weight: what their mass is multiplied by.
        share: of the GPU's processors that are used, roughly; by default all.
    """
    if usable(q, heads_of=q.shape[-1]):
        from dustin_runtime.kernels import rest as kernels

        programs = None if share is None else int(share * processors(q.device))
        kernels.update_rest(out, q, k, v, layer, position, unread, weight, programs)
    else:
        update_rest_reference(out, q, k, v, layer, position, unread, weight)


def update_rest_reference(
    out: RestTokens,
    q: Tensor,
    k: Held,
    v: Held,
    layer: Tensor,
    position: Tensor,
    unread: Tensor,
    weight: float = 1.0,
) -> None:
    """`update_rest` in plain torch."""
    row = torch.arange(layer.shape[1], device=layer.device)
    for queries, of in zip(q, layer, strict=True):
        at, there = of.clamp(min=0), of >= 0
        keys, values = (plain(_of_layers(held, at, row), torch.float32) for held in (k, v))
        made = _tokens(queries, keys, values, position, unread, out.keys.dtype)
        made = made._replace(bias=made.bias + math.log(weight))
        for held, new in zip(out, made, strict=True):
            held[at, row] = torch.where(there.view(-1, *[1] * (new.dim() - 1)), new.to(held.dtype), held[at, row])


def _tokens(q: Tensor, k: Tensor, v: Tensor, position: Tensor, unread: Tensor, dtype: torch.dtype) -> RestTokens:
    """[batch, ...] tokens; arguments as of `update_rest`, of one turn. `dtype`: what keys will be kept in."""
    batch, queries, _, head_size = q.shape
    kv_heads = k.shape[2]
    exact = torch.promote_types(q.dtype, torch.float32)
    packed = q.to(exact).view(batch, queries, kv_heads, -1, head_size).permute(0, 2, 3, 1, 4)
    # What lies behind a prefix may be anything, NaN too.
    k, v = (torch.where(unread[:, :, None, None], x.to(exact), 0).transpose(1, 2).unsqueeze(2) for x in (k, v))
    seen = unread.unsqueeze(1) & (torch.arange(unread.shape[1], device=q.device) <= position.unsqueeze(2))
    seen = seen[:, None, None]  # [batch, 1, 1, queries, columns]
    scores = (packed @ k.transpose(3, 4) * head_size**-0.5).masked_fill(~seen, float("-inf"))
    mass = scores.logsumexp(dim=4)
    weights = torch.where(seen.any(dim=4, keepdim=True), scores.softmax(dim=4), 0)
    keys, values = (weights @ k).mean(dim=3), (weights @ v).mean(dim=3)  # [batch, kv_heads, group, head_size]
    tangent = (packed.mean(dim=3) * keys.to(dtype).to(exact)).sum(dim=3) * head_size**-0.5
    bias = mass.mean(dim=3) - tangent
    return RestTokens(keys.flatten(1, 2), values.flatten(1, 2), bias.flatten(1, 2).float())


def _of_layers(held: Held, layer: Tensor, row: Tensor) -> Held:
    """[batch, columns, kv_heads, head_size] of a layer of each row's own."""
    stored, scale = parts(held)
    if scale is None:
        return stored[layer, row]
    return Scaled(bits(stored)[layer, row].view(stored.dtype), scale[layer, row])
