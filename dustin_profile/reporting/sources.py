"""Finds and reads what a report is made from: run directories, folders of results, single files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from dustin_profile.reporting.documents import KINDS, MADE_BY
from dustin_profile.reporting.documents.analysis import Overhead, Recovery
from dustin_profile.reporting.documents.common import Document, Pair
from dustin_profile.reporting.documents.evaluation import Drift, Evaluation, Fidelity, Subsets
from dustin_profile.reporting.documents.search import SearchResults
from dustin_profile.reporting.documents.studies import Study
from dustin_profile.rundir import first_difference
from dustin_runtime.config import DustinConfig, PairIdentity, Selection, load_config
from dustin_runtime.errors import ConflictError, MissingError, UsageError
from dustin_runtime.files import digest_file, read_json
from dustin_runtime.validation import one_line

T = TypeVar("T", bound=BaseModel)
_CONFIG, _RESULTS = "config.yaml", "results.json"
_INTERNAL = ("inputs.json", "seconds.json", "manifest.json")
"""Bookkeeping of a run directory; so are its `document-*.json`."""


@dataclass(frozen=True)
class Source(Generic[T]):
    """A file that was read.

    Attributes:
        name: the file as the report names it, without the folders that only its author has.
        run: what was given on the command line, named in the same way.
        is_run: whether that is the run directory of one pair, so that its files belong together.
    """

    name: str
    run: str
    is_run: bool
    sha256: str
    data: T


@dataclass(frozen=True)
class Evidence:
    """All that a report has to show."""

    sources: tuple[Source[Any], ...]

    def of(self, kind: type[T]) -> list[Source[T]]:
        """The sources of one kind, in the order given."""
        return [source for source in self.sources if isinstance(source.data, kind)]


def gather(paths: Sequence[Path]) -> Evidence:
    """Read all that is given.

    Raises:
        ConfigError: a config is invalid.
        ConflictError: files of one run directory were made with different configs or pairs.
        MissingError: a file is absent, damaged, half-written or no result; or a folder holds none.
        UsageError: nothing is given.
    """
    if not paths:
        raise UsageError("RUN: give a run directory, or a JSON file of eval, drift or bench")
    sources: list[Source[Any]] = []
    seen: set[Path] = set()
    for path in paths:
        found = list(_folder(path) if path.is_dir() else _file(path, path.name, path.name, is_run=False))
        if not found:
            raise MissingError(
                f"{path}: holds no results; give the run directory of dustin-profile search, eval or drift, or the JSON"
                " files that dustin-run bench writes"
            )
        for file, source in found:
            if file.resolve() not in seen:
                seen.add(file.resolve())
                sources.append(source)
    return Evidence(tuple(sources))


Found = Iterator[tuple[Path, Source[Any]]]


def _folder(folder: Path, run: str = "", depth: int = 2) -> Found:
    """What a run directory holds, or a folder of results and of run directories, `depth` levels down."""
    run = run or folder.name or folder.resolve().name
    is_run = any((folder / name).exists() for name in (_CONFIG, "search", "traces", "srh"))
    paths = [folder / _CONFIG] if is_run else sorted(folder.glob("*.yaml"))
    paths += sorted(folder.glob("*.json"))
    if is_run:
        paths += sorted(folder.glob("*/*.json"))
    found = [
        one
        for path in paths
        if path.is_file() and path.name not in _INTERNAL and not path.name.startswith("document-")
        for one in _file(path, f"{run}/{path.relative_to(folder)}", run, is_run=is_run)
    ]
    _require_complete(folder, found)
    if is_run:
        _require_one_run(folder, found)
    yield from found
    if not is_run and depth:
        for inner in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            yield from _folder(inner, f"{run}/{inner.name}", depth - 1)


def _require_complete(folder: Path, found: Sequence[tuple[Path, Source[Any]]]) -> None:
    """A search writes its config last: without it, the results beside it may be an earlier one's."""
    for path, source in found:
        ends_a_run = path == folder / _RESULTS and isinstance(source.data, SearchResults)
        if ends_a_run and not (folder / _CONFIG).exists():
            raise MissingError(
                f"{path}: stands without {_CONFIG}, so its search was not completed: run the same dustin-profile search"
                " again"
            )


def _file(path: Path, name: str, run: str, *, is_run: bool) -> Found:
    """The document of a file; nothing if a folder's file is no result."""
    if path.suffix in (".yaml", ".yml"):
        if name == run or path.name == _CONFIG or "schema_version:" in _text(path):
            yield path, Source(name, run, is_run, _sha256(path), load_config(path))
        return
    data = _read(path)
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        if name != run:  # found in a folder, where other JSON may lie
            return
        known = ", ".join(sorted(set(MADE_BY.values())))
        said = f"its kind is {kind!r}" if kind else "it names no kind"
        raise MissingError(f"{path}: not a result that a report shows ({said}); give a file of {known}")
    yield path, Source(name, run, is_run, _sha256(path), _validated(path, KINDS[kind], data))


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except MissingError as error:
        if path.exists() and isinstance(error.__context__, json.JSONDecodeError):
            raise MissingError(
                f"{path}: not JSON (line {error.__context__.lineno}), perhaps half-written:"
                " make it again, or leave it out"
            ) from None
        raise


def _validated(path: Path, cls: type[Document], data: dict[str, Any]) -> Document:
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        kind = data["kind"]
        made = f"make it again with {MADE_BY[kind]}" if kind in MADE_BY else "leave it out"
        newer = isinstance(data.get("version"), int) and error.errors()[0]["loc"] == ("version",)
        remedy = "it is of a newer dustin: upgrade" if newer else made
        raise MissingError(f"{path}: not a whole {kind} file ({one_line(error)}): {remedy}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MissingError(f"{path}: not readable as text ({error})") from None


def _sha256(path: Path) -> str:
    try:
        return digest_file(path)
    except OSError as error:
        raise MissingError(f"{path}: cannot be read ({error.strerror})") from None


def _require_one_run(folder: Path, found: Sequence[tuple[Path, Source[Any]]]) -> None:
    """Results of one run directory rest on its config: those of an earlier one must not stand beside it unsaid."""
    config = next((source.data for _, source in found if isinstance(source.data, DustinConfig)), None)
    for path, source in found if config else ():
        theirs = _rests_on(source.data)
        if theirs is None or config is None:
            continue
        # What only one of them says is of another version, not of another config.
        fields = theirs.model_fields_set & config.selection.model_fields_set
        ours, others = (
            {"selection": one.model_dump(mode="json", include=fields)} for one in (config.selection, theirs)
        )
        if isinstance(source.data, SearchResults):
            ours["pair"], others["pair"] = _ids(config.pair), _ids(source.data.pair)
        if field := first_difference(ours, others):
            name, here, there = (part if part is not None else "none" for part in field)
            raise ConflictError(
                f"{path}: made with {name} = {there}, {folder / _CONFIG} has {here}: results of two configs would be"
                " mixed; make it again, or move it out and give it as a RUN of its own"
            )


def _rests_on(data: Any) -> Selection | None:
    """The selection that a document was made with."""
    if isinstance(data, SearchResults | Recovery):
        return data.selection
    if isinstance(data, Study):
        return data.made_of.selection
    return data.inputs.selection if isinstance(data, Evaluation | Fidelity | Subsets | Drift | Overhead) else None


def _ids(pair: Pair | PairIdentity) -> dict[str, Any]:
    return {"target": pair.target.id, "draft": pair.draft.id}
