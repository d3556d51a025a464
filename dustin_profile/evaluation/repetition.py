"""How much a text repeats itself: repetition is easy to predict and to draft, whatever the method."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

LENGTH = 4
"""Length of the sequences that repetition is judged by."""


def distinct(units: Sequence[Hashable]) -> float:
    """Distinct sequences of `LENGTH` words or tokens over all; 1 for a text too short to have two."""
    found = [tuple(units[at : at + LENGTH]) for at in range(len(units) - LENGTH + 1)]
    return len(set(found)) / len(found) if found else 1.0


def repeated(units: Sequence[Hashable]) -> float:
    """The share of sequences of `LENGTH` that occurred before in the text."""
    return 1.0 - distinct(units)
