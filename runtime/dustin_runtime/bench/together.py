"""One stopwatch for all ranks of a run: they start together, and the slowest counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from dustin_runtime.models.decoder import Decoder
from dustin_runtime.parallel.collectives import peers


@dataclass(frozen=True)
class Together:
    """The ranks that time the same work, through the host. Each has to make the same calls in the same order.

    Attributes:
        world: how many they are; one waits for nobody.
    """

    world: int = 1

    @classmethod
    def of(cls, model: Decoder) -> Together:
        """The ranks that a model is split over."""
        return cls(model.split.share.world if model.split else 1)

    def begin(self) -> None:
        """Wait until all are here.

        Raises:
            PeerError: another rank has ended, or does not answer.
        """
        if self.world > 1:
            with peers():
                dist.barrier()

    def slowest(self, *figures: float) -> list[float]:
        """Of each figure the largest that any rank has. Raises as `begin`."""
        if self.world == 1:
            return list(figures)
        found = torch.tensor(figures, dtype=torch.float64)
        with peers():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [float(figure) for figure in found]


ALONE = Together()
