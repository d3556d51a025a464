"""Pictures as files and as parts of the page: SVG whose text stays text, and PNG for where SVG is not shown."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import Any

from dustin_profile.progress import say
from dustin_profile.reporting.blocks import Figure

STYLE = {
    "font.family": ["DejaVu Sans"],  # wider than what browsers put in its place, so nothing runs over
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.labelcolor": "#374151",
    "axes.unicode_minus": True,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.color": "#6b7280",
    "ytick.color": "#6b7280",
    "xtick.labelcolor": "#1f2937",
    "ytick.labelcolor": "#1f2937",
    "text.color": "#1f2937",
    "svg.fonttype": "none",
    "text.parse_math": False,  # names of models and methods are no formulas
    "path.simplify": True,
}
_LINE = 72
"""Characters of a stamp that fit on the narrowest picture."""
_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True)
class Drawn:
    """A picture in both forms; `inline` is the SVG as the page holds it."""

    figure: Figure
    svg: str
    inline: str
    png: bytes


def draw(figure: Figure) -> Drawn:
    """Draw a figure; the same data give the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(STYLE | {"svg.hashsalt": figure.name}), _crowding(figure), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # SVG takes it from the reader's fonts
        canvas = Canvas(figsize=(figure.width, figure.height), layout="constrained")
        paint(figure, canvas)
        text, image = io.StringIO(), io.BytesIO()
        canvas.savefig(text, format="svg", metadata=_METADATA)
        canvas.savefig(image, format="png", dpi=200, metadata={"Software": None})
    svg = text.getvalue()
    return Drawn(figure, svg, _inline(svg, figure), image.getvalue())


@contextmanager
def _crowding(figure: Figure) -> Iterator[None]:
    """Say once, and in our words, that labels leave the axes no room."""
    with warnings.catch_warnings(record=True) as found:
        yield
    crowded = [one for one in found if "constrained_layout not applied" in str(one.message)]
    for other in (one for one in found if one not in crowded):
        warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    if crowded:
        say(f"{figure.name}: its labels leave no room for what is drawn; look at the table instead")


def paint(figure: Figure, part: Any, title: str = "") -> None:
    """Draw into a matplotlib figure or a part of one, and say on it what is not real: pictures travel alone."""
    figure.draw(part)
    words = [title] if title else []
    if figure.synthetic:
        said = wrap(f"SYNTHETIC: {', '.join(figure.synthetic)}", _LINE, break_long_words=True)
        words += said[:3]
    if words:
        colour = "#9a3412" if figure.synthetic else "#1f2937"
        part.suptitle("\n".join(words), x=0.01, ha="left", fontsize=7.5, color=colour, fontweight="bold")


def beside(*figures: Figure) -> Callable[[Any], None]:
    """Several charts in one picture, each under its title."""

    def draw(whole: Any) -> None:
        widths = [figure.width for figure in figures]
        parts = whole.subfigures(1, len(figures), wspace=0.05, width_ratios=widths, squeeze=False)[0]
        for part, figure in zip(parts, figures, strict=True):
            paint(figure, part, figure.title)

    return draw


def _inline(svg: str, figure: Figure) -> str:
    """The SVG element alone: ids of its own, no reference to anything outside, as wide as its place up to its size."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL).replace("xlink:href=", "href=")
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', body))

    def own(match: re.Match[str]) -> str:
        return f' id="{figure.name}-{match[1]}"' if match[1] in used else ""

    body = re.sub(r' id="([^"]*)"', own, body)
    body = re.sub(r'(url\(#|href="#)', rf"\g<1>{figure.name}-", body)
    body = re.sub(r"\n\s*", "\n", body)
    width, height = (round(96 * inches) for inches in (figure.width, figure.height))
    head = (
        f'<svg viewBox="0 0 {72 * figure.width:g} {72 * figure.height:g}" width="{width}" height="{height}"'
        f' role="img" aria-label="{escape(figure.alt)}">'
    )
    return head + body[body.index(">") + 1 :]
