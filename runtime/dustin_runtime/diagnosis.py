"""Where a model first computes what is not finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.errors import CapacityError
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.prefill import chunk_for, prefill
from dustin_runtime.scaled import Held


def where_it_breaks(model: Decoder, ids: Sequence[int]) -> str:
    """Say after which layer the model's values are not finite, reading `ids` with a cache of its own.

    Ranks that share the model say the same.
    """
    share = model.split.share if model.split else None
    begin, layers = (share.layers.start, share.whole.layers) if share else (0, model.shape.layers)
    first: list[int] = []

    def attend(layer: int, q: Tensor, k: Held, v: Held, start: Tensor) -> Tensor:
        if not first and not bool(q.isfinite().all()):
            first.append(begin + layer)
        out = dense_attention(layer, q, k, v, start)
        if not first and not bool(out.isfinite().all()):
            first.append(begin + layer + 1)
        return out

    try:
        hidden = prefill(model, model.cache(1, len(ids)), ids, attend=attend, chunk=chunk_for(model.device))
    except CapacityError:
        return "in a layer that there is no memory left to look for"
    earliest = _earliest(model, first[0] if first else layers + 1)
    if earliest <= layers:
        return f"from layer {earliest - 1} on" if earliest else "in its embedding"
    if not bool(hidden.isfinite().all()):
        return f"from layer {layers - 1} on"
    if not bool(model.logits(hidden).isfinite().all()):
        return "in its head"
    return "though a full reading of the same text is"


def _earliest(model: Decoder, layer: int) -> int:
    """Of what the ranks found the first layer."""
    if model.split is None:
        return layer
    return int(model.split.ranks.gather(torch.tensor(layer, device=model.device)).min())
