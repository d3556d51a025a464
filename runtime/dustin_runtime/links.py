"""How long ranks take to sum what each of them has, from sizes alone.

The model: a ring moves 2 (N - 1) / N of the summed bytes over the links of each of N ranks, in one direction; every
all-reduce, however small, takes a fixed latency beside that. Both figures of a link are assumptions: the rate is its
data sheet's, the latency a round number near what NCCL takes for a few kilobytes. Neither was measured here.
"""

from __future__ import annotations

from typing import NamedTuple

from dustin_runtime.models.shape import ModelShape


class Link(NamedTuple):
    """What joins ranks."""

    name: str
    bytes_per_s: float
    """Of one rank, in one direction."""
    latency_s: float
    """Of one all-reduce."""

    def all_reduce_ms(self, size: int, world: int) -> float:
        """Milliseconds to sum `size` bytes over `world` ranks; 0 for one."""
        if world == 1:
            return 0.0
        return 1e3 * (2 * (world - 1) / world * size / self.bytes_per_s + self.latency_s)


LINKS: dict[str, Link] = {
    "h200": Link("NVLink 4", 450e9, 10e-6),
    "h100": Link("NVLink 4", 450e9, 10e-6),
    "a100": Link("NVLink 3", 300e9, 10e-6),
    # gloo between processes of one host.
    "cpu": Link("loopback", 2e9, 50e-6),
}
"""By the names of `pricing.DEVICES`."""


def forward_sums_ms(shape: ModelShape, tokens: int, world: int, element_bytes: int, link: Link) -> float:
    """Of one pass of `tokens` tokens in all rows: two sums of [tokens, hidden] in every layer."""
    return 2 * shape.layers * link.all_reduce_ms(tokens * shape.hidden * element_bytes, world)


def step_sums_ms(
    target: ModelShape,
    split_draft: ModelShape | None,
    rows: int,
    depth: int,
    passes: int,
    world: int,
    element_bytes: int,
    link: Link,
) -> float:
    """Of one step. Sums of scores and the choice of tokens, a few numbers a position or row, are left out.

    Args:
        split_draft: a draft that is split as the target is (`self:N`); None for one that is whole on each rank.
        depth: draft tokens per step; 0 for a method that does not draft.
        passes: of the draft in a step.
    """
    found = forward_sums_ms(target, rows * (depth + 1), world, element_bytes, link)
    for turn in range(passes if split_draft else 0):
        assert split_draft is not None
        fed = 2 if turn == 0 else 1  # the first pass takes the last processed token too
        found += forward_sums_ms(split_draft, rows * fed, world, element_bytes, link)
    return found
