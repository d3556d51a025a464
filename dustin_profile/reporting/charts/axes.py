"""What all charts have in common."""

from __future__ import annotations

from typing import Any

RULE = "#d4d7dd"
SMALL = 8.0
"""Points of the smallest text: a phone shows a figure at three quarters of its size."""


def short(text: str, most: int = 26) -> str:
    """A label that leaves room for what it labels: every line of it cut in its middle."""
    lines = text.splitlines()
    return "\n".join(line if len(line) <= most else f"{line[: most // 2]}…{line[-(most // 2) + 1 :]}" for line in lines)


def frame(figure: Any) -> Any:
    """Axes with no more lines around them than needed."""
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#9aa1ac")
    return axes


def whole_numbers(axis: Any) -> None:
    """Ticks at integers alone: there is no layer 2.5."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True))
