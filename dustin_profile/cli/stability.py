"""`dustin-profile eval stability`: do the heads depend on what they were found with?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dustin_profile.cli.options import Json, Quiet


def stability(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Run directories with heads; others than the first are compared with it."
        ),
    ],
    draws: Annotated[int, typer.Option(min=2, help="Random subsets of needles of every size.")] = 100,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Where results are kept, in a folder. Default: the first RUN.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare rankings of heads across needles, their number, lengths, depths and, by further runs, haystacks."""
    from dustin_profile import progress
    from dustin_profile.evaluation.stability_stage import HEADER, rows, run
    from dustin_profile.rundir import locked
    from dustin_runtime.errors import MissingError

    progress.quiet = quiet
    for path in runs:
        if not path.is_dir():
            what = "is a file" if path.exists() else "no such folder"
            raise MissingError(f"RUN {path}: {what}; give a run directory that dustin-profile srh has filled")
    folder = run_dir or runs[0]
    with locked(folder):
        result = run(folder / "stability", runs, draws)
    if as_json:
        print(json.dumps(result))
    else:
        from dustin_profile.cli.tables import plain_table

        plain_table(f"{result['target']['model']} with {result['draft']['model']}", HEADER, rows(result))
        print("  ".join(str(folder / "stability" / f"results.{kind}") for kind in ("json", "md", "png")))
