"""`srh`, `trace` and `search`: the stages of a run, each including those before it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dustin_profile.cli.options import Depth, DryRun, Json, Overwrite, Quiet, RunDir, with_settings
from dustin_profile.settings import (
    DataSettings,
    HeadSettings,
    ModelSettings,
    PairChoice,
    SearchSettings,
    Settings,
    check_settings,
    choose_pair,
)

if TYPE_CHECKING:
    from dustin_profile.pipeline import Pipeline


@with_settings(models=ModelSettings, heads=HeadSettings)
def srh(
    models: ModelSettings,
    heads: HeadSettings,
    run_dir: RunDir = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find the semantic retrieval heads of target and draft: heads-*.json and a heatmap of each."""
    choice = choose_pair(models)
    settings = _settings(choice, run_dir, overwrite, quiet, models=models, heads=heads)
    if dry_run:
        _price(settings, choice, as_json, ("srh",))
        return
    from dustin_runtime.files import read_json

    with _run(settings, choice) as pipeline:
        paths = pipeline.heads()
    found = [read_json(path) for path in paths]
    if as_json:
        print(json.dumps({entry["side"]: entry for entry in found}))
    else:
        from dustin_profile.cli.tables import heads_table

        for path, entry in zip(paths, found, strict=True):
            heads_table(entry)
            print(f"{path}  {path.with_suffix('.png')}")


@with_settings(models=ModelSettings, heads=HeadSettings, data=DataSettings)
def trace(
    models: ModelSettings,
    heads: HeadSettings,
    data: DataSettings,
    depth: Depth = None,
    run_dir: RunDir = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Collect teacher-forced attention traces of calibration documents."""
    choice = choose_pair(models, depth)
    settings = _settings(choice, run_dir, overwrite, quiet, depth=depth, models=models, heads=heads, data=data)
    if dry_run:
        _price(settings, choice, as_json, ("srh", "trace"))
        return
    with _run(settings, choice) as pipeline:
        store, _ = pipeline.traces()
    entries = store.entries
    summary = {
        "folder": str(store.folder),
        "documents": len(entries),
        "windows": sum(entry["windows"] for entry in entries),
        "bytes": sum(entry["bytes"] for entry in entries),
    }
    if as_json:
        print(json.dumps(summary))
    else:
        print("{folder}: {documents} documents, {windows} windows, {bytes} bytes".format(**summary))


@with_settings(models=ModelSettings, heads=HeadSettings, data=DataSettings, search=SearchSettings)
def search(
    models: ModelSettings,
    heads: HeadSettings,
    data: DataSettings,
    search: SearchSettings,
    depth: Depth = None,
    run_dir: RunDir = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search layers and budget split, and emit the config: runs the stages before it as needed."""
    choice = choose_pair(models, depth, search.budget)
    settings = _settings(
        choice, run_dir, overwrite, quiet, depth=depth, models=models, heads=heads, data=data, search=search
    )
    if dry_run:
        _price(settings, choice, as_json, ("srh", "trace", "search"))
        return
    with _run(settings, choice) as pipeline:
        found = pipeline.search()
    if as_json:
        print(json.dumps(found.results))
    else:
        from dustin_profile.cli.tables import results_table

        results_table(found.results)
        print(f"{settings.run_dir / 'config.yaml'}: serve it with `dustin-run generate --config`")


def _settings(choice: PairChoice, run_dir: Path | None, overwrite: bool, quiet: bool, **groups: object) -> Settings:
    from dustin_profile import progress

    progress.quiet = quiet
    name = choice.name.replace(":", "_").replace("/", "_")
    settings = replace(Settings(run_dir or Path("runs") / name), overwrite=overwrite, **groups)  # type: ignore[arg-type]
    check_settings(settings, choice)
    return settings


class _run:
    """Hold the run directory while a pipeline works in it."""

    def __init__(self, settings: Settings, choice: PairChoice) -> None:
        from dustin_profile.rundir import locked
        from dustin_runtime.cli.support import go_offline

        if settings.models.offline:
            go_offline()
        self.settings, self.choice = settings, choice
        self.lock = locked(settings.run_dir)

    def __enter__(self) -> Pipeline:
        from dustin_profile.pipeline import Pipeline

        pipeline = Pipeline(self.settings, self.choice)
        self.lock.__enter__()
        return pipeline

    def __exit__(self, *error: object) -> None:
        self.lock.__exit__(*error)  # type: ignore[arg-type]


def _price(settings: Settings, choice: PairChoice, as_json: bool, stages: tuple[str, ...]) -> None:
    from dustin_profile.cli.tables import price_table
    from dustin_profile.prices import price

    prices = price(settings, choice, stages)
    if as_json:
        print(json.dumps(prices))
    else:
        price_table(prices)
