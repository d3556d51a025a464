"""Writing files so that a crash at any moment leaves the old content or the new, never half of either."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dustin_runtime.errors import CapacityError, MissingError, UsageError

_TEMPORARY = re.compile(r"\..+\.\d+\.tmp(\.lock.*)?")
"""Names by `temporary_sibling`, and those of the locks that Optuna puts beside its journal."""


def temporary_sibling(path: Path) -> Path:
    """Where this process prepares what becomes `path`, or puts what `path` was until it is deleted."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def clear_temporaries(folder: Path) -> None:
    """Remove what killed processes left behind in a folder that no other process is writing to."""
    for path in folder.glob(".*"):
        if _TEMPORARY.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; on success it is synced and renamed over `path`, on failure removed.

    Raises:
        CapacityError: the disk is full, or the quota is.
        MissingError: it cannot be written for another reason.
    """
    if _is_special(path):
        raise MissingError(f"{path}: is no regular file, and would be replaced by one")
    temporary = temporary_sibling(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb+") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CapacityError(f"{path}: no space left to write it; free some and run the command again") from error
        raise MissingError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        with suppress(OSError):  # where it could not be written there is nothing to remove
            temporary.unlink()


def _is_special(path: Path) -> bool:
    """Whether it is there and neither a file nor a folder: a device, a pipe, a socket."""
    try:
        return path.exists() and not path.is_file() and not path.is_dir()
    except OSError:  # what cannot be looked at is refused where it is written
        return False


def require_writable(path: Path, option: str) -> None:
    """Refuse before hours of work what cannot be written after them; missing folders are made.

    Raises:
        CapacityError: the disk is full.
        MissingError: it cannot be written for another reason.
        UsageError: it is a folder, a device or a pipe.
    """
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; name a file")
    if _is_special(path):
        raise UsageError(f"{option} {path}: is no regular file, and would be replaced by one; name a file")
    temporary = temporary_sibling(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(f"{option} {path}: no space left to write it") from error
        raise MissingError(f"{option} {path}: cannot be written ({error.strerror})") from error


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8, LF) atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by readable JSON atomically. Key order is kept: it is the order people read."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        MissingError: it is absent, or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise MissingError(f"{path}: not readable as JSON ({error})") from None


def write_with(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file, then move it to `path`: for libraries that write files themselves."""
    with atomic_path(path) as temporary:
        write(temporary)


def digest(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form: the fingerprint of a stage's inputs."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def digest_text(text: str) -> str:
    """SHA-256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
