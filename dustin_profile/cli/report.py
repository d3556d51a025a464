"""`dustin-profile report`: one page, its pictures and a Markdown table from what runs measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dustin_profile.cli.options import Json, Quiet


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Run directories of search and eval, folders of results, JSON files of drift, eval or bench.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="FILE.html, or a folder for report.html. Default: the first RUN if it is a folder, else here.",
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    figures: Annotated[
        bool, typer.Option("--figures/--no-figures", help="Also write every figure as SVG and PNG.")
    ] = True,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a self-contained HTML report, a Markdown table and a picture for a pull request, and all figures."""
    from dustin_profile import progress
    from dustin_profile.reporting.report import compose, require_own, write
    from dustin_profile.reporting.sources import gather
    from dustin_runtime.files import require_writable

    progress.quiet = quiet
    evidence = gather(runs)
    page = _page(output, runs[0])
    require_writable(page, "--output")
    require_own(page)
    made = compose(evidence, title)
    written = write(made, page, figures=figures)
    if as_json:
        document = {
            "kind": "dustin-report",
            "page": str(page),
            "written": [str(path) for path in written],
            "sources": [{"file": source.name, "sha256": source.sha256} for source in evidence.sources],
            "sections": [section.key for section, _ in made.sections],
            "omitted": {section.key: section.command for section in made.omitted},
        }
        print(json.dumps(document))
        return
    print(f"{page}: {len(made.sections)} sections from {len(evidence.sources)} files")
    for section in made.omitted:
        print(f"not shown: {section.title}; made by {section.command}")


def _page(output: Path | None, first: Path) -> Path:
    if output is None:
        return (first if first.is_dir() else Path()) / "report.html"
    return output if output.suffix.lower() in (".html", ".htm") else output / "report.html"
