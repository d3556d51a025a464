"""The evaluation of a config's ARR: from stored traces at once; layers and distances from one more pass, resumable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dustin_profile.data import Prompt
from dustin_profile.evaluation.arr import budgets, splits
from dustin_profile.evaluation.arr.forced import ForcedPass, ForcedRows
from dustin_profile.evaluation.arr.layers import distance_arr, layer_arr, summarise_distances, summarise_layers
from dustin_profile.evaluation.arr.policies import Rule, rules
from dustin_profile.evaluation.arr.sources import Sources, Traced
from dustin_profile.progress import progress, say
from dustin_profile.provenance import versions
from dustin_profile.rundir import first_difference, open_stage, read_part
from dustin_profile.traces.windows import Windows
from dustin_runtime.config import DustinConfig, Selection, changed
from dustin_runtime.errors import ConflictError, MissingError, UsageError
from dustin_runtime.files import clear_temporaries, digest, digest_text, write_json, write_text, write_with
from dustin_runtime.models.decoder import Decoder

VERSION = 1
FORCED_VERSION = 1
"""Raised when the pass would give other numbers: documents of an older version are not mixed in."""
BUDGETS = (32, 64, 128, 256, 512, 1024, 2048)
DISTANCES = (1, 2, 4, 8, 16, 32, 64)
_SAME = 0.02
"""Attention that may lie elsewhere when the target is run again, of 1: fp16 and another order of sums."""


@dataclass(frozen=True)
class Again:
    """How the target is run once more.

    Attributes:
        load: called if there is something to run.
        prompts: of every document, by id.
        inputs: what the pass depends on beside traces and config, for the record.
    """

    load: Callable[[], Decoder]
    prompts: dict[str, Prompt]
    distances: Sequence[int]
    inputs: dict[str, Any]


def at_budgets(selection: Selection, wanted: Sequence[int] | None, least_prefix: int) -> list[Selection]:
    """The configured selection at every budget, m in proportion.

    Args:
        wanted: None for all of `BUDGETS` that leave something to choose and something to leave out, and the config's.

    Raises:
        UsageError: a budget covers the traced prefixes, or leaves nothing to choose.
    """
    if wanted is None:
        protected = selection.sink + selection.window
        wanted = [k for k in BUDGETS if protected < k < least_prefix]
        if selection.budget < least_prefix:
            wanted = sorted({*wanted, selection.budget})
    if too_large := [k for k in wanted if k >= least_prefix]:
        raise UsageError(
            f"--budget {too_large[0]}: covers the shortest traced prompt, {least_prefix} tokens, where every policy has"
            " all; give smaller ones, or traces of a longer --context"
        )
    if not wanted:
        raise UsageError(f"--budget: none fits between what is protected and {least_prefix} tokens; trace longer texts")
    return [changed(selection, k, None) for k in dict.fromkeys(wanted)]


def evaluate(
    folder: Path,
    config: DustinConfig,
    sources: Sources,
    selections: Sequence[Selection],
    side: str,
    again: Again | None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Measure, and write `results.json`, `results.md`, `rows.parquet` and the figures.

    Returns:
        The document of `results.json`.

    Raises:
        ConflictError: the pass was made from other inputs, or the target attends elsewhere now than in the traces.
        CapacityError: memory or disk does not suffice.
    """
    chosen = rules()
    rows, curves = _from_traces(config, sources, selections, chosen)
    result: dict[str, Any] = {
        "kind": "dustin-arr",
        "version": VERSION,
        "pair": config.pair.model_dump(),
        "selection": config.selection.model_dump(mode="json"),
        "depth": config.depth,
        "split": side,
        "traces": [store.inputs for store in sources.stores],
        "documents": {
            traced.entry["id"]: {"group": traced.group} | {key: traced.entry[key] for key in ("sha256", "windows")}
            for traced in sources.documents
        },
        "policies": {rule.name: rule.about for rule in chosen},
        "budgets": budgets.summarise(rows),
        "splits": splits.summarise(curves, config.selection.m),
        "layers": None,
        "distances": None,
    }
    if again is not None:
        found, how = _run_again(folder / "forced", config, sources, selections, again, overwrite), again.inputs
    else:
        found, how = _run_before(folder / "forced", config, sources, selections)
    if found:
        result["layers"] = summarise_layers([document["layers"] for document in found])
        result["distances"] = summarise_distances([document["distances"] for document in found])
        result["forced_pass"] = how
    result["provenance"] = {"versions": versions(), "config": config.provenance}
    _write(folder, result, rows)
    return result


def _from_traces(
    config: DustinConfig, sources: Sources, selections: Sequence[Selection], chosen: Sequence[Rule]
) -> tuple[list[budgets.Row], list[splits.SplitCurve]]:
    rows: list[budgets.Row] = []
    curves: list[splits.SplitCurve] = []
    with progress("arr", len(sources.documents)) as advance:
        for traced, windows in sources.windows():
            rows += [{"group": traced.group} | row for row in budgets.window_rows(windows, selections, chosen)]
            curves.append(splits.split_curve(windows, traced.group, config.selection))
            advance(1)
    return rows, curves


def _run_again(
    folder: Path,
    config: DustinConfig,
    sources: Sources,
    selections: Sequence[Selection],
    again: Again,
    overwrite: bool,
) -> list[dict[str, Any]]:
    """One file per document."""
    inputs = _made_from(config, sources, selections) | {"distances": list(again.distances)} | again.inputs
    shortest = min(len(prompt.ids) for prompt in again.prompts.values())
    if max(again.distances) >= shortest:
        raise UsageError(f"--distance {max(again.distances)}: the shortest prompt has {shortest} tokens; give less")
    open_stage(folder, inputs, overwrite, of_config=False)
    clear_temporaries(folder)
    files = {_file(folder, traced): traced for traced in sources.documents}
    pending = {file for file in files if not file.exists()}
    if pending:
        target = again.load()
        with progress("layers and distances", len(pending)) as advance:
            for traced, windows in sources.windows():
                file = _file(folder, traced)
                if file in pending:
                    write_json(file, _document(target, config, traced, windows, selections, again))
                    advance(1)
    return [_read(file, traced) for file, traced in files.items()]


def _run_before(
    folder: Path, config: DustinConfig, sources: Sources, selections: Sequence[Selection]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What an earlier pass left, and how it was run; nothing if it was of other inputs or is not complete."""
    path = folder / "inputs.json"
    if not path.exists():
        return [], {}
    ours = _made_from(config, sources, selections)
    try:
        before = read_part(path, "measure again", lambda inputs: ours.keys() <= inputs.keys())
        differs = first_difference({name: before[name] for name in ours}, ours)
        if differs is None:
            found = [_read(_file(folder, traced), traced) for traced in sources.documents]
            return found, {name: before[name] for name in before if name not in {*ours, "distances"}}
        lacks = f"it is of other {differs[0]}"
    except MissingError as error:
        lacks = f"it is not complete ({error})"
    say(f"layers and distances of the earlier pass are left out: {lacks}; give --forced-pass for them")
    return [], {}


def _made_from(config: DustinConfig, sources: Sources, selections: Sequence[Selection]) -> dict[str, Any]:
    """What a pass and the figures from traces have in common."""
    return {
        "version": FORCED_VERSION,
        "traces": [digest(store.inputs) for store in sources.stores],
        "selection": config.selection.model_dump(mode="json"),
        "budgets": [selection.budget for selection in selections],
    }


def _document(
    target: Decoder,
    config: DustinConfig,
    traced: Traced,
    windows: Windows,
    selections: Sequence[Selection],
    again: Again,
) -> dict[str, Any]:
    inputs, prompt = traced.store.inputs, again.prompts[traced.entry["id"]]
    evaluation = {int(layer): heads for layer, heads in inputs["heads"]["evaluation"].items()}
    forced = ForcedPass(
        target,
        evaluation=evaluation,
        history_layer=config.selection.history.layer,
        history=config.selection.history.heads,
        distances=again.distances,
        width=inputs["width"],
        capacity=len(prompt.ids) + inputs["continuation"],
    )
    try:
        rows = forced.rows(prompt.ids, windows.text.tolist(), windows.prefix)
        _require_alike(rows, windows, evaluation)
    except ConflictError as error:
        raise ConflictError(
            f"{windows.document}: {error}: run it on the traces' device with their --dtype {inputs['dtype']}"
        ) from None
    return {
        "id": windows.document,
        "layers": layer_arr(rows, windows, config.selection),
        "distances": distance_arr(rows, windows, selections, again.distances),
    }


def _require_alike(rows: ForcedRows, windows: Windows, evaluation: dict[int, Any]) -> None:
    moved = float((rows.mean_truth(evaluation)[:, : windows.truth.shape[1]] - windows.truth).abs().sum(-1).max())
    if not moved <= _SAME:
        raise ConflictError(f"{moved:.1%} of the target's attention lies elsewhere than in the traces")


def _file(folder: Path, traced: Traced) -> Path:
    return folder / f"{digest_text(traced.entry['id'])[:16]}.json"  # ids are names of files and more


def _read(file: Path, traced: Traced) -> dict[str, Any]:
    return read_part(
        file,
        "measure its document again",
        lambda entry: entry.get("id") == traced.entry["id"] and {"layers", "distances"} <= entry.keys(),
    )


def _write(folder: Path, result: dict[str, Any], rows: Sequence[budgets.Row]) -> None:
    import pandas

    from dustin_profile.evaluation.arr.figures import draw
    from dustin_profile.evaluation.arr.report import markdown

    frame = pandas.DataFrame(rows)
    write_with(folder / "rows.parquet", lambda temporary: frame.to_parquet(temporary, index=False))
    draw(folder, result)
    write_text(folder / "results.md", markdown(result))
    write_json(folder / "results.json", result)
    say(f"{len(result['documents'])} documents, {len(rows)} rows")
