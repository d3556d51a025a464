"""`dustin-profile eval pg19`: long books continued, with speed and perplexity of every method."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dustin_profile.cli.eval import Batch, Budgets, Config, Methods, RunDir, evaluate, results_folder
from dustin_profile.cli.given_texts import Context, Data, Documents, Tokens, check_tokens, open_texts
from dustin_profile.cli.options import Json, Quiet, begin, with_settings
from dustin_profile.settings import ModelSettings


@with_settings(models=ModelSettings)
def pg19(
    config: Config,
    models: ModelSettings,
    data: Data,
    context: Context = 4096,
    documents: Documents = 4,
    tokens: Tokens = 128,
    method: Methods = None,
    budget: Budgets = None,
    batch: Batch = 1,
    run_dir: RunDir = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Discard perplexities of other inputs, such as other methods; generated texts are never discarded.",
            rich_help_panel="Run",
        ),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue long books with every method: tokens/s and τ of its text, perplexity of the book's own."""
    from dustin_profile.evaluation import fidelity_stage
    from dustin_profile.evaluation.pg19 import HEADER, BookContinuation, add_perplexity, rows, write
    from dustin_profile.evaluation.runner import make_cells
    from dustin_profile.rundir import locked

    served = begin(config, models, quiet)
    check_tokens(context, tokens)
    cells = make_cells(method or ["vanilla", "dustin"], budget or (), served)
    sparse = [fidelity_stage.cells([cell.method], [cell.budget], served)[0] for cell in cells if cell.budget]
    fidelity_stage.check_room(context, tokens, [cell.budget for cell in sparse if cell.budget])
    texts = open_texts(served, models, data, context, documents, tokens)
    folder = (run_dir or results_folder(config, served)) / "pg19"
    with locked(folder.parent):
        fidelity_stage.reserve(folder / "perplexity", texts, sparse, overwrite)

    def finish(results: dict[str, Any]) -> None:
        fidelity = fidelity_stage.run(folder / "perplexity", texts, sparse, overwrite)
        results["entries"] = [e for e in results["entries"] if (e["method"], e["budget"]) in cells]
        add_perplexity(results, fidelity, folder / "rows")

    def show(results: dict[str, Any]) -> None:
        from dustin_profile.cli.tables import plain_table

        plain_table(f"books continued: {texts.pair.target_id} with {texts.pair.draft_id}", HEADER, rows(results))

    evaluate(
        config,
        models,
        lambda pair: BookContinuation(texts),
        method,
        budget,
        batch,
        run_dir,
        as_json,
        quiet,
        finish,
        show,
        write,
    )
