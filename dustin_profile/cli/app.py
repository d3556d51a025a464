"""`dustin-profile`: the commands and nothing else."""

from __future__ import annotations

from typing import Annotated

import typer

from dustin_profile.cli import (
    arr,
    check,
    drift,
    env,
    eval,
    fidelity,
    latency,
    overhead,
    pairs,
    pg19,
    report,
    retrieval,
    stability,
    stages,
    subsets,
)
from dustin_runtime import __version__
from dustin_runtime.cli.support import EXIT_CODES, run_app
from dustin_runtime.errors import UsageError
from dustin_runtime.parallel.environment import rank, world_size

OVER_RANKS = ("srh", "trace", "search")
"""Commands that several processes can share."""

app = typer.Typer(
    help="Find heads, collect traces, search and guard a configuration for sparse verification.",
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
        names = ", ".join(OVER_RANKS)
        error = UsageError(f"{context.invoked_subcommand}: runs in one process; under torchrun run one of {names}")
        error.quiet = rank() > 0
        raise error


app.command("search", short_help="Everything up to the emitted config.")(stages.search)
app.command("srh", short_help="Find the retrieval heads of both models.")(stages.srh)
app.command("trace", short_help="Collect attention traces of documents.")(stages.trace)
app.command("latency", short_help="Time steps for a search for throughput.")(latency.latency)
app.command("check", short_help="Exit 3 if ARR fell below a baseline.")(check.check)
app.command("drift", short_help="KL against full verification by tokens.")(drift.drift)
eval.app.command("arr", short_help="ARR from traces: by budget, m, layer, distance.")(arr.arr)
app.command("report", short_help="One HTML page from what runs measured.")(report.report)
eval.app.command("fidelity", short_help="KL and ARR of every policy on given texts.")(fidelity.fidelity)
eval.app.command("needle", short_help="One fact in a long text, by length and depth.")(retrieval.needle)
eval.app.command("recall", short_help="Generated facts: several keys, values, chains.")(retrieval.recall)
eval.app.command("overhead", short_help="Cost of choosing tokens against context.")(overhead.overhead)
eval.app.command("pg19", short_help="Long books continued: speed and perplexity.")(pg19.pg19)
eval.app.command("stability", short_help="Rankings of heads across needles, lengths, runs.")(stability.stability)
eval.app.command("subsets", short_help="ARR against KL over sampled parts of the cache.")(subsets.subsets)
app.add_typer(eval.app, name="eval")
app.add_typer(pairs.app, name="pairs")
app.command("env")(env.env)


def main() -> None:
    """Console script."""
    run_app(app, interrupted="interrupted; run the same command again to continue")
