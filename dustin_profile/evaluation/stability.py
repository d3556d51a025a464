"""How far a ranking of heads depends on what it was measured with: needles, their number, lengths, depths, haystacks.

The scores of every prompt are kept by `dustin-profile srh`, so nothing runs again: rankings are made anew from parts of
them. Prompts with one needle resemble each other, so needles are the unit: of splitting, and of leaving out one at a
time for intervals (jackknife; drawing needles with replacement would itself make rankings noisier).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dustin_profile.evaluation.draw import Draw
from dustin_profile.rundir import first_difference
from dustin_profile.srh.ranking import USED, Array, Stability, agreement
from dustin_profile.srh.stage import read_entries
from dustin_runtime.errors import ConflictError, NothingMeasuredError
from dustin_runtime.files import read_json

SIDES = ("target", "draft")
FIGURES = ("top4_overlap", "kendall_tau")
_BOUNDS = {"top4_overlap": (0.0, 1.0), "kendall_tau": (-1.0, 1.0)}
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class PromptScores:
    """Accepted prompts of one model in one run.

    Attributes:
        label: of the run.
        tables: [prompts, layers, heads].
        needle, length, depth: [prompts].
    """

    label: str
    inputs: dict[str, Any]
    tables: Array
    needle: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    depth: npt.NDArray[np.float64]

    @property
    def needles(self) -> list[int]:
        """Distinct needles that were retrieved."""
        return sorted(set(self.needle.tolist()))

    def only(self, chosen: Mask) -> PromptScores:
        """The chosen prompts."""
        fields = {name: getattr(self, name)[chosen] for name in ("tables", "needle", "length", "depth")}
        return replace(self, **fields)

    def mean(self, left_out: int | None = None) -> Array:
        """[layers, heads] over the prompts, those of one needle left out if others remain."""
        inside = self.needle != (-1 if left_out is None else left_out)
        return np.asarray(self.tables[inside if inside.any() else ...].mean(axis=0))


def read_scores(run: Path, side: str, label: str) -> PromptScores:
    """The scores of a run.

    Raises:
        MissingError: they are absent, unfinished or damaged.
        NothingMeasuredError: no prompt was accepted.
    """
    folder = run / "srh" / side
    accepted = [entry for entry in read_entries(folder) if entry["accepted"]]
    if not accepted:
        raise NothingMeasuredError(f"{folder}: no needle was retrieved; rank with --mode forced")
    credit = read_json(run / "srh" / f"heads-{side}.json")["credit"]
    return PromptScores(
        label,
        read_json(folder / "inputs.json"),
        np.asarray([entry[credit] for entry in accepted], dtype=np.float64),
        np.asarray([entry["needle"] for entry in accepted]),
        np.asarray([entry["length"] for entry in accepted]),
        np.asarray([entry["depth"] for entry in accepted], dtype=np.float64),
    )


def analyse(runs: Sequence[PromptScores], draws: int, seed: int = 0) -> dict[str, Any]:
    """Everything about one side; the first run is the one whose parts are compared.

    Args:
        draws: random subsets of needles for each size.

    Raises:
        ConflictError: runs are of different models.
    """
    first = runs[0]
    for other in runs[1:]:
        if first_difference(first.inputs["model"]["sha256"], other.inputs["model"]["sha256"]):
            raise ConflictError(f"model: {first.label} and {other.label} ranked different ones; compare runs of one")
    heads = first.tables.shape[2]
    return {
        "model": first.inputs["model"]["id"],
        "mode": first.inputs["mode"],
        "needles": len(first.needles),
        "prompts": len(first.tables),
        "layers": first.tables.shape[1],
        "heads": heads,
        "chance_overlap": min(USED, heads) / heads,
        "sizes": sizes(first, draws, seed),
        "lengths": parts(first, "length"),
        "depths": parts(first, "depth"),
        "runs": [between(first, other) for other in runs[1:]],
    }


def sizes(scores: PromptScores, draws: int, seed: int) -> list[dict[str, Any]]:
    """Rankings from n random needles beside those of the needles left out: both see other facts.

    The spread is that of draws, not an interval for other needles: draws share needles.
    """
    needles = scores.needles
    found = []
    for count in range(1, len(needles) // 2 + 1):
        results = []
        for draw in range(draws):
            inside = np.isin(scores.needle, Draw(seed, count, draw).shuffled(needles)[:count])
            results.append(agreement(scores.only(inside).mean(), scores.only(~inside).mean()))
        prompts = round(len(scores.tables) * count / len(needles))
        found.append({"needles": count, "prompts": prompts, "draws": draws} | _spread(results))
    return found


def parts(scores: PromptScores, name: Literal["length", "depth"]) -> list[dict[str, Any]]:
    """Rankings from the prompts of one length or depth beside those of another, on the same needles."""
    values = getattr(scores, name)
    distinct = sorted(set(values.tolist()))
    return [
        {"first": one, "second": two} | _with_intervals(scores.only(values == one), scores.only(values == two), True)
        for index, one in enumerate(distinct)
        for two in distinct[index + 1 :]
    ]


def between(first: PromptScores, other: PromptScores) -> dict[str, Any]:
    """Rankings of two runs, and what the runs differ in."""
    differs = {
        key: [value, other.inputs.get(key)] for key, value in first.inputs.items() if value != other.inputs.get(key)
    }
    paired = "needles_sha256" not in differs
    return {
        "first": first.label,
        "second": other.label,
        "differs": differs,
        "paired": paired,
    } | _with_intervals(first, other, paired)


def _with_intervals(first: PromptScores, other: PromptScores, paired: bool, level: float = 0.95) -> dict[str, Any]:
    """Agreement of two rankings with its jackknife interval, and the overlap by layer.

    Args:
        paired: both were measured with the same needles, so one is left out of both at once; else the two samples
            vary independently.
    """
    from scipy.special import stdtrit

    whole = agreement(first.mean(), other.mean())
    samples: list[list[tuple[int | None, int | None]]]
    if paired:
        samples = [[(needle, needle) for needle in sorted({*first.needles, *other.needles})]]
    else:
        samples = [[(needle, None) for needle in first.needles], [(None, needle) for needle in other.needles]]
    variances = dict.fromkeys(FIGURES, 0.0)
    degrees = min(map(len, samples)) - 1
    for sample in samples if degrees else ():
        found = [_figures(agreement(first.mean(one), other.mean(two))) for one, two in sample]
        for name in FIGURES:
            values = np.asarray([figures[name] for figures in found])
            variances[name] += (len(values) - 1) / len(values) * float(((values - values.mean()) ** 2).sum())
    result: dict[str, Any] = {}
    for name, value in _figures(whole).items():
        low = high = None
        if degrees:
            reach = float(stdtrit(degrees, (1 + level) / 2)) * variances[name] ** 0.5
            low, high = max(value - reach, _BOUNDS[name][0]), min(value + reach, _BOUNDS[name][1])
        result[name] = {"mean": value, "low": low, "high": high, "method": "jackknife" if degrees else "none"}
    return result | {"per_layer": [round(share, 4) for share in whole.per_layer]}


def _spread(results: Sequence[Stability], level: float = 0.95) -> dict[str, Any]:
    """Mean over draws and the range of the middle 95 % of them; the overlap by layer."""
    found: dict[str, Any] = {}
    for name in FIGURES:
        values = [_figures(one)[name] for one in results]
        low, high = np.quantile(values, ((1 - level) / 2, (1 + level) / 2))
        found[name] = {"mean": float(np.mean(values)), "low": float(low), "high": float(high), "method": "draws"}
    layers = np.mean([one.per_layer for one in results], axis=0)
    return found | {"per_layer": [round(float(share), 4) for share in layers]}


def _figures(one: Stability) -> dict[str, float]:
    return {"top4_overlap": one.top, "kendall_tau": one.kendall}
