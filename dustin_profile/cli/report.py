"""`dustin-profile report`: one page, its pictures and a Markdown table from what runs measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dustin_profile.cli.options import Json, Quiet
from dustin_runtime.errors import UsageError

GENERATOR = '<meta name="generator" content="dustin'
"""In the head of every report."""


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
    from dustin_profile.reporting.report import compose, write
    from dustin_profile.reporting.sources import gather
    from dustin_runtime.files import require_writable

    progress.quiet = quiet
    evidence = gather(runs)
    page = _page(output, runs[0])
    require_writable(page, "--output")
    _keep_others(page)
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


def _keep_others(page: Path) -> None:
    """Refuse to replace files that no report wrote: beside a page there are its Markdown and its picture."""
    from dustin_profile.reporting.markdown import MARK

    own = False
    for path, mark in ((page, GENERATOR), (page.with_suffix(".md"), MARK)):
        if path.exists():
            with path.open(encoding="utf-8", errors="replace") as file:
                if mark not in file.read(5000):
                    raise UsageError(f"--output {page}: {path} exists and is no report; give another name")
            own = True
    if not own and page.with_suffix(".png").exists():
        raise UsageError(f"--output {page}: {page.with_suffix('.png')} exists and is no report's; give another name")
