"""The record of a run: `curve.json`, and a picture of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dustin_runtime.errors import ConflictError, MissingError
from dustin_runtime.files import read_json, write_json, write_with

KIND = "dustin-draft-curve"
COMPARED = ("kl", "tv", "loss")


def read_curve(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        MissingError: absent, or not one.
    """
    found = read_json(path)
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise MissingError(f"{path}: not the curve of a training run")
    return found


def write_curve(path: Path, curve: Mapping[str, Any]) -> None:
    """Replace the record."""
    write_json(path, dict(curve))


def until(curve: dict[str, Any], step: int) -> None:
    """Drop what was recorded after `step` steps: a run that was killed does them again."""
    for name in ("train", "heldout", "seconds"):
        curve[name] = [entry for entry in curve[name] if entry["step"] <= step]


def largest_difference(reference: Mapping[str, Any], curve: Mapping[str, Any]) -> tuple[int, float]:
    """Steps that both recorded, and by how much their losses differ at most, relatively.

    Raises:
        ConflictError: the settings differ, or no step was recorded by both.
    """
    from dustin_profile.rundir import first_difference

    if found := first_difference(reference["settings"], curve["settings"], "settings"):
        raise ConflictError(f"{found[0]}: the reference has {found[1]}, this run {found[2]}; they cannot be compared")
    before = {entry["step"]: entry for entry in reference["train"]}
    shared = [(before[entry["step"]], entry) for entry in curve["train"] if entry["step"] in before]
    if not shared:
        raise ConflictError("the reference and this run recorded no step in common")
    differences = [
        abs(one[name] - other[name]) / max(abs(one[name]), 1e-9) for one, other in shared for name in COMPARED
    ]
    return len(shared), max(differences)


def draw_curve(path: Path, curve: Mapping[str, Any]) -> None:
    """KL of training and held-out text, and the overlap, over the tokens seen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    train = curve["train"]
    left.plot([e["tokens"] / 1e6 for e in train], [e["kl"] for e in train], color="#64748b", lw=0.7, label="training")
    for source in sorted({name for entry in curve["heldout"] for name in entry["sources"]}):
        entries = [entry for entry in curve["heldout"] if source in entry["sources"]]
        at = [entry["tokens"] / 1e6 for entry in entries]
        left.plot(at, [entry["sources"][source]["kl"] for entry in entries], "o-", ms=3, lw=1.4, label=source)
        right.plot(at, [entry["sources"][source]["overlap"] for entry in entries], "o-", ms=3, lw=1.4, label=source)
        right.plot(
            at, [entry["sources"][source]["top1"] for entry in entries], ":", lw=1.2, color=right.lines[-1].get_color()
        )
    left.set(xlabel="million tokens", ylabel="KL, nats per token", yscale="log")
    right.set(xlabel="million tokens", ylabel="1 - TV (dotted: same arg-max)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    write_with(path, lambda temporary: figure.savefig(temporary, format="png", dpi=140))
