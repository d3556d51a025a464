"""Seeded choices that are the same on every machine and in every version of Python."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """Choices decided by a key alone, such as a seed and a sample's number.

    Only `Random.random` is used: its sequence is the one that Python promises never to change.
    """

    def __init__(self, *key: object) -> None:
        self._random = Random("/".join(map(str, key)))  # text is hashed with SHA-512, whatever PYTHONHASHSEED is

    def share(self) -> float:
        """Uniform in [0, 1)."""
        return self._random.random()

    def below(self, count: int) -> int:
        """Uniform in 0, 1, ..., count - 1."""
        return int(self.share() * count)

    def choice(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """The values in random order."""
        mixed = list(values)
        for last in range(len(mixed) - 1, 0, -1):
            other = self.below(last + 1)
            mixed[last], mixed[other] = mixed[other], mixed[last]
        return mixed
