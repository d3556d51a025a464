"""`dustin-profile eval`: tasks whose answers are scored, method by method, against full verification."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dustin_profile.choices import Template
from dustin_profile.cli.options import Json, Quiet, begin, with_settings
from dustin_profile.settings import ModelSettings, pair_name
from dustin_runtime.method_names import METHODS

if TYPE_CHECKING:
    from dustin_profile.evaluation.tasks import Task
    from dustin_runtime.config import DustinConfig
    from dustin_runtime.loading import Pair

app = typer.Typer(help="Score what methods generate, beside full verification.", no_args_is_help=True)

Config = Annotated[Path, typer.Argument(help="Emitted YAML, or the run directory that holds it.")]
Methods = Annotated[
    list[str] | None, typer.Option("--method", help=f"Of {', '.join(METHODS)}; repeat. Default: vanilla, dustin.")
]
Budgets = Annotated[
    list[int] | None,
    typer.Option("--budget", min=1, help="k, with m in proportion; repeat for several. Default: the config's."),
]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Items that are generated at once.")]
RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        help="Where results are kept and continued, in a folder per task. Default: CONFIG, or runs/PAIR for a file.",
        rich_help_panel="Run",
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Discard what was made from other inputs.", rich_help_panel="Run"),
]


@app.command("longbench", short_help="LongBench's 16 English tasks.")
@with_settings(models=ModelSettings)
def longbench(
    config: Config,
    models: ModelSettings,
    data: Annotated[
        str, typer.Option(help="Folder of TASK.jsonl or TASK.parquet, one file, or THUDM/LongBench[@revision].")
    ],
    task: Annotated[list[str] | None, typer.Option(help="Task; repeat for several. Default: all of the data.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N rows of every task.")] = None,
    max_length: Annotated[
        int | None,
        typer.Option(help="Most tokens of a prompt; its middle goes. Default: the models' context less the output."),
    ] = None,
    template: Annotated[Template, typer.Option(help="Chat template for the tasks that are meant for one.")] = "auto",
    method: Methods = None,
    budget: Budgets = None,
    batch: Batch = 1,
    run_dir: RunDir = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run LongBench (arXiv 2308.14508) with its own prompts and metrics; scores are shares of 1."""

    def make(pair: Pair) -> Task:
        from dustin_profile.evaluation.longbench.data import load_rows
        from dustin_profile.evaluation.longbench.task import LongBench

        rows = load_rows(data, task or (), limit=limit, offline=models.offline)
        context = min(pair.target_shape.context, pair.draft_shape.context)
        return LongBench(rows, pair.tokenizer, context=context, max_length=max_length, template=template)

    def add_averages(results: dict[str, Any]) -> None:
        from dustin_profile.evaluation.longbench.averages import averages

        results["averages"] = averages(results)

    evaluate(config, models, make, method, budget, batch, run_dir, as_json, quiet, add_averages)


def evaluate(
    config: Path,
    models: ModelSettings,
    make_task: Callable[[Pair], Task],
    methods: list[str] | None,
    budgets: list[int] | None,
    batch: int,
    run_dir: Path | None,
    as_json: bool,
    quiet: bool,
    finish: Callable[[dict[str, Any]], None] = lambda results: None,
    show: Callable[[dict[str, Any]], None] | None = None,
    write: Callable[[Path, dict[str, Any]], None] | None = None,
) -> None:
    """What every task's command does.

    Args:
        make_task: called once the pair's shapes and tokenizer are known, before its weights are read.
        finish: adds to the results what the task alone can say.
        show: prints the table; by default that of scores.
        write: writes the results for people to the run's folder; by default `results.md` with the table of scores.
    """
    from dustin_profile.check import open_models
    from dustin_profile.evaluation import answers
    from dustin_profile.evaluation.runner import Run, make_cells
    from dustin_profile.evaluation.summary import summarise, write_results
    from dustin_profile.rundir import locked
    from dustin_runtime.loading import pick_device, pick_dtype

    served = begin(config, models, quiet)
    cells = make_cells(methods or ["vanilla", "dustin"], budgets or (), served)
    device = pick_device(models.device)
    dtype = pick_dtype(models.dtype, device)
    folder = run_dir or results_folder(config, served)
    pair = open_models(served, models)
    task = make_task(pair)
    with locked(folder):
        run = Run(folder / task.name, task, served, pair, cells, device, dtype, batch)
        run.measure()
        results = summarise(run)
        finish(results)
        write_results(run, results)
        (write or answers.write)(run.folder, results)
    if as_json:
        print(json.dumps(results))
    else:
        from dustin_profile.cli.tables import eval_table

        (show or eval_table)(results)
        print("  ".join(str(run.folder / name) for name in ("results.json", "results.md", "rows.parquet")))


def results_folder(config: Path, served: DustinConfig) -> Path:
    """Where results go if nothing is said: beside the config that a run emitted, else under the pair's name."""
    if config.is_dir():
        return config
    return Path("runs") / pair_name(served.pair.target.id, served.pair.draft.id)
