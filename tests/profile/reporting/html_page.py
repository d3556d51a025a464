"""A page as its reader's browser takes it: tags in balance, tables as cells, references."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "br", "hr", "img", "link", "input", "base", "source"}


@dataclass
class Table:
    caption: str
    rows: list[list[str]] = field(default_factory=list)
    """Texts of the cells, an interval behind its mean; a line over several columns is a row of one cell."""

    def row(self, name: str, nth: int = 0) -> list[str]:
        return [row for row in self.rows if row[0] == name][nth]


class Page(HTMLParser):
    """Parse a page; an unbalanced tag fails at once."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[Table] = []
        self.text = ""
        self.headings: list[str] = []
        self._open: list[str] = []
        self._caption = ""
        self._svg = 0
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag in _VOID:
            return
        self._open.append(tag)
        if tag == "table":
            self.tables.append(Table(found["aria-label"] or ""))
        elif tag == "tr":
            self.tables[-1].rows.append([])
        elif tag in ("th", "td"):
            self.tables[-1].rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, (tag, self._open[-3:], self.getpos())
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text += data
        if "table" in self._open and any(tag in self._open for tag in ("th", "td")):
            row = self.tables[-1].rows[-1]
            row[-1] += (" " if "small" in self._open else "") + data
        if self._open and self._open[-1] in ("h2", "h3"):
            self.headings.append(data)

    def attributes(self, *names: str) -> list[str]:
        return [value for _, found in self.tags for name, value in found.items() if name in names and value]

    def table(self, caption: str, nth: int = 0) -> Table:
        return [table for table in self.tables if table.caption == caption][nth]
