"""What profiling a pair costs in seconds and bytes, from the models' shapes alone.

A price is a floor from arithmetic and bandwidth: prefill runs at the device's matrix rate, decoding at its memory
rate. Left out: loading weights, tokenizing, launch overhead (it dominates the decoding of small models), activations
(under a tenth of the device, which is kept free), and the spread of lengths (attention grows with their square). A
draft made of the target's own layers is priced as if it had its own weights. One document is prefilled at a time, so
a model that is spread over several devices runs its layers in turn: more devices bring memory, not speed. Only where
each has a part of every layer of the target (`tensor_parallel`) do they share its work; their sums are left out.

Against arXiv 2606.24957, Table 12 (heads of Llama-3.1-8B on one A100: 13, 19, 27 minutes at 16K, 32K, 50K): 600
prompts of half that length, the public detector's grid, price at 8, 15, 24 minutes. Against its Table 13 (collection
7.5, 6.6, 10.6, 15.8, 26.6 minutes for 8B, 7B, 14B, 32B, 72B on H100s), which does not say how many documents: 50 of
13.5K tokens with 512 new ones price at 3, 3, 5, 11, 25, on one H100 or, for 72B, two. Its search took 4.4 to 8.8
minutes, trial by trial; the exact search priced here takes one for those traces.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from dustin_runtime.models.shape import ModelShape

if TYPE_CHECKING:
    from dustin_runtime.parallel.split import Part

ANSWER_TOKENS = 32
"""Tokens generated per needle prompt."""
SCORED_BUDGETS = 3
"""Values of m that each candidate draft layer is scored at."""
USABLE_MEMORY = 0.9
"""Share of a device's memory that weights, caches and traces may fill."""
SELECTION_SECONDS_PER_TOKEN = 18e-9
"""One evaluation of a kept set, per token of the prefix: measured on one CPU core at 16K tokens."""


class Device(NamedTuple):
    """Achievable figures of one device, not those of its data sheet."""

    name: str
    flops_per_s: float
    """Dense bf16 matrix products (fp32 on a CPU)."""
    bytes_per_s: float
    """Reading memory."""
    memory_bytes: int


DEVICES: dict[str, Device] = {
    # Of an h200, what a plain reduction reads at is measured; its data sheet says 4.8 TB/s, and attention over long
    # caches has reached 4.5. h100 (SXM) and a100 (80 GB) are taken to reach the same share of theirs.
    "h200": Device("h200", 790e12, 4.0e12, 139 * 2**30),
    "h100": Device("h100", 790e12, 2.8e12, 79 * 2**30),
    "a100": Device("a100", 249e12, 1.7e12, 79 * 2**30),
    # Two cores of a laptop. Replace what can be measured: `DEVICES["cpu"]._replace(flops_per_s=...)`.
    "cpu": Device("cpu", 50e9, 10e9, 8 * 2**30),
}


class StagePrice(NamedTuple):
    """Price of one stage of profiling."""

    stage: str
    seconds: float
    gpu_bytes: int
    """Peak over all devices together; 0 where the host alone works."""
    disk_bytes: int
    """Bytes written; files under a megabyte count as 0."""
    devices: int
    """How many devices that needs: those of a team that shares the target, or more where they do not suffice."""
    device_bytes: int
    """Peak on one device of such a team; without one, all of `gpu_bytes`."""


def body_weights(shape: ModelShape) -> int:
    """Weights of the layers and norms, without the embedding and the head."""
    return shape.parameters - shape.vocab * shape.hidden * (1 if shape.tied else 2)


def weights_bytes(shape: ModelShape, element_bytes: int) -> int:
    """Bytes of all weights, an embedding shared with the head counted once."""
    return shape.parameters * element_bytes


def held_weights(share: Part) -> int:
    """Weights that one rank of several holds: its part of the layers, its rows of embedding and head, padding included,
    and the final norm. A tied head is a view of the embedding."""
    outer = share.embedding_rows + (0 if share.whole.tied else share.vocab_rows)
    norm = 0 if share.ends else share.whole.hidden
    return body_weights(share.shape) + outer * share.whole.hidden - norm


def trace_bytes(target: ModelShape, draft: ModelShape, *, prefix: int, windows: int) -> int:
    """Bytes of `windows` stored windows whose prefix is `prefix` tokens long.

    Each holds one fp32 truth vector, and one fp16 vector per target layer and per draft layer.
    """
    return windows * prefix * (4 + 2 * (target.layers + draft.layers))


def prefill_flops(shape: ModelShape, tokens: int, cached: int = 0) -> float:
    """Floating-point operations to process `tokens` in one go behind `cached` ones.

    Two per weight and token, the embedding and the head aside (logits are taken of the last position alone), and
    four per layer, query head, channel and attended pair of positions.
    """
    pairs = tokens * cached + tokens * tokens / 2
    attention = 4.0 * shape.layers * shape.query_heads * shape.head_size * pairs
    return 2.0 * body_weights(shape) * tokens + attention


def prefill_seconds(shape: ModelShape, tokens: int, device: Device, cached: int = 0) -> float:
    """Seconds to process `tokens` in one go behind `cached` ones."""
    return prefill_flops(shape, tokens, cached) / device.flops_per_s


def decode_seconds(
    shape: ModelShape, cached: int, device: Device, element_bytes: int, kv_bytes: int | None = None
) -> float:
    """Seconds to generate one token behind `cached` ones: every weight and the whole KV cache are read once.

    Args:
        kv_bytes: of an element of the cache, if not `element_bytes`.
    """
    weights = (body_weights(shape) + shape.vocab * shape.hidden) * element_bytes
    return (weights + shape.kv_bytes(cached, kv_bytes or element_bytes)) / device.bytes_per_s


def search_seconds(target: ModelShape, draft: ModelShape, *, prefix: int, windows: int, rounds: int = 3) -> float:
    """Seconds of the three search phases on one CPU core, over `windows` windows of `prefix` tokens.

    Every target layer is evaluated once, every draft layer at `SCORED_BUDGETS` values of m in each of `rounds`
    rounds, and the whole curve of m at the price of two evaluations.
    """
    evaluations = target.layers + rounds * SCORED_BUDGETS * draft.layers + 2
    return evaluations * windows * prefix * SELECTION_SECONDS_PER_TOKEN


def devices_needed(gpu_bytes: int, device: Device) -> int:
    """How many devices hold `gpu_bytes`, a tenth of each kept free."""
    return ceil(gpu_bytes / (USABLE_MEMORY * device.memory_bytes))


def price_profile(
    target_shape: ModelShape,
    draft_shape: ModelShape,
    *,
    context: int,
    continuation: int,
    documents: int,
    windows: int,
    needle_samples: int,
    needle_mean_length: int,
    device: Device,
    element_bytes: int,
    tensor_parallel: int = 1,
    rows: int = 1,
) -> list[StagePrice]:
    """Price the stages `srh`, `trace` and `search`.

    Args:
        context: tokens of each calibration prompt.
        continuation: tokens generated after it.
        documents: number of calibration prompts.
        windows: windows taken per document, evenly over its continuation.
        needle_samples: needle prompts per model.
        needle_mean_length: their mean length in tokens.
        device: see `DEVICES`.
        element_bytes: bytes of a weight or KV element: 2 for bf16, 4 for fp32.
        tensor_parallel: devices that share the target, each of which has a whole draft: the price is that of one team.
        rows: prompts that the target continues together, each reading its own cache, all the same weights.

    Raises:
        UsageError: the target cannot be shared by so many.
    """
    team = tensor_parallel
    here, held = target_shape, target_shape.parameters
    if team > 1:
        from dustin_runtime.parallel.split import part_of

        part = part_of(target_shape, 0, team)
        here, held = part.shape, held_weights(part)
    pair = (here, draft_shape)
    parameters = (held, draft_shape.parameters)
    length = context + continuation
    prefix = context + continuation // 2

    def row(stage: str, seconds: float, each: int, windows: int = 0, disk_bytes: int = 0) -> StagePrice:
        """`each`: bytes on every device; `windows`: bytes of those that one of them keeps."""
        gpu_bytes, most = team * each + windows, each + windows
        needed = devices_needed(gpu_bytes, device)
        if team > 1 and needed:
            needed = max(needed, team if devices_needed(most, device) == 1 else team + 1)
        return StagePrice(stage, seconds, gpu_bytes, disk_bytes, needed, most)

    def resident(tokens: int) -> list[int]:
        """Of each model, on one device."""
        return [
            weights * element_bytes + together * shape.kv_bytes(tokens, element_bytes)
            for weights, shape, together in zip(parameters, pair, (rows, 1), strict=True)
        ]

    def decoded(shape: ModelShape, tokens: int, together: int) -> float:
        """Seconds of one token of one row."""
        return decode_seconds(shape, together * tokens, device, element_bytes) / together

    # The draft's prompts are dealt to all devices of a team.
    needle_seconds = sum(
        (
            prefill_seconds(shape, needle_mean_length, device)
            + ANSWER_TOKENS * decoded(shape, needle_mean_length, together)
        )
        / shared
        for shape, shared, together in zip(pair, (1, team), (rows, 1), strict=True)
    )
    # One model after the other, so the larger one decides the memory.
    srh = row(
        "srh",
        needle_samples * needle_seconds,
        max(resident(needle_mean_length + ANSWER_TOKENS)),
    )
    stored = trace_bytes(target_shape, draft_shape, prefix=prefix, windows=windows)
    document_seconds = (
        sum(prefill_seconds(shape, context, device) for shape in pair)
        + continuation * decoded(here, prefix, rows)
        + sum(prefill_seconds(shape, continuation, device, cached=context) for shape in pair)
    )
    trace = row(
        "trace",
        documents * document_seconds,
        sum(resident(length)),
        stored,
        documents * stored,
    )
    seconds = search_seconds(target_shape, draft_shape, prefix=prefix, windows=documents * windows)
    return [srh, trace, row("search", seconds, 0)]
