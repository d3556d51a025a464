"""Reading text that users point to: whole files, folders, JSON lines, and the text that every Python has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dustin_runtime.errors import MissingError

TOPICS = "topics"
"""Name of the text that needs no file: Python's own language reference, `pydoc_data.topics`."""


def topics() -> str:
    """Python's reference topics in key order, joined by blank lines: about 100,000 tokens of English and code.

    The text differs between Python versions: record its hash with whatever was measured on it.
    """
    from pydoc_data.topics import topics as entries

    return "\n\n".join(entries[key] for key in sorted(entries))


def read_text(path: Path) -> str:
    """A UTF-8 text file.

    Raises:
        MissingError: the file is absent, unreadable, empty or not text.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise MissingError(f"{path}: cannot be read ({error.strerror})") from None
    text = _decode(content, str(path))
    if not text.strip():
        raise MissingError(f"{path}: is empty; give a file with text in it")
    return text


def text_files(folder: Path) -> list[Path]:
    """The .txt files directly in `folder`, sorted by name.

    Raises:
        MissingError: it has none.
    """
    files = sorted(path for path in folder.glob("*.txt") if path.is_file())
    if not files:
        raise MissingError(f"{folder}: has no .txt files; give a folder with some, or one file")
    return files


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON lines file with their line numbers (from 1). Blank lines are passed over.

    Raises:
        MissingError: the file is absent or empty, or a line is not UTF-8, not JSON or not an object.
    """
    number = 0
    empty = True
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                text = _decode(line, f"{path}:{number}")
                if text.strip():
                    empty = False
                    yield number, _object(text, f"{path}:{number}")
    except OSError as error:
        raise MissingError(f"{path}: cannot be read ({error.strerror})") from None
    if empty:
        raise MissingError(f"{path}: is empty; give a file with one JSON object a line")


def column(row: dict[str, Any], name: str, place: str) -> str:
    """The text in column `name` of a row found at `place` (file and line).

    Raises:
        MissingError: there is no such column, or it holds something else than text.
    """
    if name not in row:
        raise MissingError(f"{place}: no column {name} (there are: {', '.join(row)}); rename the one to read to it")
    if not isinstance(value := row[name], str):
        raise MissingError(f"{place}: column {name} holds {type(value).__name__}, text expected")
    return value


def _decode(content: bytes, place: str) -> str:
    if b"\0" in content:
        raise MissingError(f"{place}: is binary (NUL bytes); give UTF-8 text")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MissingError(f"{place}: is not UTF-8 text (byte {error.start}); convert it to UTF-8") from None


def _object(text: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise MissingError(f"{place}: is not JSON ({error}); write one JSON object a line") from None
    if not isinstance(row, dict):
        raise MissingError(f"{place}: is {type(row).__name__}, a JSON object expected")
    return row
