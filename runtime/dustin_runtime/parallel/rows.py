"""Rows of a batch split over ranks, for a draft that is whole on each of them: a rank drafts its own rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dustin_runtime.parallel.collectives import Collectives

WORD = torch.int32
"""What travels: every dtype that is gathered is one or two of them."""


@dataclass(frozen=True)
class RowBlocks:
    """Which rows are whose: blocks of one size, in the order of the ranks.

    Where rows do not divide evenly, the last ranks have padding behind their rows, or nothing else: shapes are the same
    on every rank.
    """

    rows: int
    ranks: Collectives

    @property
    def each(self) -> int:
        """Rows of a block, padding included."""
        return -(-self.rows // self.ranks.world)

    @property
    def here(self) -> range:
        """The rows of this rank."""
        begin = self.ranks.rank * self.each
        return range(min(begin, self.rows), min(begin + self.each, self.rows))

    def place(self, row: int) -> int | None:
        """Where a row lies in this rank's block; None if it is another's."""
        return row - self.here.start if row in self.here else None

    def own(self, x: Tensor) -> Tensor:
        """[each, ...], the rank's block of [rows, ...]: a view, unless it is padded. Padding is 1, which serves as a
        length, a token, a temperature and a top-p."""
        block = x[self.here.start : self.here.stop]
        missing = self.each - len(block)
        return torch.cat((block, x.new_ones(missing, *x.shape[1:]))) if missing else block

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Put blocks of all ranks together, in one collective and to the bit.

        Args:
            parts: [each, ..., columns] of 4 or 8 bytes an element, the same shapes on every rank.

        Returns:
            [rows, ..., columns] of each part, contiguous, the same bits on every rank.

        Raises:
            PeerError: as `Collectives.sum`.
        """
        words = [part.contiguous().view(WORD).flatten(1) for part in parts]
        found = self.ranks.gather(torch.cat(words, dim=1)).flatten(0, 1)[: self.rows]
        pieces = found.split([block.shape[1] for block in words], dim=1)
        return [
            piece.clone(memory_format=torch.contiguous_format).view(part.dtype).view(self.rows, *part.shape[1:])
            for piece, part in zip(pieces, parts, strict=True)
        ]
