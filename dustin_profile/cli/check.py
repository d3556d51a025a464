"""`dustin-profile check`: the gate for CI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dustin_profile.cli.options import Json, Quiet, begin, with_settings
from dustin_profile.settings import ModelSettings
from dustin_runtime.errors import RegressionError


@with_settings(models=ModelSettings)
def check(
    config: Annotated[Path, typer.Argument(help="Emitted YAML, or the run directory that holds it.")],
    models: ModelSettings,
    baseline: Annotated[Path, typer.Option(help="results.json of the search to hold the config against.")],
    data: Annotated[str | None, typer.Option(help="Where the baseline's documents are, if not its own name.")] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="ARR that may be lost on average over documents.")] = 0.005,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Recompute ARR on the baseline's documents; exit 3 if it fell by more than the tolerance."""
    from dustin_profile.check import check as run_check

    verdict = run_check(begin(config, models, quiet), baseline, models, data, tolerance)
    if as_json:
        print(json.dumps(verdict.as_dict()))
    else:
        from dustin_profile.cli.tables import verdict_table

        verdict_table(verdict)
    if not verdict.passed:
        raise RegressionError(
            f"ARR is {verdict.difference:+.4f} against the baseline, more than the tolerance {tolerance} below it"
        )
