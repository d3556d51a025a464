"""Filling a cache with a prompt: chunk by chunk, so that memory does not grow with its length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.cache import KVCache
from dustin_runtime.models.decoder import Attention, Decoder

CHUNK = 512
"""Fixed where results must not depend on where a run was resumed."""
GPU_CHUNK = 2048
"""Fewer launches; activations of a 7B model take 0.3 GB."""


def chunk_for(device: torch.device) -> int:
    """Tokens at a time that a device prefills best."""
    return GPU_CHUNK if device.type == "cuda" else CHUNK


def prefill(
    model: Decoder,
    cache: KVCache,
    ids: Sequence[int],
    start: int = 0,
    attend: Attention = dense_attention,
    progress: Callable[[int], None] | None = None,
    chunk: int = CHUNK,
    tail: int = 0,
) -> Tensor:
    """Process `ids` at positions start, start + 1, ... of a one-row cache that holds the positions before.

    Args:
        progress: called with the number of tokens done, after every chunk.
        tail: tokens that the last chunk has at least, if there are so many; `chunk` at most.

    Returns:
        [hidden] of the last token.
    """
    hidden = None
    begins = list(range(0, len(ids), chunk))
    if len(begins) > 1 and len(ids) - begins[-1] < tail:
        begins[-1] = len(ids) - tail
    for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True):
        piece = torch.tensor([ids[begin:end]], device=model.device)
        at = start + begin
        position = torch.tensor([at], device=model.device)
        hidden = model.forward(piece, position, cache, attend, extent=at + piece.shape[1], first=at == 0)
        if progress:
            progress(piece.shape[1])
    if hidden is None:
        raise ValueError("an empty prompt has no last token")
    return hidden[0, -1]
