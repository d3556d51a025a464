"""How close the draft is on text that it was not trained on: KL, expected acceptance and agreement, by position."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.smollm2_135m.losses import divergence
from recipes.smollm2_135m.model import Stack

EDGES = (0, 1024, 2048, 4096, 8192)
"""Positions between which means are taken."""


@torch.inference_mode()
def closeness(
    draft: Stack, target: Stack, ids: Tensor, head: Tensor, *, rows: int, chunk: int, autocast: bool
) -> dict[str, Any]:
    """Means over every position of every sequence.

    Args:
        ids: [sequences, tokens] on the models' device.
        head: [vocab, hidden] in the type that logits are computed in.
        rows: sequences at a time; chunk: tokens whose logits are held at a time.

    Returns:
        `kl`; `overlap`, 1 - TV, the expected acceptance when sampling; `top1`, how often both prefer the same token,
        the acceptance of greedy decoding on this text; and `overlap_at`, `top1_at` by the first position of a range.
    """
    kind = ids.device.type
    found: list[Tensor] = []  # [3, sequences, tokens]
    for part in ids.split(rows):
        with torch.autocast(kind, torch.bfloat16, enabled=autocast):
            ours, theirs = draft(part).flatten(0, 1), target(part).flatten(0, 1)
        values = []
        for begin in range(0, len(ours), chunk):
            logits, wanted = (F.linear(x[begin : begin + chunk].to(head.dtype), head) for x in (ours, theirs))
            kl, tv = divergence(wanted, logits)
            values.append(torch.stack((kl, 1 - tv, (logits.argmax(-1) == wanted.argmax(-1)).float())))
        found.append(torch.cat(values, 1).view(3, *part.shape).double().cpu())
    whole = torch.cat(found, 1)
    kl, overlap, top1 = whole.mean((1, 2)).tolist()
    result: dict[str, Any] = {"kl": kl, "overlap": overlap, "top1": top1, "overlap_at": {}, "top1_at": {}}
    for begin, end in pairwise(EDGES):
        if begin < ids.shape[1]:
            _, result["overlap_at"][str(begin)], result["top1_at"][str(begin)] = (
                whole[:, :, begin:end].mean((1, 2)).tolist()
            )
    return _rounded(result)


def _rounded(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _rounded(x) if isinstance(x, Mapping) else round(x, 6) for key, x in value.items()}
