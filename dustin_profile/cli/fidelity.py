"""`dustin-profile eval fidelity`: KL, agreement, loss and ARR of every policy against full verification."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from dustin_profile.cli.eval import Budgets, Config, RunDir, results_folder
from dustin_profile.cli.options import Json, Overwrite, Quiet, with_settings
from dustin_profile.settings import ModelSettings


@with_settings(models=ModelSettings)
def fidelity(
    config: Config,
    models: ModelSettings,
    data: Annotated[str, typer.Option(help="Documents, as for search.")] = "topics",
    context: Annotated[int, typer.Option(min=3, help="Tokens of every document, prompt and text.")] = 2048,
    documents: Annotated[int, typer.Option(min=1, help="Documents.")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of text behind every prompt.")] = 128,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="Policy; repeat for several. Default: all, and their bounds.")
    ] = None,
    budget: Budgets = None,
    run_dir: RunDir = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Verify given texts with every policy and compare its predictions with full verification's."""
    from dustin_profile import progress
    from dustin_profile.check import open_models
    from dustin_profile.evaluation.fidelity_stage import HEADER, cells, check_room, rows, run, sparse_methods
    from dustin_profile.rundir import locked
    from dustin_profile.settings import DataSettings
    from dustin_profile.traces.stage import calibration
    from dustin_runtime.cli.support import go_offline
    from dustin_runtime.config import load_config
    from dustin_runtime.errors import UsageError
    from dustin_runtime.loading import pick_device, pick_dtype

    progress.quiet = quiet
    if models.offline:
        go_offline()
    served = load_config(config)
    if tokens >= context:
        raise UsageError(f"--tokens {tokens}: leaves no prompt of --context {context}")
    wanted = cells(method or sparse_methods(), budget or [served.selection.budget], served)
    check_room(context, tokens, wanted)
    pair = open_models(served, models)
    settings = DataSettings(data=data, context=context, documents=documents, continuation=tokens)
    prompts = calibration(pair, settings, models.offline)
    device = pick_device(models.device)
    dtype = pick_dtype(models.dtype, device)
    folder = run_dir or results_folder(config, served)
    with locked(folder):
        target = pair.load_target(dtype, device)
        loaded = (target, pair.load_draft(target))
        made_from = {"dtype": str(dtype).removeprefix("torch."), "context": context, "documents": documents}
        result = run(folder / "fidelity", pair, loaded, served, prompts, tokens, wanted, made_from, overwrite)
    if as_json:
        print(json.dumps(result))
    else:
        from dustin_profile.cli.tables import plain_table

        plain_table(f"{pair.target_id} with {pair.draft_id}", HEADER, rows(result))
        print("  ".join(str(folder / "fidelity" / f"results.{kind}") for kind in ("json", "md", "png")))
