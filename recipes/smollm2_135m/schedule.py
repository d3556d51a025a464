"""What changes with the step: learning rate, sequence length, weights of the loss. All are functions of the step alone.

So a run that was interrupted, or one that stops early, has the same start as one that was not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dustin_runtime.errors import UsageError
from recipes.smollm2_135m.losses import Weights


@dataclass(frozen=True)
class Schedule:
    """Steps are counted from 0.

    Attributes:
        rate: highest learning rate, reached after `warmup` steps; the cosine ends at `floor` of it.
        lengths: from which share of the steps on which lengths are taken in turn.
        losses: from which share of the steps on which weights hold.
        ending: (step at which it was decided, steps to end at): from the first on, the rate also falls linearly to
            its floor at the second. For a run whose time turns out not to suffice.
    """

    steps: int
    rate: float
    warmup: int
    floor: float
    lengths: tuple[tuple[float, tuple[int, ...]], ...]
    losses: tuple[tuple[float, Weights], ...]
    ending: tuple[int, int] | None = None

    @property
    def end(self) -> int:
        """Steps to be done."""
        return min(self.steps, self.ending[1]) if self.ending else self.steps

    def rate_at(self, step: int) -> float:
        """Learning rate: linear warm-up, then a cosine."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        rate = self.rate * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * min(done, 1.0))) / 2)
        if self.ending and step >= self.ending[0]:
            begin, end = self.ending
            lowest = self.rate * self.floor
            rate = lowest + (rate - lowest) * max(end - step, 0) / max(end - begin, 1)
        return rate

    def length_at(self, step: int) -> int:
        """Tokens of a sequence."""
        choices = [found for share, found in self.lengths if share * self.steps <= step][-1]
        return choices[step % len(choices)]

    def weights_at(self, step: int) -> Weights:
        """Weights of the loss."""
        return [found for share, found in self.losses if share * self.steps <= step][-1]

    @property
    def longest(self) -> int:
        """The longest sequence."""
        return max(length for _, found in self.lengths for length in found)


def parse_lengths(text: str) -> tuple[tuple[float, tuple[int, ...]], ...]:
    """Read `0:512,2048;0.5:2048,8192`: shares of the steps, and lengths that are taken in turn from there on.

    Raises:
        UsageError: not of that form, or a length that does not divide the longest.
    """
    stages = []
    for share, values in _stages(text, "--lengths"):
        try:
            stages.append((share, tuple(int(value) for value in values.split(","))))
        except ValueError:
            raise UsageError(f"--lengths {text}: {values!r} is no list of numbers") from None
    lengths = [length for _, found in stages for length in found]
    if wrong := [length for length in lengths if length < 2 or max(lengths) % length]:
        raise UsageError(f"--lengths {text}: {wrong[0]} does not divide the longest, {max(lengths)}")
    return tuple(stages)


def parse_losses(text: str) -> tuple[tuple[float, Weights], ...]:
    """Read `0:kl=1;0.5:kl=0.3,tv=0.7`: shares of the steps, and weights that hold from there on.

    Raises:
        UsageError: not of that form.
    """
    stages = []
    for share, values in _stages(text, "--loss"):
        parts = dict(value.partition("=")[::2] for value in values.split(","))
        try:
            weights = Weights(**{"kl": 0.0, "tv": 0.0} | {name: float(value) for name, value in parts.items()})
        except (TypeError, ValueError):
            raise UsageError(f"--loss {text}: {values!r}: give kl=WEIGHT, tv=WEIGHT or both") from None
        if min(weights) < 0 or not max(weights) > 0:
            raise UsageError(f"--loss {text}: {values!r}: weights must not be negative, and one positive")
        stages.append((share, weights))
    return tuple(stages)


def _stages(text: str, flag: str) -> list[tuple[float, str]]:
    found = []
    for part in text.split(";"):
        share, colon, values = part.partition(":")
        try:
            found.append((float(share), values))
        except ValueError:
            colon = ""
        if not colon:
            raise UsageError(f"{flag} {text}: {part!r}: give SHARE:VALUES, such as 0:512,1024")
    shares = [share for share, _ in found]
    if shares[0] != 0 or shares != sorted(shares) or shares[-1] >= 1:
        raise UsageError(f"{flag} {text}: shares must ascend from 0 and stay below 1")
    return found
