"""Traces on disk: one safetensors shard per document, and a manifest that is written first and replaced atomically."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dustin_profile.rundir import open_stage
from dustin_profile.traces.windows import Windows
from dustin_runtime.errors import MissingError
from dustin_runtime.files import read_json, write_json, write_with

_TENSORS = ("prefix", "truth", "tail", "history", "lookahead", "text", "agrees")
STOPPING = "stopping.json"
"""Where tracing ended before all documents, and why: there if a run was asked to, and has ended."""
_SAID = re.compile(r"\d{5,}\.json")
"""Files about one document, by its number."""


class TraceStore:
    """The traces of a run, a sequence of documents read one at a time (implements `windows.Documents`).

    A document is done once the manifest names its shard. A shard that the manifest does not name yet was cut off by a
    crash and is collected again. Where several processes trace, each puts what it says of a document into a file beside
    the shard, and `open` moves that to the manifest.

    Args:
        shared: whether other processes are tracing into the folder.
    """

    def __init__(
        self,
        folder: Path,
        documents: list[dict[str, Any]],
        chosen: Sequence[int] | None = None,
        shared: bool = False,
    ) -> None:
        self.folder = folder
        self.shared = shared
        self.documents = documents
        self.chosen = [i for i, entry in enumerate(documents) if entry["file"]] if chosen is None else list(chosen)

    @classmethod
    def open(
        cls, folder: Path, inputs: dict[str, Any], documents: Iterable[dict[str, Any]], overwrite: bool = False
    ) -> TraceStore:
        """Begin or continue.

        Args:
            inputs: what the traces are made from.
            documents: what identifies each, `id`, `source` and `sha256`, in order.

        Raises:
            ConflictError: the folder holds traces made from other inputs.
        """
        open_stage(folder, inputs, overwrite)
        (folder / STOPPING).unlink(missing_ok=True)  # said of what was traced so far
        path = folder / "manifest.json"
        if path.exists():
            entries = _entries(path)
        else:
            entries = [dict(entry, file=None, skipped=None, windows=0, bytes=0) for entry in documents]
            _write_manifest(folder, entries)
        _join(folder, entries)
        for entry in entries:
            if entry["file"] and not _whole(folder / entry["file"], entry["bytes"]):
                entry["file"] = None
        return cls(folder, entries)

    @classmethod
    def read(cls, folder: Path) -> TraceStore:
        """What is traced already.

        Raises:
            MissingError: the folder holds no traces.
        """
        path = folder / "manifest.json"
        if not path.exists():
            raise MissingError(f"{folder}: no traces; collect them with dustin-profile trace or search")
        return cls(folder, _entries(path))

    @property
    def inputs(self) -> dict[str, Any]:
        """What the traces are made from."""
        found: dict[str, Any] = read_json(self.folder / "inputs.json")
        return found

    @property
    def stopping(self) -> dict[str, Any] | None:
        """What a run that was to stop when decided has recorded; None of other runs."""
        path = self.folder / STOPPING
        return read_json(path) if path.exists() else None

    def record_stopping(self, record: dict[str, Any]) -> None:
        """Keep why tracing ended where it did."""
        write_json(self.folder / STOPPING, record)

    def pending(self) -> list[int]:
        """Indices of documents that are neither traced nor skipped."""
        return [i for i, entry in enumerate(self.documents) if entry["file"] is None and entry["skipped"] is None]

    def add(self, index: int, windows: Windows) -> None:
        """Store a document's traces.

        Raises:
            CapacityError: the disk is full; what is stored stays.
        """
        from safetensors.torch import save

        name = f"{index:05d}.safetensors"
        tensors = {key: getattr(windows, key).contiguous() for key in _TENSORS}
        # Not save_file: what it raises when the disk is full is no OSError.
        content = save(tensors, {"document": windows.document})
        write_with(self.folder / name, lambda path: path.write_bytes(content))
        self._update(index, file=name, windows=len(windows.prefix), bytes=len(content))
        self.chosen.append(index)

    def skip(self, index: int, reason: str) -> None:
        """Record that a document gave no window."""
        self._update(index, skipped=reason)

    def subset(self, ids: Iterable[str]) -> TraceStore:
        """The traced documents among `ids`, in the order of the manifest."""
        wanted = set(ids)
        chosen = [i for i, entry in enumerate(self.documents) if entry["file"] and entry["id"] in wanted]
        return TraceStore(self.folder, self.documents, chosen)

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Manifest entries of the traced documents, in order."""
        return [self.documents[index] for index in sorted(self.chosen)]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Windows:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        entry = self.documents[sorted(self.chosen)[index]]
        path = self.folder / entry["file"]
        try:
            tensors = load_file(path)
            return Windows(document=entry["id"], **{key: tensors[key] for key in _TENSORS})
        except (SafetensorError, OSError, KeyError) as error:
            raise _damaged(path, error) from error

    def least_prefix(self) -> int:
        """Tokens of the shortest prefix of any window; of the shards, only this is read.

        Raises:
            MissingError: a shard is damaged.
        """
        from safetensors import SafetensorError, safe_open

        least = []
        for entry in self.entries:
            path = self.folder / entry["file"]
            try:
                with safe_open(path, "pt") as shard:
                    least.append(int(shard.get_tensor("prefix").min()))
            except (SafetensorError, OSError, KeyError) as error:
                raise _damaged(path, error) from error
        return min(least)

    def _update(self, index: int, **fields: Any) -> None:
        self.documents[index].update(fields)
        if self.shared:
            write_json(self.folder / f"{index:05d}.json", fields)
        else:
            _write_manifest(self.folder, self.documents)


def _join(folder: Path, entries: list[dict[str, Any]]) -> None:
    """Move to the manifest what processes have said of single documents."""
    said = [path for path in sorted(folder.iterdir()) if _SAID.fullmatch(path.name)]
    for path in said:
        entries[int(path.stem)].update(read_json(path))
    if said:
        _write_manifest(folder, entries)
    for path in said:
        path.unlink()


def _write_manifest(folder: Path, entries: list[dict[str, Any]]) -> None:
    write_json(folder / "manifest.json", {"kind": "dustin-traces", "documents": entries})


def _entries(path: Path) -> list[dict[str, Any]]:
    """The documents that a manifest lists."""
    fault = "is not a manifest of traces"
    try:
        found = read_json(path)
        if isinstance(found, dict) and found.get("kind") == "dustin-traces" and isinstance(found["documents"], list):
            entries: list[dict[str, Any]] = found["documents"]
            return entries
    except (MissingError, KeyError) as error:
        fault = str(error).removeprefix(f"{path}: ") if isinstance(error, MissingError) else fault
    raise MissingError(
        f"{path}: {fault}; delete the folder of traces and run the same dustin-profile trace or search again"
    )


def _damaged(path: Path, error: Exception) -> MissingError:
    fault = f"damaged ({error}): delete it and run" if path.exists() else "no such file: run"
    return MissingError(f"{path}: {fault} the same dustin-profile trace or search again, which collects it anew")


def _whole(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
