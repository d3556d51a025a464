"""`dustin-profile drift`: KL against full verification as generation goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dustin_profile.cli.eval import Budgets, Config, Overwrite, RunDir, results_folder
from dustin_profile.cli.given_texts import Data, open_texts
from dustin_profile.cli.options import Json, Quiet, begin, with_settings
from dustin_profile.settings import ModelSettings
from dustin_runtime.method_names import METHODS


@with_settings(models=ModelSettings)
def drift(
    config: Config,
    models: ModelSettings,
    data: Data = "topics",
    context: Annotated[int, typer.Option(min=2, help="Tokens of every prompt.")] = 2048,
    documents: Annotated[int, typer.Option(min=1, help="Prompts.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 256,
    bucket: Annotated[int, typer.Option(min=1, help="Tokens per point of a curve.")] = 32,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", help=f"Of {', '.join(METHODS)}; repeat for several. Default: dustin."),
    ] = None,
    budget: Budgets = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Prompt number n draws with seed + n.")] = 0,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Texts that are generated at once.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Write the curves to this PNG as well.")] = None,
    run_dir: RunDir = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure how far generation drifts from full verification: KL and agreement by tokens generated."""
    from dustin_profile.evaluation.drift_stage import Generating, run
    from dustin_profile.evaluation.drift_tables import HEADER, draw, rows
    from dustin_profile.evaluation.runner import make_cells
    from dustin_profile.rundir import locked

    served = begin(config, models, quiet)
    how = Generating(bucket, temperature, seed, batch)
    how.check()
    cells = make_cells(method or ["dustin"], budget or (), served)
    texts = open_texts(served, models, data, context, documents, tokens, generated=True)
    folder = run_dir or results_folder(config, served)
    with locked(folder):
        result = run(folder / "drift", texts, cells, how, overwrite)
    if plot:
        draw(plot, result)
    if as_json:
        print(json.dumps(result))
    else:
        from dustin_profile.cli.tables import plain_table

        plain_table(f"{texts.pair.target_id} with {texts.pair.draft_id}", HEADER, rows(result))
        print("  ".join(str(folder / "drift" / f"results.{kind}") for kind in ("json", "md", "png")))
