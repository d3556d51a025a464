"""`srh`, `trace` and `search`: the stages of a run, each including those before it; in one process or several."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dustin_profile.cli.options import Depth, DryRun, Json, Overwrite, Quiet, RunDir, with_settings
from dustin_profile.settings import (
    DataSettings,
    HeadSettings,
    ModelSettings,
    ObjectiveSettings,
    PairChoice,
    SearchSettings,
    Settings,
    StepSettings,
    by_flag,
    check_settings,
    choose_pair,
    require_teams,
)
from dustin_runtime.parallel.environment import rank, world_size

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
    run = Run(None, None, run_dir, overwrite, quiet, models=models, heads=heads)
    if dry_run:
        run.price(as_json, ("srh",))
        return
    from dustin_runtime.files import read_json

    with run.started() as pipeline:
        paths = pipeline.heads()
        if pipeline.ranks.rank:
            return
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
    run = Run(depth, None, run_dir, overwrite, quiet, models=models, heads=heads, data=data)
    if dry_run:
        run.price(as_json, ("srh", "trace"))
        return
    with run.started() as pipeline:
        store, _ = pipeline.traces()
        if pipeline.ranks.rank:
            return
    entries = store.entries
    summary = {
        "folder": str(store.folder),
        "documents": len(entries),
        "windows": sum(entry["windows"] for entry in entries),
        "bytes": sum(entry["bytes"] for entry in entries),
    }
    if stopping := store.stopping:
        summary["stopping"] = stopping
    if as_json:
        print(json.dumps(summary))
    else:
        print("{folder}: {documents} documents, {windows} windows, {bytes} bytes".format(**summary))


@with_settings(
    models=ModelSettings,
    heads=HeadSettings,
    data=DataSettings,
    search=SearchSettings,
    objective=ObjectiveSettings,
    steps=StepSettings,
)
def search(
    models: ModelSettings,
    heads: HeadSettings,
    data: DataSettings,
    search: SearchSettings,
    objective: ObjectiveSettings,
    steps: StepSettings,
    given: frozenset[str],
    depth: Depth = None,
    run_dir: RunDir = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search layers and budget split, and emit the config: runs the stages before it as needed."""
    groups = {"models": models, "heads": heads, "data": data}
    groups |= {"search": search, "objective": objective, "steps": steps}
    run = Run(depth, search.budget, run_dir, overwrite, quiet, given, **groups)
    if dry_run:
        timed = ("latency",) if objective.objective == "throughput" else ()
        run.price(as_json, ("srh", "trace", *timed, "search"))
        return
    with run.started() as pipeline:
        found = pipeline.search()
    if found is None:
        return
    if as_json:
        print(json.dumps(found.results))
    else:
        from dustin_profile.cli.tables import results_table

        results_table(found.results)
        print(f"{pipeline.run_dir / 'config.yaml'}: serve it with `dustin-run generate --config`")


class Run:
    """What a command was asked for. Under torchrun every rank has it, and ranks refuse it together.

    Args:
        given: as of `check_settings`.
        groups: the settings, by their name in `Settings`.
    """

    def __init__(
        self,
        depth: int | None,
        budget: int | None,
        run_dir: Path | None,
        overwrite: bool,
        quiet: bool,
        given: Collection[str] = (),
        **groups: Any,
    ) -> None:
        self.depth, self.budget, self.run_dir, self.overwrite = depth, budget, run_dir, overwrite
        self.quiet, self.given = quiet, given
        self.groups = groups

    def checked(self) -> tuple[Settings, PairChoice]:
        """Settings and pair, as far as they can be checked without a model. Raises UsageError."""
        choice = choose_pair(self.groups["models"], self.depth, self.budget)
        name = choice.name.replace(":", "_").replace("/", "_")
        run_dir = self.run_dir or Path("runs") / name
        settings = Settings(run_dir, depth=self.depth, overwrite=self.overwrite, **self.groups)
        check_settings(settings, choice, self.given)
        return settings, choice

    @contextmanager
    def started(self) -> Iterator[Pipeline]:
        """A pipeline that holds the run directory, over the ranks of the run.

        Raises:
            ConflictError: the directory is in use, or a rank was given something else.
            PeerError: another rank has ended.
            UsageError: as `checked`, or the ranks cannot have a device each.
        """
        from dustin_profile import progress

        alone = world_size() == 1
        progress.quiet = self.quiet or not (alone or rank() == 0)
        if self.groups["models"].offline:
            from dustin_runtime.cli.support import go_offline

            go_offline()
        if alone:
            self._startable()  # before torch is imported
        from dustin_profile.pipeline import Pipeline
        from dustin_profile.rundir import held
        from dustin_runtime.parallel.ranks import joined

        with joined() as ranks:
            with ranks.alike():
                settings, choice = self._startable()
                pipeline = Pipeline(settings, choice, ranks.in_teams(settings.heads.tensor_parallel))
            ranks.agree(_facts(settings, pipeline.device))
            with held(settings.run_dir, ranks):
                yield pipeline

    def _startable(self) -> tuple[Settings, PairChoice]:
        """As `checked`, with the processes that there are."""
        settings, choice = self.checked()
        require_teams(settings.heads.tensor_parallel, world_size())
        return settings, choice

    def price(self, as_json: bool, stages: tuple[str, ...]) -> None:
        """Print what stages would cost, on one device."""
        from dustin_profile.cli.tables import price_table
        from dustin_profile.prices import price

        prices = price(*self.checked(), stages)
        if world_size() > 1 and rank():
            return
        if as_json:
            print(json.dumps(prices))
        else:
            price_table(prices)


def _facts(settings: Settings, device: str) -> dict[str, object]:
    """What has to be the same on all ranks for their results to be; by the name of an error. Inputs follow by stage."""
    import torch

    from dustin_profile.provenance import device_name

    return by_flag(settings) | {"torch": torch.__version__, "device": device_name(device)}
