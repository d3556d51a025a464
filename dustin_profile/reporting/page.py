"""The page: one HTML file with its style and pictures inside, which loads nothing and runs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dustin_profile.reporting.blocks import Group

if TYPE_CHECKING:
    from dustin_profile.reporting.report import Report

GENERATOR = "dustin-profile report"
"""What the head of every page says that made it."""
_HERE = Path(__file__).parent


def html(report: Report) -> str:
    """Render a report. Whatever its texts hold is shown as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    import dustin_runtime

    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.tests["group"] = lambda row: isinstance(row, Group)
    text = environment.get_template("page.html.j2").render(
        report=report,
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        # Made by matplotlib, which escapes the texts in it.
        inline={name: Markup(drawn.inline) for name, drawn in report.drawn.items()},
        generator=GENERATOR,
        version=dustin_runtime.__version__,
    )
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"
