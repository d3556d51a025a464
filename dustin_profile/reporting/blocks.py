"""What a section consists of. Texts are plain: the page escapes them, whatever they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

Tone = Literal["", "strong", "muted", "good", "bad"]


@dataclass(frozen=True)
class Cell:
    """A table's cell: what is read first, and what stands small below it, such as an interval."""

    text: str
    sub: str = ""
    tone: Tone = ""


@dataclass(frozen=True)
class Row:
    cells: Sequence[Cell]
    strong: bool = False
    """The project's own method."""


@dataclass(frozen=True)
class Group:
    """A line that names the rows below it."""

    title: str


@dataclass(frozen=True)
class Table:
    """Rows under a header; the first column names the row and stays in sight when the others are scrolled.

    Attributes:
        text_columns: columns that hold words; others hold figures, which stand to the right.
        markdown: whether it belongs in the short version for a pull request.
        compact: the columns that the short version has; all where None.
        repeated: whether each group after the first says the header again: a long table's is out of sight by then.
    """

    block: ClassVar[str] = "table"
    caption: str
    header: Sequence[str]
    rows: Sequence[Row | Group]
    note: str = ""
    text_columns: frozenset[int] = frozenset({0})
    markdown: bool = False
    compact: Sequence[int] | None = None
    repeated: bool = False

    def only(self, kept: Sequence[int]) -> Table:
        """The same with some of its columns."""
        return replace(
            self,
            header=[self.header[place] for place in kept],
            rows=[
                replace(row, cells=[row.cells[place] for place in kept]) if isinstance(row, Row) else row
                for row in self.rows
            ],
            text_columns=frozenset(new for new, place in enumerate(kept) if place in self.text_columns),
            compact=None if self.compact is None else [kept.index(place) for place in self.compact if place in kept],
        )

    def without_empty(self) -> Table:
        """The same without columns that no row has anything in."""
        rows = [row for row in self.rows if isinstance(row, Row)]
        kept = [place for place in range(len(self.header)) if any(row.cells[place].text for row in rows)]
        return self.only(kept)


@dataclass(frozen=True)
class Figure:
    """A picture.

    Attributes:
        name: of its files, unique in a report.
        draw: fills a matplotlib figure or a part of one.
        alt: what it shows, in words.
        synthetic: what of its data is not real; stamped on the picture.
        title: stands on the picture where it goes without its caption.
        width: inches; pictures of one width stand beside each other.
    """

    block: ClassVar[str] = "figure"
    name: str
    caption: str
    alt: str
    draw: Callable[[Any], None]
    synthetic: Sequence[str] = ()
    title: str = ""
    width: float = 4.5
    height: float = 3.1


@dataclass(frozen=True)
class Figures:
    """Pictures beside each other where there is room."""

    block: ClassVar[str] = "figures"
    figures: Sequence[Figure]


@dataclass(frozen=True)
class Prose:
    block: ClassVar[str] = "prose"
    text: str


@dataclass(frozen=True)
class Bullets:
    block: ClassVar[str] = "bullets"
    items: Sequence[str]
    leads: Sequence[str] = ()
    """What each item is about, read first; none, or one per item."""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Lead and text of every item."""
        return list(zip(self.leads or [""] * len(self.items), self.items, strict=True))


@dataclass(frozen=True)
class Heading:
    block: ClassVar[str] = "heading"
    text: str


@dataclass(frozen=True)
class Code:
    """Text to copy, folded away under its title if it has one."""

    block: ClassVar[str] = "code"
    text: str
    title: str = ""


@dataclass(frozen=True)
class Card:
    """One number that decides."""

    label: str
    value: str
    detail: str
    where: str = ""
    """What it was measured on."""
    tag: str = ""
    """What qualifies it, such as that it is synthetic."""


@dataclass(frozen=True)
class Cards:
    block: ClassVar[str] = "cards"
    cards: Sequence[Card]


Block = Table | Figures | Prose | Bullets | Heading | Code | Cards


@dataclass(frozen=True)
class Content:
    """A section that has something to show."""

    lead: str
    blocks: Sequence[Block] = field(default_factory=tuple)

    @property
    def figures(self) -> list[Figure]:
        return [figure for block in self.blocks if isinstance(block, Figures) for figure in block.figures]
