"""`dustin-profile eval fidelity`: KL, agreement, loss and ARR of every policy against full verification."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from dustin_profile.cli.eval import Budgets, Config, RunDir, results_folder
from dustin_profile.cli.options import Json, Quiet, begin, with_settings
from dustin_profile.settings import ModelSettings
from dustin_runtime.method_names import SPARSE

if TYPE_CHECKING:
    from dustin_runtime.models.decoder import Decoder


@with_settings(models=ModelSettings)
def fidelity(
    config: Config,
    models: ModelSettings,
    data: Annotated[str, typer.Option(help="JSONL, parquet, text file or folder, hub data set, or topics.")] = "topics",
    context: Annotated[
        int,
        typer.Option(
            min=3, help="Tokens of every plain text, prompt and --tokens; of the prompt alone where it has an answer."
        ),
    ] = 2048,
    documents: Annotated[int, typer.Option(min=1, help="Documents.")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of text behind every prompt, at most.")] = 128,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help=f"Of oracle, oracle-by-head, {', '.join(SPARSE)}; repeat. Default: all that CONFIG serves.",
        ),
    ] = None,
    budget: Budgets = None,
    run_dir: RunDir = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Discard what was made from other inputs.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Verify given texts with every policy and compare its predictions with full verification's."""
    from dustin_profile import progress
    from dustin_profile.check import open_models
    from dustin_profile.evaluation.fidelity_stage import HEADER, cells, check_room, rows, run
    from dustin_profile.provenance import device_kind
    from dustin_profile.rundir import locked
    from dustin_profile.settings import DataSettings
    from dustin_profile.traces.stage import calibration
    from dustin_runtime.errors import UsageError
    from dustin_runtime.loading import pick_device, pick_dtype

    served = begin(config, models, quiet)
    if tokens >= context:
        raise UsageError(f"--tokens {tokens}: leaves no prompt of --context {context}")
    wanted = cells(method or None, budget or [served.selection.budget], served)
    check_room(context, tokens, wanted)
    pair = open_models(served, models)
    settings = DataSettings(data=data, context=context, documents=documents, continuation=0)
    prompts = calibration(pair, settings, models.offline)
    device = pick_device(models.device)
    dtype = pick_dtype(models.dtype, device)
    if served.draft_budget is not None:
        progress.say("fidelity: the draft reads its whole cache here, not the config's first and last tokens")

    def load() -> tuple[Decoder, Decoder]:
        progress.say(f"loading {pair.target_id} and {pair.draft_id}")
        target = pair.load_target(dtype, device)
        return target, pair.load_draft(target)

    folder = run_dir or results_folder(config, served)
    with locked(folder):
        made_from = {
            "device": device_kind(device),
            "dtype": str(dtype).removeprefix("torch."),
            "context": context,
            "documents": documents,
        }
        result = run(folder / "fidelity", pair, load, served, prompts, tokens, wanted, made_from, overwrite)
    if as_json:
        print(json.dumps(result))
    else:
        from dustin_profile.cli.tables import plain_table

        plain_table(f"{pair.target_id} with {pair.draft_id}", HEADER, rows(result))
        print("  ".join(str(folder / "fidelity" / f"results.{kind}") for kind in ("json", "md", "png")))
