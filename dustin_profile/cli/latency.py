"""`dustin-profile latency`: what a search for throughput has to know of the device that serves."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from dustin_profile.cli.options import Depth, DryRun, Json, Overwrite, Quiet, RunDir, with_settings
from dustin_profile.cli.stages import Run
from dustin_profile.settings import DataSettings, ModelSettings, ObjectiveSettings, SearchSettings, StepSettings


@with_settings(models=ModelSettings, steps=StepSettings)
def latency(
    models: ModelSettings,
    steps: StepSettings,
    context: Annotated[
        int, typer.Option(help="Tokens before a step.", rich_help_panel="Steps")
    ] = DataSettings().context,
    draft_layers: Annotated[
        int, typer.Option(help="Draft layers that are scored, at most.", rich_help_panel="Steps")
    ] = SearchSettings().draft_layers,
    depth: Depth = None,
    run_dir: RunDir = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time a few steps and fit the time of all that `search --objective throughput` may choose among: latency.json.

    That search does it as well; this is for another device than the one that searches.
    """
    run = Run(
        depth,
        None,
        run_dir,
        overwrite,
        quiet,
        models=models,
        steps=steps,
        data=replace(DataSettings(), context=context),
        search=replace(SearchSettings(), draft_layers=draft_layers),
        objective=ObjectiveSettings(objective="throughput"),
    )
    if dry_run:
        run.price(as_json, ("latency",))
        return
    with run.started() as pipeline:
        document = pipeline.latency(here=True).document
    if as_json:
        print(json.dumps(document))
    else:
        from dustin_profile.cli.tables import latency_table

        latency_table(document)
        print(pipeline.run_dir / "latency.json")
