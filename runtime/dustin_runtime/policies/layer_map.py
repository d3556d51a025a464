"""Which draft layer attends most as each target layer does (SpecAttn, arXiv 2510.27641)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dustin_runtime.attention.scoring import last_rows
from dustin_runtime.policies.base import Prompted


def similarities(target: Prompted, draft: Prompted) -> Tensor:
    """How alike two models' layers attend from the last queries of the same prompt.

    Of -KL(target layer || draft layer), mean over queries, where a layer's row is the mean over its heads, only the
    part that depends on the draft's layer: the sum of p log q.

    Returns:
        [target layers, draft layers] fp32.
    """
    least = torch.finfo(torch.float32).tiny  # a weight that underflowed to 0 is not infinitely wrong
    logs = torch.stack([_layer_rows(draft, layer).clamp(min=least).log() for layer in sorted(draft.queries)])
    queries = logs.shape[1]
    found = [(logs * _layer_rows(target, layer)).sum(dim=(1, 2)) / queries for layer in sorted(target.queries)]
    return torch.stack(found)


def _layer_rows(prompted: Prompted, layer: int) -> Tensor:
    """[queries, length] fp32, mean over heads."""
    return last_rows(prompted.queries[layer], prompted.keys(layer))[0].mean(dim=(0, 1))


def monotone_map(similarity: Sequence[Sequence[float]]) -> list[int]:
    """The draft layer of every target layer, never falling, of the largest sum of similarities; lower layers of equals.

    Args:
        similarity: by target layer and draft layer.
    """
    width = len(similarity[0])
    total = [0.0] * width  # of the layers so far, by the last one's draft layer
    come_from: list[list[int]] = []
    for row in similarity:
        best, before = 0, []
        for layer in range(width):
            best = layer if total[layer] > total[best] else best
            before.append(best)
        come_from.append(before)
        total = [total[before[layer]] + row[layer] for layer in range(width)]
    found = [max(range(width), key=lambda layer: (total[layer], -layer))]
    for before in reversed(come_from[1:]):
        found.append(before[found[-1]])
    return found[::-1]
