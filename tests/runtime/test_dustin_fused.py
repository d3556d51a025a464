"""One ranking a layer from several scores, against lists written out by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from dustin_runtime.config import Fusion, LayerHeads, Selection
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.policies.base import Memory
from dustin_runtime.policies.dustin_fused import DustinFused, FreshScores, shares_of

SINK, WINDOW, BUDGET, COLUMNS = 2, 3, 11, 40
SHAPE = ModelShape(
    family="qwen2",
    hidden=16,
    layers=3,
    query_heads=4,
    kv_heads=2,
    head_size=4,
    ffn=16,
    vocab=10,
    context=COLUMNS,
    norm_eps=1e-6,
    tied=True,
)


@dataclass
class Given:
    """Signals that are handed over."""

    lengths: Tensor
    memory: Memory
    scores: dict[str, Tensor] = field(default_factory=dict)

    def lookahead(self) -> Tensor:
        return self.scores["lookahead"]

    def history(self) -> Tensor:
        return self.scores["history"]


def policy(**changes: object) -> DustinFused:
    fusion = Fusion.model_validate({"queries": 3, "per_step": 2} | changes)
    return DustinFused(
        Selection(
            budget=BUDGET,
            sink=SINK,
            window=WINDOW,
            m=4,
            history=LayerHeads(layer=2, heads=(1, 3)),
            lookahead=(LayerHeads(layer=1, heads=(0,)),),
            fusion=fusion,
        )
    )


def by_hand(own: Tensor, others: list[tuple[float, Tensor]], length: int) -> list[int]:
    """Protected tokens and the best of the weighted shares, ties to the smaller position."""
    eligible = range(SINK, length - WINDOW)
    joined = torch.zeros(COLUMNS)
    for weight, score in others:
        joined = joined + weight * (score / score[SINK : length - WINDOW].sum().clamp(min=1e-30))
    total = (own + joined).tolist()
    best = sorted(eligible, key=lambda position: (-total[position], position))[: BUDGET - SINK - WINDOW]
    protected = [p for p in range(length) if p < SINK or p >= length - WINDOW]
    return sorted({*protected, *best})


@pytest.mark.parametrize("heads", ["layer", "kv_head"])
@pytest.mark.parametrize("weights", [(0.5, 0.5, 0.0), (0.4, 0.4, 0.2), (1.0, 0.0, 0.0), (0.3, 0.0, 0.7)])
def test_lists_are_the_best_of_the_weighted_shares(heads: str, weights: tuple[float, float, float]) -> None:
    generator = torch.Generator().manual_seed(1)
    chosen = policy(own=weights[0], lookahead=weights[1], history=weights[2], heads=heads)
    lengths = torch.tensor([33, 9, 20])  # the second is shorter than the budget
    memory = chosen.memory(SHAPE, 2, 3, COLUMNS, torch.float32, torch.device("cpu"))
    # Few levels, so that there are ties.
    memory.mass.copy_(torch.randint(0, 4, memory.mass.shape, generator=generator).float())
    memory.mass /= memory.mass[..., SINK:].sum(-1, keepdim=True)
    scores = {name: torch.randint(0, 4, (3, COLUMNS), generator=generator).float() for name in ("lookahead", "history")}
    kept = chosen.select(Given(lengths, memory, scores))
    assert kept.shape == (3, 3, 2 if heads == "kv_head" else 1, BUDGET)
    for layer in range(3):
        for row, length in enumerate(lengths.tolist()):
            for one in range(kept.shape[2]):
                # What a layer has was a share of the positions that competed then: it is weighted as it is.
                others = [(weights[1], scores["lookahead"][row]), (weights[2], scores["history"][row])]
                wanted = by_hand(weights[0] * memory.mass[layer, row, one], [o for o in others if o[0]], length)
                assert [p for p in kept[layer, row, one].tolist() if p >= 0] == wanted, (layer, row, one)


def test_shares_are_of_what_competes() -> None:
    scores = torch.tensor([[4.0, 1.0, 3.0, 5.0], [1.0, 0.0, 0.0, 1.0]])
    eligible = torch.tensor([[False, True, True, False]]).expand(2, -1)
    assert shares_of(scores, eligible).tolist() == [[0, 0.25, 0.75, 0], [0, 0, 0, 0]]


def test_what_lies_beyond_a_prefix_is_not_looked_at() -> None:
    """Kernels write no scores there: whatever memory held, NaN too."""
    scores = torch.rand(2, COLUMNS, generator=torch.Generator().manual_seed(2))
    eligible = torch.arange(COLUMNS) < torch.tensor([[20], [31]])
    expected = shares_of(scores, eligible)
    assert torch.equal(shares_of(scores.where(eligible, torch.nan), eligible), expected)
    chosen = policy()
    memory = chosen.memory(SHAPE, 2, 2, COLUMNS, torch.float32, torch.device("cpu"))
    mass = scores.where(eligible, torch.nan)[None, :, None]
    memory._take(torch.tensor([[1, 1]]), torch.arange(2), mass, torch.tensor([23, 34]))
    assert torch.isfinite(memory.mass).all() and memory.mass[1, 0, 0, SINK:20].sum() == pytest.approx(1)


def test_a_new_score_keeps_a_share_of_the_former_one_but_not_of_another_prompts() -> None:
    chosen = policy(kept=0.25)
    assert chosen.selection is not None
    memory = FreshScores(chosen.selection, SHAPE, 2, 1, COLUMNS, torch.float32, torch.device("cpu"))
    lengths, layer, row = torch.tensor([30]), torch.tensor([[1]]), torch.tensor([0])
    first, second = torch.zeros(2, 1, 1, 1, COLUMNS)
    first[..., 10], second[..., 11] = 1, 3
    memory._take(layer, row, first, lengths)
    before = memory.mass[1, 0, 0].clone()
    memory._take(layer, row, second, lengths)
    assert memory.mass[1, 0, 0, 10] == pytest.approx(0.25 * float(before[10]))
    assert memory.mass[1, 0, 0, 11] == pytest.approx(0.75)
    assert not memory.mass[0].any() and not memory.mass[2].any()
