"""Which traces a config is judged on, and that they fit it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dustin_profile.check import read_baseline
from dustin_profile.choices import Side
from dustin_profile.search.phases import usable
from dustin_profile.traces.stage import require_same
from dustin_profile.traces.store import TraceStore
from dustin_profile.traces.windows import Windows
from dustin_runtime.config import DustinConfig
from dustin_runtime.errors import MissingError, UsageError


class Traced(NamedTuple):
    """One document."""

    store: TraceStore
    entry: dict[str, Any]
    """Of the manifest."""
    group: str
    """Its kind: the data set where there are several, else its source."""


class Sources:
    """Documents of one or several trace folders.

    Args:
        folders: of traces.
        searched: SHA-256 of the prompts that the search chose on; None if nothing says so.

    Raises:
        ConflictError: traces were made with other heads, models or depth than the config's.
        MissingError: a folder holds no traces.
        UsageError: no document is left.
    """

    def __init__(self, folders: Sequence[Path], config: DustinConfig, side: Side, searched: set[str] | None) -> None:
        if side == "held-out" and searched is None:
            raise UsageError("--split held-out: no results of the search lie beside the config; give --split all")
        seen = searched if side == "held-out" and searched is not None else set()
        self.stores: list[TraceStore] = []
        for folder in folders:
            store = TraceStore.read(folder)
            _require_fit(store.inputs, config, folder)
            self.stores.append(store.subset(e["id"] for e in store.entries if e["sha256"] not in seen))
        self.documents = [
            Traced(store, entry, str(store.inputs["data"]) if len(folders) > 1 else entry["source"])
            for store in self.stores
            for entry in store.entries
        ]
        if not self.documents:
            raise UsageError("--split held-out: the search saw every traced document; give --split all")
        if repeated := _repeated([traced.entry["id"] for traced in self.documents]):
            raise UsageError(f"--traces: two folders hold {repeated}; give one of them")

    def windows(self) -> Iterator[tuple[Traced, Windows]]:
        """Every document with its traces, one at a time."""
        for store in self.stores:
            theirs = [traced for traced in self.documents if traced.store is store]
            if theirs:
                yield from zip(theirs, usable(store), strict=True)

    @property
    def least_prefix(self) -> int:
        """Tokens of the shortest prompt: no smaller prefix was traced."""
        return min(store.least_prefix() for store in self.stores if len(store))


def searched_documents(config: Path) -> set[str] | None:
    """SHA-256 of the prompts that an emitted config was searched on, if its results lie beside it.

    Raises:
        MissingError: the results of its search are damaged.
    """
    beside = config / "results.json" if config.is_dir() else config.with_suffix(".json")
    if config.name == "config.yaml":
        beside = config.with_name("results.json")
    if not beside.exists():
        return None
    try:
        return {entry["sha256"] for entry in read_baseline(beside)["documents"]["search"].values()}
    except (MissingError, AttributeError, KeyError, TypeError) as error:
        if config.is_file() and config.name != "config.yaml":  # a file of one name beside it need not be the search's
            return None
        said = str(error) if isinstance(error, MissingError) else f"{beside}: its documents cannot be read"
        remedy = "run the same dustin-profile search again, or give --split all"
        raise MissingError(f"{said}; the file is damaged: {remedy}") from None


def _require_fit(traces: dict[str, Any], config: DustinConfig, folder: Path) -> None:
    owner = f"--traces {folder}"
    for side, found in traces["models"].items():
        before = config.provenance.get(side) if side != "rope" else None
        if isinstance(before, dict) and isinstance(found, dict):
            require_same(f"models.{side}.sha256", found.get("sha256"), before.get("sha256"), owner)
    require_same("depth", traces["depth"], config.depth, owner)
    selection = config.selection
    for name, entries in (("history", (selection.history,)), ("lookahead", selection.lookahead)):
        for entry in entries:
            have = traces["heads"][name].get(str(entry.layer))
            require_same(f"{name} heads of layer {entry.layer}", have, list(entry.heads), owner)


def _repeated(names: Sequence[str]) -> str | None:
    return next((name for index, name in enumerate(names) if name in names[:index]), None)
