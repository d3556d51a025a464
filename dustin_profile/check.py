"""Guarding a config: ARR recomputed on the documents of a baseline, compared document by document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dustin_profile.data import Prompt
from dustin_profile.progress import progress
from dustin_profile.search.budget import Budget
from dustin_profile.search.evaluate import Policy, Recovery, evaluate
from dustin_profile.search.stage import RESULTS_VERSION
from dustin_profile.settings import ModelSettings, choose_pair
from dustin_profile.statistics import interval
from dustin_profile.traces.collect import Collector, Prompted, ShortContinuationError, TraceSettings
from dustin_profile.traces.stage import prompts_of, require_same
from dustin_profile.traces.windows import Windows
from dustin_runtime.config import DustinConfig
from dustin_runtime.errors import ConflictError, MissingError
from dustin_runtime.files import read_json
from dustin_runtime.loading import Pair, open_configured, pick_device, pick_dtype

_NEEDED = {"version", "pair", "traces", "depth", "selection", "documents", "policies", "heads"}
"""What a comparison reads of a baseline."""


@dataclass(frozen=True)
class Verdict:
    """What a check found; `rows` are (document, baseline ARR, ARR now)."""

    passed: bool
    difference: float
    """Mean ARR now less the baseline's, paired by document."""
    tolerance: float
    rows: list[tuple[str, float, float]]
    policies: dict[str, tuple[float, float]]
    """Mean ARR of every policy: baseline, now."""
    interval: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"kind": "dustin-check"} | {field.name: getattr(self, field.name) for field in fields(self)}


def check(
    config: DustinConfig, baseline_path: Path, models: ModelSettings, data: str | None, tolerance: float
) -> Verdict:
    """Recompute and compare.

    It is the same documents through the same arithmetic, so what differs is not sampling: a mean below the baseline by
    more than the tolerance fails.

    Args:
        models: where to find the models, if the config's own ids do not tell; `dtype` auto is the baseline's.
        data: where the baseline's documents are, if they came from a file or folder.

    Raises:
        ConflictError: the baseline was measured on other models, documents or settings; names the field.
        MissingError: baseline, models or documents cannot be read.
        ConfigError: the config was made for another pair.
    """
    baseline = read_baseline(baseline_path)
    traces = baseline["traces"]
    if models.dtype == "auto":
        models = replace(models, dtype=traces["dtype"])
    _require_alike(config, baseline, models.dtype)
    pair = open_models(config, models)
    for side, found in pair.provenance().items():  # the content decides, not the name that a copy has
        require_same(f"models.{side}.sha256", traces["models"][side]["sha256"], found["sha256"])
    prompts = prompts_of(
        pair, traces, baseline["documents"]["reported"], data, baseline.get("template", "auto"), models.offline
    )
    measured = _measure(pair, config, baseline, models, prompts)
    before = baseline["policies"]["hybrid"]["per_document"]
    now = dict(zip([prompt.id for prompt in prompts], measured["hybrid"].arr.tolist(), strict=True))
    differences = [now[name] - before[name] for name in now]
    change = interval(differences, seed=0)
    return Verdict(
        passed=change.mean >= -tolerance,
        difference=change.mean,
        tolerance=tolerance,
        rows=[(name, before[name], now[name]) for name in now],
        policies={
            name: (baseline["policies"][name]["arr"]["mean"], float(recovery.arr.mean()))
            for name, recovery in measured.items()
        },
        interval=change._asdict(),
    )


def read_baseline(path: Path) -> dict[str, Any]:
    """Read a results file.

    Raises:
        MissingError: absent, or not one.
        ConflictError: written by a newer version.
    """
    data = read_json(path)
    if not isinstance(data, dict) or data.get("kind") != "dustin-results":
        raise MissingError(f"{path}: not a results file; give the results.json that a search wrote")
    if absent := _NEEDED - data.keys():
        raise MissingError(f"{path}: has no {min(absent)}; give the results.json that a search wrote")
    if data["version"] > RESULTS_VERSION:
        raise ConflictError(f"{path}: version {data['version']} is newer than this dustin; upgrade it")
    return data


def _require_alike(config: DustinConfig, baseline: dict[str, Any], dtype: str) -> None:
    selection = baseline["selection"]
    ours = config.pair.model_dump()
    theirs = dict(baseline["pair"])
    for side in ("target", "draft"):
        ours[side], theirs[side] = ({k: v for k, v in x[side].items() if k != "id"} for x in (ours, theirs))
    require_same("pair", theirs, ours)
    require_same("budget", selection["budget"], config.selection.budget)
    require_same("depth", baseline["depth"], config.depth)
    require_same("rope", baseline["traces"]["models"]["rope"], config.rope.model_dump() if config.rope else None)
    require_same("dtype", baseline["traces"]["dtype"], dtype)


def open_models(config: DustinConfig, models: ModelSettings) -> Pair:
    """The pair that a config was made for, found by its recorded ids or where `models` says.

    Raises: as `open_configured` and, where a pair is named, `choose_pair`.
    """
    target, draft = models.target, models.draft
    if models.pair:
        choice = choose_pair(models)
        target, draft = choice.target, choice.draft
    return open_configured(config, target, draft, rope=models.rope, offline=models.offline)


def _measure(
    pair: Pair, config: DustinConfig, baseline: dict[str, Any], models: ModelSettings, prompts: list[Prompt]
) -> Mapping[Policy, Recovery]:
    device = pick_device(models.device)
    target = pair.load_target(pick_dtype(models.dtype, device), device)
    traces, selection = baseline["traces"], config.selection
    settings = TraceSettings(
        traces["continuation"], traces["windows"], traces["depth"], traces["width"], traces["lookahead"]
    )
    collector = Collector(
        target,
        pair.load_draft(target),
        history={selection.history.layer: selection.history.heads},
        evaluation={int(layer): heads for layer, heads in baseline["heads"]["evaluation"].items()},
        lookahead={entry.layer: entry.heads for entry in selection.lookahead},
        settings=settings,
        shared_vocab=pair.shared_vocab,
        stop_ids=pair.stop_ids(),
        capacity=max(len(prompt.ids) for prompt in prompts) + traces["continuation"],
        rows=traces.get("rows", 1),
    )
    windows: list[Windows] = []
    with progress("check", len(prompts)) as advance:
        for found in collector.trace_all([Prompted(prompt.id, prompt.ids, prompt.answer_ids) for prompt in prompts]):
            if isinstance(found, ShortContinuationError):
                raise found
            windows.append(found)
            advance(1)
    return evaluate(
        windows,
        target_layer=selection.history.layer,
        draft_layers=[entry.layer for entry in selection.lookahead],
        m=selection.m,
        budget=Budget(selection.budget, selection.sink, selection.window),
    )
