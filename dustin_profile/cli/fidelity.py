"""`dustin-profile eval fidelity`: KL, agreement, loss and ARR of every policy against full verification."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Annotated

import typer

from dustin_profile.cli.eval import Budgets, Config, Overwrite, RunDir, results_folder
from dustin_profile.cli.given_texts import Context, Data, Documents, Tokens, check_tokens, open_texts
from dustin_profile.cli.options import Json, Quiet, begin, with_settings
from dustin_profile.settings import ModelSettings
from dustin_runtime.errors import UsageError
from dustin_runtime.method_names import SPARSE


@with_settings(models=ModelSettings)
def fidelity(
    config: Config,
    models: ModelSettings,
    data: Data = "topics",
    context: Context = 2048,
    documents: Documents = 4,
    tokens: Tokens = 128,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help=f"Of oracle, oracle-by-head, {', '.join(SPARSE)}; repeat. Default: all that CONFIG serves.",
        ),
    ] = None,
    budget: Budgets = None,
    guard: Annotated[
        list[float] | None,
        typer.Option(help="Measure Dustin's methods with this threshold too, as dustin-run generate has it; repeat."),
    ] = None,
    full_every: Annotated[
        list[int] | None, typer.Option(min=1, help="The same with every Nth step in full; repeat.")
    ] = None,
    target_arr: Annotated[
        list[float] | None, typer.Option(help="The same with several budgets and this target; repeat.")
    ] = None,
    kv_dtype: Annotated[
        str,
        typer.Option(help="Of the target's cache that policies read, and full verification once more: auto or fp8."),
    ] = "auto",
    temperature: Annotated[
        float, typer.Option(help="At which the total variation of the two distributions is measured; above 0.")
    ] = 1.0,
    run_dir: RunDir = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Verify given texts with every policy and compare its predictions with full verification's."""
    from dustin_profile import progress
    from dustin_profile.evaluation.fidelity_stage import HEADER, cells, check_room, full_served, rows, run
    from dustin_profile.rundir import locked
    from dustin_runtime.loading import pick_device
    from dustin_runtime.policies import Asked
    from dustin_runtime.scaled import dtype_name, pick_kv_dtype

    served = begin(config, models, quiet, adapts=bool(target_arr))
    check_tokens(context, tokens)
    if not 0 < temperature < math.inf:
        raise UsageError(f"--temperature {temperature}: give more than 0; at 0 it is the share of other choices")
    cached = pick_kv_dtype(kv_dtype, pick_device(models.device))
    rules = [
        *(Asked(threshold=value) for value in guard or ()),
        *(Asked(every=value) for value in full_every or ()),
        *(Asked(target_arr=value) for value in target_arr or ()),
    ]
    budgets = budget or [served.selection.budget]
    wanted = cells(method or None, budgets, served, rules)
    check_room(context, tokens, budgets)
    texts = open_texts(served, models, data, context, documents, tokens)
    if temperature != 1:
        texts = replace(texts, temperature=temperature, inputs=texts.inputs | {"temperature": temperature})
    if cached:
        wanted = [full_served(), *wanted]
        texts = replace(texts, kv_dtype=cached, inputs=texts.inputs | {"kv_dtype": dtype_name(cached, cached)})
    if served.draft_budget is not None:
        progress.say("fidelity: the draft reads its whole cache here, not the config's first and last tokens")
    folder = run_dir or results_folder(config, served)
    with locked(folder):
        result = run(folder / "fidelity", texts, wanted, overwrite)
    if as_json:
        print(json.dumps(result))
    else:
        from dustin_profile.cli.tables import plain_table

        plain_table(f"{texts.pair.target_id} with {texts.pair.draft_id}", HEADER, rows(result))
        print("  ".join(str(folder / "fidelity" / f"results.{kind}") for kind in ("json", "md", "png")))
