"""Results item by item: a JSONL file per method and budget. A line is synced when its item is done."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from dustin_runtime.errors import CapacityError, MissingError


class RowFile:
    """One file that only grows; rows are mappings with an `id`.

    A process that is killed, or a full disk, leaves at most half a last line, which the next one cuts off.

    Raises:
        MissingError: the file cannot be read, or a line is not a row; names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        """What is in the file, by id."""
        try:
            content = path.read_bytes() if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                os.truncate(path, len(whole))
        except OSError as error:
            raise MissingError(f"{path}: cannot be read ({error.strerror})") from None
        for number, line in enumerate(whole.splitlines(), 1):
            row = _row(line)
            if row is None:
                raise MissingError(f"{path}:{number}: is not a result; delete the file to measure its items again")
            self.rows[row["id"]] = row

    def append(self, row: dict[str, Any]) -> None:
        """Add a row; it is on the disk when this returns.

        Raises:
            CapacityError: the disk is full.
            MissingError: the file cannot be written.
        """
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as handle:
                handle.write(line.encode())
                handle.flush()
                os.fsync(handle.fileno())
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise CapacityError(f"{self.path}: no space left to write it; free some and go on") from error
            raise MissingError(f"{self.path}: cannot be written ({error.strerror})") from error
        self.rows[row["id"]] = row


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # UnicodeDecodeError is one
        return None
    return row if isinstance(row, dict) and isinstance(row.get("id"), str) else None
