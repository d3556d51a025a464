"""The long text that needles are hidden in."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from dustin_profile.texts import TOPICS, column, read_rows, read_text, text_files, topics
from dustin_runtime.files import digest_text


class Haystack(NamedTuple):
    """A text, the name to report it by (never a path) and the SHA-256 of its UTF-8 bytes."""

    name: str
    text: str
    sha256: str


def load_haystack(source: Path | None = None, *, field: str = "text") -> Haystack:
    """Read a haystack; several texts are joined by blank lines.

    Args:
        source: a text file, a folder of .txt files (in name order), a .jsonl file, or None for the reference topics
            that every Python has.
        field: the column of a .jsonl file that holds the text.

    Raises:
        MissingError: the source is absent, empty, binary or not UTF-8, or a row has no such field.
    """
    if source is None:
        name, text = TOPICS, topics()
    elif source.is_dir():
        name, text = source.resolve().name, "\n\n".join(map(read_text, text_files(source)))
    elif source.suffix == ".jsonl":
        rows = [column(row, field, f"{source}:{line}") for line, row in read_rows(source)]
        name, text = source.name, "\n\n".join(rows)
    else:
        name, text = source.name, read_text(source)
    return Haystack(name, text, digest_text(text))
