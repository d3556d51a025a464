"""The slow way to what the profiler computes: whole attention matrices of one dense pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape

TARGET = ModelShape(
    family="llama",
    layers=4,
    hidden=96,
    ffn=128,
    query_heads=6,
    kv_heads=2,
    head_size=16,
    vocab=2000,
    context=4096,
    tied=True,
)
DRAFT = TARGET.model_copy(update={"layers": 3, "hidden": 64, "query_heads": 4})


@torch.no_grad()
def dense_pass(model: Decoder, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Attention [layers, query_heads, tokens, tokens] fp64 and logits [tokens, vocab], with plain causal masking."""
    matrices = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Tensor:
        assert int(start) == 0
        k, v = (x.repeat_interleave(model.shape.group, dim=2)[0].transpose(0, 1) for x in (k, v))
        scores = q[0].transpose(0, 1) @ k.transpose(1, 2) / model.shape.head_size**0.5
        later = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
        weights = scores.double().masked_fill(later, -torch.inf).softmax(-1)
        matrices.append(weights)
        return (weights.to(v.dtype) @ v).transpose(0, 1).unsqueeze(0)

    cache = model.cache(1, len(ids))
    hidden = model.forward(torch.tensor([list(ids)]), torch.zeros(1, dtype=torch.long), cache, attend)
    return torch.stack(matrices), model.logits(hidden[0])


def continuation(model: Decoder, prompt: Sequence[int], count: int, vocab: int) -> list[int]:
    """Greedy text, every token from a pass over everything before it."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(dense_pass(model, ids)[1][-1, :vocab].argmax()))
    return ids[len(prompt) :]
