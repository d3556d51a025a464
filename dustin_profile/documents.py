"""Calibration documents: plain long texts, or long contexts with a query and perhaps an answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from dustin_profile.texts import TOPICS, column, read_rows, read_text, text_files, topics
from dustin_runtime.errors import MissingError
from dustin_runtime.files import digest_text

HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<split>[\w.-]+))?(@(?P<revision>[\w./-]+))?")


class Document(NamedTuple):
    """One text to calibrate on. Rows of a data set carry a query, and an answer where there is one."""

    id: str
    source: str
    """The file or data set that it comes from, never a path."""
    text: str
    """The whole text, or the context of the query."""
    query: str | None
    answer: str | None
    sha256: str
    """Of text, query and answer joined by NUL; of the text alone where there is no query."""


class Columns(NamedTuple):
    """Where the parts of a document stand in a row. `text` is read where there is no `context`.

    The defaults are LongReward-10k's (arXiv 2410.21252), whose queries are optional in other data.
    """

    context: str = "context"
    query: str = "query"
    answer: str = "answer"
    text: str = "text"


LONG_REWARD = Columns()


def load_documents(
    spec: str, *, offline: bool, limit: int | None = None, columns: Columns = LONG_REWARD
) -> list[Document]:
    """Read calibration documents. No code of a data set is ever run.

    Args:
        spec: `topics` (Python's reference topics), a .jsonl, .parquet or text file, a folder of .txt files, or a data
            set of the hub as `organisation/name[:split][@revision]`; its first split by default.
        offline: take hub data from the local cache alone.
        limit: the most documents to read, from the front.
        columns: names of the columns in rows; a name that is not a default must be there.

    Raises:
        MissingError: something is absent, empty, binary, not UTF-8, or not as expected; the message names file, line
            and column.
    """
    return list(islice(_documents(spec, offline, columns), limit))


def _documents(spec: str, offline: bool, columns: Columns) -> Iterator[Document]:
    path = Path(spec)
    if spec == TOPICS:
        yield _document(TOPICS, TOPICS, topics())
    elif spec and path.is_dir():
        for file in text_files(path):
            yield _document(file.name, file.name, read_text(file))
    elif path.is_file() and path.suffix == ".jsonl":
        yield from _row_documents(read_rows(path), path.name, spec, columns)
    elif path.is_file() and path.suffix == ".parquet":
        yield from _row_documents(parquet_rows(path), path.name, spec, columns)
    elif path.is_file():
        yield _document(path.name, path.name, read_text(path))
    elif match := HUB_ID.fullmatch(spec):
        rows = hub_rows(spec, match["name"], match["split"], match["revision"], offline)
        yield from _row_documents(rows, match["name"].split("/")[1], spec, columns)
    else:
        raise MissingError(f"{spec}: no such file or folder, and not a data set (organisation/name[:split][@revision])")


def _document(id: str, source: str, text: str, query: str | None = None, answer: str | None = None) -> Document:
    hashed = "\0".join((text, query, answer or "")) if query else text
    return Document(id, source, text, query, answer, digest_text(hashed))


def _row_documents(
    rows: Iterable[tuple[int, dict[str, Any]]], source: str, spec: str, columns: Columns
) -> Iterator[Document]:
    required = {name for name, default in zip(columns, LONG_REWARD, strict=True) if name != default}
    for number, row in rows:
        place = f"{spec}:{number}"
        texts = (columns.context, columns.text)
        text = [*(name for name in texts if name in required), *(name for name in texts if name in row), texts[0]][0]
        query, answer = (
            column(row, name, place) if row.get(name) is not None or name in required else None
            for name in (columns.query, columns.answer)
        )
        yield _document(f"{source}#{number:04d}", source, column(row, text, place), query or None, answer or None)


def parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a parquet file, numbered from 1.

    Raises:
        MissingError: it is absent, not parquet, or empty.
    """
    import pandas

    try:
        frame = pandas.read_parquet(path)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise MissingError(f"{path}: is not a parquet file ({_line(error)})") from None
    if frame.empty:
        raise MissingError(f"{path}: is empty; give a file with rows")
    frame = frame.astype(object).where(frame.notna(), None)
    return enumerate(frame.to_dict("records"), 1)


def hub_rows(
    spec: str, name: str, split: str | None, revision: str | None, offline: bool, config: str | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a data set of the hub, numbered from 1.

    Args:
        spec: what the user wrote, for errors.
        split: its first one if not given.
        config: which of the data set's parts, if it has several.

    Raises:
        MissingError: it cannot be loaded, or is not in the local cache.
    """
    import datasets
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # public, not re-exported

    datasets.disable_progress_bars()
    disable_progress_bars()
    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False  # before version 4 an environment variable could allow it
    if offline:
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        part = [name] if config is None else [name, config]
        split = split or datasets.get_dataset_split_names(*part, revision=revision)[0]
        rows = datasets.load_dataset(*part, split=split, revision=revision)
    except Exception as error:  # the library raises whatever its parsers and HTTP clients do
        where = "is not in the local cache, and --offline forbids to fetch it" if offline else "cannot be loaded"
        raise MissingError(f"{spec}: {where} ({_line(error)})") from None
    if offline and revision:
        # Offline, the library takes the newest cached revision whatever was asked; the folder is named by its commit.
        commit = Path(rows.cache_files[0]["filename"]).parent.name
        if commit != revision:
            raise MissingError(f"{spec}: the local cache has {commit}; ask for that, or run without --offline")
    return enumerate(rows, 1)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
