"""Puts a report together: sections that have something to show, their pictures, the page and its short version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dustin_profile.progress import progress
from dustin_profile.reporting.blocks import Content, Figure
from dustin_profile.reporting.drawing import Drawn, beside, draw
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sections import SECTIONS
from dustin_profile.reporting.sections.headline import headline_figures
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.titles import pairs
from dustin_profile.reporting.wording import listed, plural
from dustin_runtime.errors import UsageError
from dustin_runtime.files import atomic_path, write_text


@dataclass(frozen=True)
class Report:
    """A report in memory.

    Attributes:
        drawn: pictures by name.
        headline: the picture for a pull request; None if there is nothing to draw.
        omitted: sections that the evidence has nothing for.
    """

    title: str
    evidence: Evidence
    sections: Sequence[tuple[Section, Content]]
    omitted: Sequence[Section]
    drawn: dict[str, Drawn] = field(default_factory=dict)
    headline: Drawn | None = None

    @property
    def subtitle(self) -> str:
        return listed(pairs(self.evidence)) or plural(len(self.evidence.sources), "file")


def compose(evidence: Evidence, title: str | None = None, sections: Sequence[Section] = SECTIONS) -> Report:
    """Build and draw everything."""
    built = [(section, section.build(evidence)) for section in sections]
    shown = [(section, content) for section, content in built if content]
    figures = [figure for _, content in shown for figure in content.figures]
    names = [figure.name for figure in figures]
    assert len(set(names)) == len(names), names  # they are file names, and anchors of the page
    drawn = {}
    with progress("drawing", len(figures) + 1) as advance:
        for figure in figures:
            drawn[figure.name] = draw(figure)
            advance(1)
        headline = _headline(evidence)
        advance(1)
    return Report(
        title or "Sparse verification: what it keeps, what it saves",
        evidence,
        shown,
        [section for section, content in built if section.command and not content],
        drawn,
        headline,
    )


def _headline(evidence: Evidence) -> Drawn | None:
    figures = headline_figures(evidence)
    if not figures:
        return None
    return draw(
        Figure(
            "headline",
            " ".join(figure.caption for figure in figures),
            " ".join(figure.alt for figure in figures),
            beside(*figures),
            width=sum(figure.width for figure in figures),
            height=max(figure.height for figure in figures) + 0.15,
        )
    )


def require_own(page: Path) -> None:
    """Refuse to replace what no report wrote: the page, or its Markdown and picture beside it.

    Raises:
        UsageError: naming the file.
    """
    from dustin_profile.reporting.markdown import MARK
    from dustin_profile.reporting.page import GENERATOR

    own = False
    for path, mark in ((page, f'content="{GENERATOR}'), (page.with_suffix(".md"), MARK)):
        if path.exists():
            with path.open(encoding="utf-8", errors="replace") as file:
                if mark not in file.read(5000):
                    raise UsageError(f"--output {page}: {path} exists and is no report; give another name")
            own = True
    if not own and page.with_suffix(".png").exists():
        raise UsageError(f"--output {page}: {page.with_suffix('.png')} exists and is no report's; give another name")


def write(report: Report, page: Path, *, figures: bool = True) -> list[Path]:
    """Write the page, `.md` and `.png` beside it, and all pictures in a folder beside it.

    Everything is in memory before the first file is written, each is replaced as a whole, and the page comes last.

    Args:
        page: the HTML file.
        figures: whether to write the folder.

    Returns:
        What was written, the page first.

    Raises:
        CapacityError: the disk is full.
        MissingError: a file cannot be written.
    """
    from dustin_profile.reporting.markdown import markdown
    from dustin_profile.reporting.page import html

    picture = page.with_suffix(".png")
    words = page.with_suffix(".md")
    texts: dict[Path, str] = {}
    pictures: dict[Path, bytes] = {}
    if figures:
        folder = page.with_name(f"{page.stem}-figures")
        for name, drawn in report.drawn.items():
            texts[folder / f"{name}.svg"] = drawn.svg
            pictures[folder / f"{name}.png"] = drawn.png
    if report.headline:
        pictures[picture] = report.headline.png
    whole = html(report)
    # It says that a report was being written here, should this be broken off: see `require_own`.
    write_text(words, markdown(report, picture.name if report.headline else None))
    for path, content in pictures.items():
        with atomic_path(path) as temporary:
            temporary.write_bytes(content)
    for path, text in texts.items():
        write_text(path, text)
    write_text(page, whole)
    return [page, words, *texts, *pictures]
