"""`dustin-profile eval arr`: attention recovery by budget, split, layer and distance, from a run's traces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dustin_profile.choices import Side
from dustin_profile.cli.eval import Config, Overwrite, RunDir, results_folder
from dustin_profile.cli.options import Json, Quiet, begin, with_settings
from dustin_profile.settings import ModelSettings

if TYPE_CHECKING:
    from dustin_profile.data import Prompt
    from dustin_profile.evaluation.arr.sources import Sources
    from dustin_profile.evaluation.arr.stage import Again
    from dustin_runtime.config import DustinConfig

_OF_THE_PASS = ("distance", "data", "pair", "target", "draft", "rope", "device", "dtype")
"""Options that say something about the pass alone: without it no model is opened."""


@with_settings(models=ModelSettings)
def arr(
    config: Config,
    models: ModelSettings,
    given: frozenset[str],
    traces: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of traces; repeat to compare data sets. Default: those of the run."),
    ] = None,
    split: Annotated[Side, typer.Option(help="Documents that the search did not see, or all.")] = "held-out",
    budget: Annotated[
        list[int] | None,
        typer.Option(
            "--budget", min=1, help="k, with m in proportion; repeat for several. Default: 32 to 2048 and the config's."
        ),
    ] = None,
    forced_pass: Annotated[
        bool, typer.Option("--forced-pass", help="Run the target once more: ARR by layer, and by age of history.")
    ] = False,
    distance: Annotated[
        list[int] | None,
        typer.Option(min=1, help="How far back history is taken, tokens; repeat for several. Default: 1, 2, 4 … 64."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Where the traced documents are, for --forced-pass; default: as recorded.")
    ] = None,
    run_dir: RunDir = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Evaluate a config on stored traces: every policy that they suffice for, against budget, m and the oracle."""
    from dustin_profile.evaluation.arr.report import BUDGET_HEADER, headline
    from dustin_profile.evaluation.arr.sources import Sources, searched_documents
    from dustin_profile.evaluation.arr.stage import at_budgets, evaluate
    from dustin_profile.rundir import locked
    from dustin_runtime.errors import UsageError

    served = begin(config, models, quiet)
    if not forced_pass and (useless := [name for name in _OF_THE_PASS if name in given]):
        raise UsageError(f"--{useless[0]}: is of --forced-pass alone; add it")
    if not traces and not config.is_dir():
        raise UsageError(f"--traces: {config} is a file; give its run directory, or the folder of the traces")
    searched = searched_documents(config) if split == "held-out" else None
    sources = Sources(traces or [config / "traces"], served, split, searched)
    selections = at_budgets(served.selection, budget, sources.least_prefix)
    folder = run_dir or results_folder(config, served)
    again = _again(served, models, sources, distance, data) if forced_pass else None
    with locked(folder):
        result = evaluate(folder / "arr", served, sources, selections, split, again, overwrite)
    if as_json:
        print(json.dumps(result))
    else:
        from dustin_profile.cli.tables import plain_table

        names = " with ".join(result["pair"][side]["id"] for side in ("target", "draft"))
        plain_table(f"{names}, {len(result['documents'])} documents", BUDGET_HEADER, headline(result))
        print("  ".join(str(folder / "arr" / f"results.{kind}") for kind in ("json", "md")))


def _again(
    served: DustinConfig, models: ModelSettings, sources: Sources, distance: list[int] | None, data: str | None
) -> Again:
    """The pass over the documents of the traces, whose texts are found and checked before anything is loaded."""
    from dustin_profile import progress
    from dustin_profile.check import open_models
    from dustin_profile.evaluation.arr.stage import DISTANCES, Again
    from dustin_profile.provenance import device_kind
    from dustin_profile.traces.stage import prompts_of, require_same
    from dustin_runtime.errors import UsageError
    from dustin_runtime.loading import pick_device, pick_dtype
    from dustin_runtime.models.decoder import Decoder

    if data is not None and len(sources.stores) > 1:
        raise UsageError("--data: names one data set, several --traces are given; run them one by one")
    if models.dtype == "auto":
        models = replace(models, dtype=sources.stores[0].inputs["dtype"])
    pair = open_models(served, models)
    prompts: dict[str, Prompt] = {}
    template = served.provenance.get("arguments", {}).get("template", "auto")
    for store in sources.stores:
        for side, found in pair.provenance().items():
            require_same(f"models.{side}.sha256", store.inputs["models"][side]["sha256"], found["sha256"], "the run")
        wanted = {entry["id"]: entry for entry in store.entries}
        theirs = prompts_of(pair, store.inputs, wanted, data, template, models.offline, "the run")
        prompts |= dict(zip(wanted, theirs, strict=True))
    device = pick_device(models.device)
    dtype = pick_dtype(models.dtype, device)

    def load() -> Decoder:
        progress.say(f"loading {pair.target_id}")
        return pair.load_target(dtype, device)

    inputs = {"device": device_kind(device), "dtype": str(dtype).removeprefix("torch.")}
    return Again(load, prompts, distance or DISTANCES, inputs)
