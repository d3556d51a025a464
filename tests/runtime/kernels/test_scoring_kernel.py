"""The scoring kernels against the plain reference."""

from __future__ import annotations

import cases
import pytest
import torch

from dustin_runtime.attention.scoring import ScoredHeads
from dustin_runtime.config import LayerHeads

LAYERS = 3


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(
    ("size", "group", "queries", "entries"),
    [
        (64, 7, 4, ((2, (0, 3, 8, 13)), (0, (5,)), (1, (6, 7)))),
        (128, 8, 1, ((1, (0, 1, 2, 9)),)),
        (128, 1, 5, ((2, (1, 0)), (1, (1,)))),
        (64, 4, 17, ((0, (4, 5, 6, 7)),)),
    ],
)
def test_equals_the_reference(
    size: int, group: int, queries: int, entries: tuple, dtype: torch.dtype, generator: torch.Generator
) -> None:
    from dustin_runtime.kernels.scoring import attention_scores

    chosen = [LayerHeads(layer=layer, heads=heads) for layer, heads in entries]
    heads = ScoredHeads(chosen, group * cases.KV_HEADS, group, generator.device)
    caches = [cases.cache(cases.LENGTHS, queries, size, dtype, generator)[0] for _ in range(LAYERS)]
    keys = torch.stack([cache.transpose(1, 2) for cache in caches]).transpose(2, 3)
    q = cases.queries(len(cases.LENGTHS), queries, len(heads), size, dtype, generator)[:, :, : len(heads)]
    position = torch.tensor(cases.LENGTHS, device=q.device).unsqueeze(1) + torch.arange(queries, device=q.device)
    found = attention_scores(q, keys, heads.groups, heads.members, position)
    want = heads.reference(q.double(), keys.double().nan_to_num(), position)
    assert found.dtype == torch.float32
    assert cases.error(found, want) < 1e-5  # fp32 logits from exact products of rounded inputs
    for row, length in enumerate(cases.LENGTHS):
        assert float(found[row].sum()) == pytest.approx(len(heads) * queries, rel=1e-4)
        assert not found[row, length + queries :].any()
    narrow = attention_scores(q, keys, heads.groups, heads.members, position, columns=max(cases.LENGTHS))
    assert torch.equal(narrow, found[:, : max(cases.LENGTHS)])
