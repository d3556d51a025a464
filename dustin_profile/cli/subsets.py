"""`dustin-profile eval subsets`: is ARR a proxy of KL on this model?"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from dustin_profile.cli.eval import Config, Overwrite, RunDir, results_folder
from dustin_profile.cli.given_texts import Context, Data, Documents, Tokens, check_tokens, open_texts
from dustin_profile.cli.options import Json, Quiet, begin, with_settings
from dustin_profile.settings import ModelSettings


@with_settings(models=ModelSettings)
def subsets(
    config: Config,
    models: ModelSettings,
    data: Data = "topics",
    context: Context = 2048,
    documents: Documents = 4,
    tokens: Tokens = 64,
    budget: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of a subset; repeat for several. Default: half, all and twice the config's."),
    ] = None,
    count: Annotated[int, typer.Option("--subsets", min=2, help="Subsets of every size.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    run_dir: RunDir = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Draw subsets of the cache, verify given texts over them, and correlate recovered attention with KL."""
    from dustin_profile.evaluation.fidelity_stage import check_room
    from dustin_profile.evaluation.subsets import HEADER, rows, run
    from dustin_profile.rundir import locked

    served = begin(config, models, quiet)
    check_tokens(context, tokens)
    own, protected = served.selection.budget, served.selection.sink + served.selection.window
    sizes = budget or [k for k in (own // 2, own, 2 * own) if protected < k < context - tokens] or [own]
    check_room(context, tokens, sizes)
    texts = open_texts(served, models, data, context, documents, tokens)
    folder = run_dir or results_folder(config, served)
    with locked(folder):
        result = run(folder / "subsets", texts, sizes, count, seed, overwrite)
    if as_json:
        print(json.dumps(result))
    else:
        from dustin_profile.cli.tables import plain_table

        plain_table(f"{texts.pair.target_id}: ARR and KL of sampled subsets", HEADER, rows(result))
        print("  ".join(str(folder / "subsets" / f"results.{kind}") for kind in ("json", "md", "png")))
