"""The stage that times steps: one file, `latency.json`, measured once for a pair, a batch, a context and a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dustin_profile.latency.measure import SINK, WINDOW, capacity_for, selection_for, time_steps
from dustin_profile.latency.model import Range, Step, fit, predict, steps_left_out, steps_to_fit
from dustin_profile.progress import progress, say
from dustin_profile.provenance import device_name, versions
from dustin_profile.rundir import changed, first_difference
from dustin_profile.settings import StepsToTime
from dustin_runtime.config import ModelIdentity
from dustin_runtime.errors import ConflictError, MissingError
from dustin_runtime.files import digest, read_json, write_json
from dustin_runtime.loading import Pair
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import check_context

LATENCY = "latency.json"
VERSION = 1
_TRUSTED = 0.1
"""Relative error on steps that were not fitted, above which a user is told."""
_AGAIN = "give another --run-dir, or --overwrite to measure again"


@dataclass(frozen=True)
class Serving:
    """What is to be served, and which of its settings may be chosen.

    Attributes:
        layers: draft layers that may be scored, at most.
    """

    batch: int
    context: int
    steps: StepsToTime
    layers: int


@dataclass(frozen=True)
class Latency:
    """A measured device. `document` is what `latency.json` holds."""

    document: dict[str, Any]

    def milliseconds(self, step: Step) -> float:
        inputs = self.document["inputs"]
        return predict(self.document["coefficients"], step, Range(inputs["budgets"], inputs["depths"]))

    @property
    def batch(self) -> int:
        return int(self.document["inputs"]["batch"])

    @property
    def sha256(self) -> str:
        return digest(self.document)


def check_room(pair: Pair, serving: Serving, dtype: torch.dtype, device: str) -> None:
    """Refuse before any work what cannot be timed.

    Raises:
        CapacityError: the context exceeds a model's, or memory does not suffice.
    """
    from dustin_runtime.memory_plan import free_bytes, plan, require
    from dustin_runtime.policies import make_policy

    depth, k = max(serving.steps.depths), max(serving.steps.budgets)
    capacity = capacity_for(serving.context, depth)
    for shape in (pair.target_shape, pair.draft_shape):
        check_context(shape, capacity, f"--context {serving.context} with the steps that are timed")
    if (free := free_bytes(device)) is None:
        return
    selection = selection_for(Step(depth, k, False, serving.layers, True), pair.target_shape, pair.draft_shape)
    need = plan(
        pair.target_shape,
        pair.draft_shape,
        batch=serving.batch,
        capacity=capacity,
        depth=depth,
        selection=selection,
        element_bytes=dtype.itemsize,
        draft_stores=pair.draft_stores,
        policies=[make_policy("dustin", selection)],
    )
    require(need, free + torch.cuda.memory_reserved(device))  # what is loaded already is part of the need


def measured(
    run_dir: Path,
    pair: Pair,
    models: Callable[[], tuple[Decoder, Decoder]],
    serving: Serving,
    dtype: torch.dtype,
    device: str,
    overwrite: bool,
    here: bool = False,
) -> Latency:
    """What the run directory's `latency.json` says, measured now if there is none.

    Args:
        models: gives target and draft; called if there is something to measure.
        here: as of `earlier`.

    Raises:
        ConflictError, MissingError: as `earlier`.
        CapacityError: memory does not suffice.
    """
    path = run_dir / LATENCY
    if found := earlier(run_dir, pair, serving, dtype, device, overwrite, here):
        say(f"{path}: measured on {found.document['device']}, {found.document['dtype']}")
        return found
    document: dict[str, Any] = {
        "kind": "dustin-latency",
        "version": VERSION,
        "inputs": _inputs(pair, serving),
        **_place(dtype, device),
        "versions": versions(),
    }
    document |= _measure(*models(), pair.shared_vocab, serving)
    write_json(path, document)
    if (error := float(document["max_relative_error"])) > _TRUSTED:
        say(f"{path}: {error:.0%} off on a step that was not fitted; was the device busy? --overwrite measures again")
    return Latency(_read(path))


def earlier(
    run_dir: Path, pair: Pair, serving: Serving, dtype: torch.dtype, device: str, overwrite: bool, here: bool = False
) -> Latency | None:
    """What was measured of these models and settings before; None if it is to be measured.

    Args:
        overwrite: measure again what is of others.
        here: whether it has to be of this device. Otherwise the file may have been brought from the one that serves.

    Raises:
        ConflictError: the file is of other models or settings; with `here` also of another device.
        MissingError: it is damaged.
    """
    path = run_dir / LATENCY
    if not path.exists():
        return None
    before = _read(path)
    fault = first_difference(before["inputs"], _inputs(pair, serving))
    if fault is None and here:
        place = _place(dtype, device)
        fault = first_difference({name: before[name] for name in place}, place)
    if fault is None:
        return Latency(before)
    if not overwrite:
        raise ConflictError(f"{path}: {changed(fault, 'measured with')}: {_AGAIN}")
    return None


def _inputs(pair: Pair, serving: Serving) -> dict[str, Any]:
    return {
        "version": VERSION,
        "models": {
            side: ModelIdentity.of("", shape).model_dump(exclude={"id"})
            for side, shape in (("target", pair.target_shape), ("draft", pair.draft_shape))
        },
        "batch": serving.batch,
        "context": serving.context,
        "budgets": list(serving.steps.budgets),
        "depths": list(serving.steps.depths),
        "draft_layers": serving.layers,
    }


def _place(dtype: torch.dtype, device: str) -> dict[str, str]:
    return {"device": device_name(device), "dtype": str(dtype).removeprefix("torch.")}


def _read(path: Path) -> dict[str, Any]:
    found = read_json(path)
    names = {"inputs", "device", "dtype", "coefficients", "measurements", "max_relative_error"}
    if not isinstance(found, dict) or found.get("kind") != "dustin-latency" or not names <= found.keys():
        raise MissingError(f"{path}: is not a measurement of steps; delete it to measure again")
    return found


def _measure(target: Decoder, draft: Decoder, shared_vocab: int, serving: Serving) -> dict[str, Any]:
    """Time the steps, fit, and say how far the model is from those that it has not seen."""
    among = Range(*serving.steps)
    fitted, left_out = (make(among, serving.layers) for make in (steps_to_fit, steps_left_out))
    steps = [*fitted, *left_out]
    with progress("latency", len(steps)) as advance:
        times = time_steps(target, draft, shared_vocab, steps, serving.batch, serving.context, advance)
    coefficients = fit(fitted, [timed.ms for timed in times[: len(fitted)]], among)
    rows = [
        step._asdict()
        | {"ms": timed.ms, "least_by_clock_ms": timed.least, "most_by_clock_ms": timed.most, "repeats": timed.repeats}
        | {"predicted_ms": predict(coefficients, step, among), "fitted": place < len(fitted)}
        for place, (step, timed) in enumerate(zip(steps, times, strict=True))
    ]
    return {
        "synthetic": ["synthetic context"],
        "protected": {"sink": SINK, "window": WINDOW},
        "measurements": rows,
        "coefficients": coefficients,
        "max_relative_error": _worst([row for row in rows if not row["fitted"]]),
        "max_relative_error_fitted": _worst([row for row in rows if row["fitted"]]),
    }


def _worst(rows: list[dict[str, Any]]) -> float:
    return float(max(abs(row["predicted_ms"] / row["ms"] - 1) for row in rows))
