"""When enough needle prompts have been measured: an order of which every beginning is balanced, and how far a ranking
would change with other needles.

Halves of the needles are ranked beside each other: they share no fact, so they differ as two such measurements do, each
with half the needles, and agree less than two with all of them. Drawing needles with replacement would flatter: two
draws share needles, and with them their noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, islice
from math import comb
from typing import Any

import numpy as np

from dustin_profile.choices import Credit
from dustin_profile.evaluation.draw import Draw
from dustin_profile.srh.ranking import top_overlap
from dustin_profile.srh.store import Entry, Key

LEAST_NEEDLES = 4
"""Fewest retrieved needles whose halves say anything."""
HALVES = 200
"""Most divisions into halves that are compared."""
_SEED = 0


def batches(keys: Sequence[Key]) -> list[list[Key]]:
    """All prompts in a seeded order, cut into batches of every needle once.

    Each time a needle takes, of its prompts, the one whose length and depth have had the fewest turns: together, with
    this needle, and alone. So they are balanced at the end of every batch, as nearly as they divide.
    """
    needles = Draw(_SEED, "needles").shuffled(sorted({key.needle for key in keys}))
    cells = Draw(_SEED, "cells").shuffled(sorted({(key.length, key.depth) for key in keys}))
    left = {needle: [Key(length, depth, needle) for length, depth in cells] for needle in needles}
    turns: Counter[tuple[object, ...]] = Counter()
    ordered = []
    for _ in cells:
        batch = []
        for needle in needles:
            key = min(left[needle], key=lambda key: [turns[part] for part in _parts(key)])
            left[needle].remove(key)
            turns.update(_parts(key))
            batch.append(key)
        ordered.append(batch)
    return ordered


def _parts(key: Key) -> list[tuple[object, ...]]:
    """What is to be balanced, the first above all."""
    length, depth = ("length", key.length), ("depth", key.depth)
    return [(*length, *depth), (key.needle, *depth), (key.needle, *length), depth, length]


def overlap(entries: Sequence[Entry], credit: Credit) -> dict[str, Any] | None:
    """How many of a layer's top four heads another such set of prompts would have, mean over layers.

    Returns:
        JSON: `mean`, `low` and `high`, the middle 95 % of divisions of the needles into halves, and their number; None
        if too few needles were retrieved.
    """
    accepted = [entry for entry in entries if entry["accepted"]]
    owners = np.asarray([entry["needle"] for entry in accepted])
    needles = sorted(set(owners.tolist()))
    if len(needles) < LEAST_NEEDLES:
        return None
    tables = np.asarray([entry[credit] for entry in accepted], dtype=np.float64)
    sums = np.stack([tables[owners == needle].sum(0) for needle in needles])
    counts = np.asarray([(owners == needle).sum() for needle in needles])
    found = []
    for half in _halves(len(needles)):
        inside = np.isin(np.arange(len(needles)), half)
        one, other = (sums[side].sum(0) / counts[side].sum() for side in (inside, ~inside))
        found.append(np.mean(top_overlap(one, other)))
    low, high = np.quantile(found, (0.025, 0.975))
    rounded = {name: round(float(value), 4) for name, value in (("mean", np.mean(found)), ("low", low), ("high", high))}
    return rounded | {"halves": len(found)}


def _halves(count: int) -> list[tuple[int, ...]]:
    """Half of `count` needles in every way, or in `HALVES` random ones."""
    half, everyone = count // 2, range(count)
    ways = comb(count, half)
    if count % 2 == 0:
        ways //= 2  # the first half of them leaves the other halves: those with needle 0 come first
    if ways <= HALVES:
        return list(islice(combinations(everyone, half), ways))
    return [tuple(Draw(_SEED, "half", draw).shuffled(everyone)[:half]) for draw in range(HALVES)]
