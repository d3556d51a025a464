"""Which answers a text names: numbers or names picked out of whatever prose stands around them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from dustin_profile.evaluation.facts import CONSONANTS, VOWELS

_GROUPED = re.compile(r"(?<![0-9,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
"""Thousands set apart by commas: 726,491. A list of numbers of three digits would look the same; none is ever asked."""
_NUMBER = re.compile(r"[0-9]{3,}")
"""Numbers of one or two digits count or enumerate ("the 4 values", "2)"); they are no values."""
_NAME = re.compile(f"(?:[{CONSONANTS}][{VOWELS}]){{2}}[{CONSONANTS}]")


def numbers(text: str) -> list[str]:
    """The distinct numbers of three or more digits in a text, in the order of their first mention."""
    joined = _GROUPED.sub(lambda match: match[0].replace(",", ""), text)
    return list(dict.fromkeys(_NUMBER.findall(joined)))


def variables(text: str, known: Collection[str]) -> list[str]:
    """The distinct variables that a text names, in the order of their first mention, in capitals.

    Those of the prompt (`known`) are recognised in any case, others (invented ones) by their form in capitals.
    """
    words = re.findall(r"[^\W\d_]+", text)
    return list(dict.fromkeys(word.upper() for word in words if word.upper() in known or _NAME.fullmatch(word)))


def judge(said: Sequence[str], wanted: Sequence[str], *, ordered: bool) -> dict[str, float]:
    """Score distinct mentions against the distinct answers wanted.

    Returns:
        recalled: share of the answers that are named. precision: share of the mentions that are answers; 0 without a
        mention. exact: 1 where all answers and nothing else is named, also in their order if `ordered`.
    """
    hits = len(set(said) & set(wanted))
    exact = list(said) == list(wanted) if ordered else set(said) == set(wanted)
    return {"recalled": hits / len(wanted), "precision": hits / max(len(said), 1), "exact": float(exact)}
