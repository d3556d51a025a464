"""`dustin-run`: the commands and nothing else."""

from __future__ import annotations

from typing import Annotated

import typer

from dustin_runtime import __version__
from dustin_runtime.cli.bench import app as bench_app
from dustin_runtime.cli.bench_grid import grid
from dustin_runtime.cli.generate import generate
from dustin_runtime.cli.support import EXIT_CODES, OVER_RANKS, one_process, run_app
from dustin_runtime.parallel.environment import world_size

app = typer.Typer(
    help="Serve an emitted configuration: speculative decoding with sparse verification.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: the rich one imports for 0.2 s
)


def _version(shown: bool) -> None:
    if shown:
        print(__version__)
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Shared options."""
    if context.invoked_subcommand not in OVER_RANKS and world_size() > 1:
        raise one_process(str(context.invoked_subcommand))


app.command("generate")(generate)
bench_app.callback(invoke_without_command=True)(grid)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Console script."""
    run_app(app)
