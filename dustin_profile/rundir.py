"""The run directory: one folder per stage, each with the inputs that it was made from, written before any work."""

from __future__ import annotations

import fcntl
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dustin_runtime.errors import ConflictError, MissingError
from dustin_runtime.files import clear_temporaries, read_json, temporary_sibling, write_json

if TYPE_CHECKING:
    from dustin_runtime.parallel.ranks import Ranks

LOCK = ".lock"
FOLDERS = ("", "srh", "srh/target", "srh/draft", "traces", "windowed", "search")
"""Where a run writes."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run directory for this process, which proves it writable before a model is loaded.

    What a killed process was in the middle of writing or discarding is removed.

    Raises:
        ConflictError: another process holds it.
        MissingError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / LOCK).open("w")
    except OSError as error:
        raise MissingError(f"--run-dir {folder}: cannot be written ({error.strerror})") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConflictError(f"--run-dir {folder}: another dustin-profile is working in it") from None
        for name in FOLDERS:
            clear_temporaries(folder / name)
        yield


@contextmanager
def held(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Hold a run directory for all ranks of a run: the first one locks it.

    Raises:
        ConflictError: another run holds it.
        MissingError: it cannot be written, or a rank does not see what the first one writes.
    """
    lock = folder / LOCK
    with ExitStack() as stack:

        def take() -> str:
            stack.enter_context(locked(folder))
            token = secrets.token_hex(8)
            if not ranks.alone:
                lock.write_text(token)
            return token

        token = ranks.once(take)
        if not ranks.alone:
            with ranks.alike(loading=True):
                if not lock.exists() or lock.read_text() != token:
                    raise MissingError(f"--run-dir {folder}: is another one here; give a folder that all ranks share")
            if not ranks.rank:
                lock.write_text("")
        yield


def open_stage(folder: Path, inputs: dict[str, Any], overwrite: bool, *, of_config: bool = True) -> None:
    """Begin or continue a stage.

    Args:
        folder: of the stage; `inputs.json` in it says what its content was made from.
        inputs: what it is to be made from now.
        overwrite: discard a stage that was made from other inputs.
        of_config: whether an emitted config rests on the stage, and is discarded with it.

    Raises:
        ConflictError: it was made from other inputs; names the first that differs, with both values.
    """
    path = folder / "inputs.json"
    if path.exists():
        if check_stage(folder, inputs, overwrite):
            return
        for parent in folder.parents if of_config else ():
            if (parent / LOCK).exists():  # an emitted config says that what it was made from is there
                (parent / "config.yaml").unlink(missing_ok=True)
                break
        # Renamed first: killed halfway, the rest must not pass for what the new inputs made.
        shutil.rmtree(folder.rename(temporary_sibling(folder)))
    write_json(path, inputs)


def check_stage(folder: Path, inputs: dict[str, Any], overwrite: bool, *, unknown: Collection[str] = ()) -> bool:
    """Whether a stage was made from these inputs; touches nothing.

    Args:
        unknown: names of inputs that earlier stages have yet to make, and that are not compared.

    Raises:
        ConflictError: it was made from others, and is not to be overwritten; as of `open_stage`.
    """
    path = folder / "inputs.json"
    before, now = read_json(path) if path.exists() else inputs, inputs
    if unknown:
        before, now = ({name: one[name] for name in one if name not in unknown} for one in (before, now))
    field = first_difference(before, now)
    if field is None:
        return path.exists()
    if not overwrite:
        raise ConflictError(
            f"{folder}: {changed(field, 'made with')}: give another --run-dir, or --overwrite to discard it"
        )
    return False


def keep_inputs(folder: Path, inputs: dict[str, Any]) -> None:
    """Begin or continue a folder in which results are collected and never discarded.

    Raises:
        ConflictError: it holds results of other inputs; names the first that differs, with both values.
    """
    path = folder / "inputs.json"
    if not path.exists():
        write_json(path, inputs)
    elif field := first_difference(read_json(path), inputs):
        raise ConflictError(
            f"{folder}: holds results {changed(field, 'of')}; they would be mixed: give another --run-dir"
        )


def read_part(file: Path, again: str, whole: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """One part of a stage's results.

    Args:
        again: what deleting it makes the command do, such as `measure its document again`.
        whole: whether a JSON object is such a part.

    Raises:
        MissingError: it is not; says what to do.
    """
    fault = "is not a result"
    try:
        entry = read_json(file)
        if isinstance(entry, dict) and whole(entry):
            return entry
    except MissingError as error:
        fault = str(error).removeprefix(f"{file}: ")
    raise MissingError(f"{file}: {fault}; delete the file to {again}")


def first_difference(before: Any, now: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first leaf in which two JSON values differ: its dotted name and both values, None for one that is missing."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*now, *(key for key in before if key not in now)]:
            inner = first_difference(before.get(key), now.get(key), f"{name}.{key}" if name else str(key))
            if inner:
                return inner
        return None
    return None if before == now else (name, before, now)


def changed(field: tuple[str, Any, Any], having: str) -> str:
    """What `first_difference` found, for errors: `made with budget = 64, now 65`.

    Args:
        having: `made with`, `of` or the like; of a value that is missing, `without` takes the place of its last word.
    """
    name, old, new = field
    if old is None:
        return " ".join([*having.split()[:-1], f"without {name}, now {_short(new)}"])
    return f"{having} {name} = {_short(old)}, now {'without it' if new is None else _short(new)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
