"""What a run costs, from its shapes: floating-point operations, bytes moved between them, memory.

An estimate before anything has run on a device; `train --benchmark` measures.
"""

from __future__ import annotations

from typing import Any

from dustin_runtime.models.shape import ModelShape
from dustin_runtime.pricing import Device, body_weights
from recipes.smollm2_135m.schedule import Schedule

EFFICIENCY = 0.35
"""Share of a device's matrix rate that products of width 576 reach; assumed."""
LAYER_PASSES = 45
"""fp32 passes over the model's width per token and layer, forward: norms, rotation, residual, and the MLP's gate."""
LOSS_PASSES = 30
"""fp32 passes over the vocabulary per token: two softmaxes, both divergences, and the gradient (KL alone: 17)."""
ACTIVATION_PASSES = 24
"""fp32 values of the model's width kept per token and layer for the backward pass, those of the MLP counted apart."""


def flops_per_token(target: ModelShape, draft: ModelShape, length: int, recompute: bool) -> float:
    """Floating-point operations of one training step per token, attention at half the length on average."""

    def forward(shape: ModelShape) -> float:
        return 2.0 * body_weights(shape) + 4.0 * shape.layers * shape.query_heads * shape.head_size * length / 2

    head = 2.0 * target.vocab * target.hidden
    times = 4 if recompute else 3  # forward, and twice as much backward
    return forward(target) + head + times * forward(draft) + 2 * head


def price(
    target: ModelShape,
    draft: ModelShape,
    schedule: Schedule,
    *,
    tokens_per_step: int,
    micro_tokens: int,
    chunk: int,
    recompute: bool,
    device: Device,
) -> dict[str, Any]:
    """Seconds and bytes of the whole schedule.

    Returns:
        JSON: tokens per second by length, seconds and bytes in all.
    """
    layers = target.layers + (4 if recompute else 3) * draft.layers
    moved = 4.0 * (LOSS_PASSES * target.vocab + LAYER_PASSES * layers * target.hidden)
    small = moved / device.bytes_per_s
    by_length: dict[int, float] = {}
    for length in sorted({x for _, found in schedule.lengths for x in found}):
        matrix = flops_per_token(target, draft, length, recompute) / (EFFICIENCY * device.flops_per_s)
        by_length[length] = 1 / (matrix + small)
    lengths = [schedule.length_at(step) for step in range(schedule.end)]
    micro = min(micro_tokens, tokens_per_step)
    kept = 1 if recompute else draft.layers
    activations = micro * 4 * (kept * (ACTIVATION_PASSES * draft.hidden + 3 * draft.ffn) + 8 * draft.hidden)
    transient = micro * (8 * target.hidden * 4 + 4 * target.ffn * 2)
    weights = 4 * target.parameters + 16 * body_weights(draft) + 2 * target.vocab * target.hidden
    return {
        "device": device.name,
        "steps": schedule.end,
        "tokens": schedule.end * tokens_per_step,
        "tokens_per_second": {str(length): round(rate) for length, rate in by_length.items()},
        "seconds": round(sum(tokens_per_step / by_length[length] for length in lengths), 1),
        "memory_bytes": weights + activations + transient + 8 * 4 * min(chunk, micro) * target.vocab,
        "export_bytes": {"int8": body_weights(draft), "bfloat16": 2 * body_weights(draft)},
    }
