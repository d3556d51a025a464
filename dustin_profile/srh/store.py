"""Scores of needle prompts on disk: a file per prompt, joined once all needles of a length and depth are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from dustin_profile.prompts import Sample
from dustin_runtime.errors import MissingError
from dustin_runtime.files import read_json, write_json

Entry = dict[str, Any]
"""What one prompt said, as JSON."""


class Key(NamedTuple):
    """What tells a prompt from the others of a run."""

    length: int
    depth: float
    needle: int

    @classmethod
    def of(cls, sample: Sample) -> Key:
        return cls(sample.length, sample.depth, sample.needle)


class ScoreStore:
    """The scores of one model on the prompts of a run. Several processes may add to it; one joins.

    Args:
        folder: of one side's parts.
        keys: of all prompts of the run; those of a length and depth stand together, needles ascending.
    """

    def __init__(self, folder: Path, keys: Sequence[Key]) -> None:
        self.folder = folder
        self.keys = list(keys)

    def add(self, key: Key, entry: Entry) -> None:
        """Keep what a prompt said.

        Raises:
            CapacityError: the disk is full; what is stored stays.
        """
        write_json(self._prompt(key), entry)

    def missing(self) -> list[Key]:
        """Prompts without scores, in the order of `keys`."""
        joined = {(length, depth) for length, depth, _ in self._groups() if part(self.folder, length, depth).exists()}
        return [key for key in self.keys if key[:2] not in joined and not self._prompt(key).exists()]

    def join(self) -> None:
        """Put the prompts of each length and depth that is complete into one file."""
        for length, depth, keys in self._groups():
            files, whole = [self._prompt(key) for key in keys], part(self.folder, length, depth)
            if not whole.exists():
                if not all(file.exists() for file in files):
                    continue
                write_json(whole, [read_json(file) for file in files])
            for file in files:
                file.unlink(missing_ok=True)

    def entries(self) -> dict[Key, Entry]:
        """All scores that there are, in the order of `keys`.

        Raises:
            MissingError: a file is damaged.
        """
        found: dict[Key, Entry] = {}
        for length, depth, keys in self._groups():
            path = part(self.folder, length, depth)
            if path.exists():
                known = {Key(length, depth, entry["needle"]): entry for entry in read_part(path)}
            else:
                files = [self._prompt(key) for key in keys]
                known = {key: read_json(file) for key, file in zip(keys, files, strict=True) if file.exists()}
            found |= {key: known[key] for key in keys if key in known}
        return found

    def _groups(self) -> Iterator[tuple[int, float, list[Key]]]:
        for (length, depth), keys in groupby(self.keys, key=lambda key: key[:2]):
            yield length, depth, list(keys)

    def _prompt(self, key: Key) -> Path:
        return part(self.folder, key.length, key.depth, f"-n{key.needle}")


def part(folder: Path, length: int, depth: float, of: str = "") -> Path:
    """The file of all prompts of a length and a depth, or of one of them."""
    return folder / f"{length}-{depth:.12g}{of}.json"


def read_part(path: Path) -> list[Entry]:
    """The entries of such a file.

    Raises:
        MissingError: it is damaged.
    """
    found = read_json(path)
    if not isinstance(found, list) or not all(isinstance(entry, dict) and "needle" in entry for entry in found):
        raise MissingError(f"{path}: is not a part of scores; delete it and run dustin-profile srh again")
    return found


def read_prompts(folder: Path, length: int, depth: float) -> list[Entry]:
    """The entries of single prompts of a length and a depth that are there, needles ascending.

    Raises:
        MissingError: a file is damaged.
    """
    found: list[Entry] = [read_json(path) for path in folder.glob(part(folder, length, depth, "-n*").name)]
    return sorted(found, key=lambda entry: int(entry["needle"]))
