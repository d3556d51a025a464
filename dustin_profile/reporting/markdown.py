"""The short version for a pull request: the tables that decide, in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dustin_profile.reporting.blocks import Bullets, Cell, Group, Heading, Table

if TYPE_CHECKING:
    from dustin_profile.reporting.report import Report

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~])")
_SAFE = re.compile(r"(?<=\w)_(?=\w)")
"""Within a word, where Markdown leaves it alone."""


MARK = "<!-- dustin-profile report -->"
"""First line of every report's Markdown."""


def markdown(report: Report, picture: str | None) -> str:
    """The report's main tables.

    Args:
        picture: file of the headline's picture, beside the Markdown.
    """
    lines = [MARK, f"# {escape(report.title)}", "", f"{escape(report.subtitle)}.", ""]
    if picture:
        lines += [f"![What is kept and what is saved]({picture})", ""]
    for number, (section, content) in enumerate(report.sections):
        said = number == 0 or section.key == "limits"
        if not said and not any(isinstance(block, Table) and block.markdown for block in content.blocks):
            continue
        lines += [f"## {escape(section.title)}", ""]
        heading = ""
        for block in content.blocks:
            if isinstance(block, Heading):
                heading = f"{block.text}: "
            elif isinstance(block, Bullets) and said:
                lines += [*(f"* {_item(lead, item)}" for lead, item in block.pairs), ""]
            elif isinstance(block, Table) and block.markdown:
                shown = block if block.compact is None else block.only(block.compact)
                lines += [*_table(shown, heading), ""]
    if report.omitted:
        lines += [omitted_line(report), ""]
    return "\n".join(lines).rstrip() + "\n"


def omitted_line(report: Report) -> str:
    parts = [f"{escape(section.title)} (`{section.command}`)" for section in report.omitted]
    return f"Not measured, so not shown: {'; '.join(parts)}."


def escape(text: str) -> str:
    """Text that Markdown shows as it is."""
    kept = _SAFE.sub("\0", " ".join(text.split()))
    return _SPECIAL.sub(r"\\\1", kept).replace("\0", "_")


def _item(lead: str, item: str) -> str:
    return f"**{escape(lead)}** {escape(item)}" if lead else escape(item)


def _table(table: Table, heading: str) -> list[str]:
    rule = ["---" if column in table.text_columns else "---:" for column in range(len(table.header))]
    lines = [f"**{escape(heading + table.caption)}**", "", _line([escape(name) for name in table.header]), _line(rule)]
    for row in table.rows:
        if isinstance(row, Group):
            lines.append(_line([f"*{escape(row.title)}*", *[""] * (len(table.header) - 1)]))
        else:
            lines.append(_line(_cells(row.cells, row.strong)))
    if table.note:
        lines += ["", escape(table.note)]
    return lines


def _cells(cells: Sequence[Cell], strong: bool) -> list[str]:
    """Bold are the name of the project's own method and what stands out on the page."""
    texts = [escape(f"{cell.text} {cell.sub}".strip()) for cell in cells]
    bold = [cell.tone == "strong" or (strong and place == 0) for place, cell in enumerate(cells)]
    return [f"**{text}**" if heavy and text else text for text, heavy in zip(texts, bold, strict=True)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
