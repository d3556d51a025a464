"""Token files, and which of their tokens each step reads.

A source (books, code, ...) is one stream of tokens, documents joined by end-of-text. A step reads blocks of the longest
sequence's length and cuts them into sequences; a block is a function of the seed and its number, so that nothing has to
be remembered to resume. Sequences may run over the end of a document: the target sees the same context as the draft, so
what it says there is as good a lesson as any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustin_runtime.errors import MissingError, UsageError
from dustin_runtime.files import atomic_path, digest_file, read_json, write_json

Tokens = NDArray[np.int32]

MANIFEST = "manifest.json"
SPLITS = ("train", "heldout")
PART_TOKENS = 24_000_000
"""Most tokens of one file: 48 MB in 16 bits."""
_TURN = 0.6180339887498949
"""Golden ratio: multiples of it, modulo 1, fill [0, 1) evenly, so every source gets its share in any stretch."""


def write_tokens(folder: Path, source: str, split: str, tokens: NDArray[Any]) -> list[dict[str, Any]]:
    """Write a stream as safetensors files of unsigned 16 (or, for a large vocabulary, 32) bits.

    Returns:
        Name, number of tokens and SHA-256 of every file.
    """
    from safetensors.numpy import save_file

    kind = np.uint16 if len(tokens) == 0 or int(tokens.max()) < 2**16 else np.uint32
    entries = []
    for number, begin in enumerate(range(0, len(tokens), PART_TOKENS)):
        path = folder / f"{source}.{split}-{number}.safetensors"
        part = np.ascontiguousarray(tokens[begin : begin + PART_TOKENS]).astype(kind)
        with atomic_path(path) as temporary:
            save_file({"tokens": part}, temporary)
        entries.append({"file": path.name, "tokens": len(part), "sha256": digest_file(path)})
    return entries


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `prepare` (and `continuations`) wrote.

    Raises:
        MissingError: absent, or not a manifest.
    """
    found = read_json(folder / MANIFEST)
    if not isinstance(found, dict) or found.get("kind") != "dustin-draft-data":
        raise MissingError(f"{folder / MANIFEST}: not a manifest of training data; run prepare")
    return found


def write_source(folder: Path, name: str, entry: dict[str, Any]) -> None:
    """Put a source into the manifest, in the place of one of the same name."""
    manifest = read_manifest(folder)
    manifest["sources"][name] = entry
    write_json(folder / MANIFEST, manifest)


def read_source(folder: Path, manifest: Mapping[str, Any], name: str, split: str) -> Tokens:
    """A source's stream, every file checked by its hash.

    Raises:
        MissingError: a file is absent or not the manifest's.
    """
    from safetensors.numpy import load_file

    parts = []
    for entry in manifest["sources"][name][split]:
        path = folder / entry["file"]
        if not path.is_file() or digest_file(path) != entry["sha256"]:
            raise MissingError(f"{path}: absent, or not the file that {MANIFEST} lists; prepare the data again")
        parts.append(load_file(path)["tokens"].astype(np.int32))
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def parse_shares(text: str) -> dict[str, float]:
    """Read `books=0.6,code=0.2`; shares are relative.

    Raises:
        UsageError: not of that form.
    """
    try:
        shares = {name: float(value) for name, _, value in (part.partition("=") for part in text.split(","))}
    except ValueError:
        raise UsageError(f"--shares {text}: give SOURCE=SHARE, ...") from None
    if min(shares.values()) < 0 or not sum(shares.values()) > 0:
        raise UsageError(f"--shares {text}: shares must not be negative, and one positive")
    return {name: share for name, share in shares.items() if share > 0}


@dataclass(frozen=True)
class Mixture:
    """An endless sequence of blocks.

    Attributes:
        streams: by source, at least a block long each.
        shares: by source, relative.
        block: tokens of a block: those of the longest sequence.
    """

    streams: Mapping[str, Tokens]
    shares: Mapping[str, float]
    block: int
    seed: int

    def __post_init__(self) -> None:
        if absent := sorted(self.shares.keys() - self.streams.keys()):
            raise UsageError(f"--shares: there is no source {absent[0]} (there are {', '.join(sorted(self.streams))})")
        if short := [name for name in self.shares if len(self.streams[name]) < self.block]:
            raise UsageError(f"source {short[0]}: {len(self.streams[short[0]])} tokens do not fill one of {self.block}")

    def source_of(self, number: int) -> str:
        """Whose tokens block `number` holds: exact in the long run, even in the short."""
        names = sorted(self.shares)
        edges = np.cumsum([self.shares[name] for name in names])
        at = (number * _TURN + np.random.default_rng([self.seed, 1]).random()) % 1.0 * edges[-1]
        return names[min(int(np.searchsorted(edges, at, side="right")), len(names) - 1)]

    def block_at(self, number: int) -> Tokens:
        """[block] tokens from a place drawn by seed and number."""
        stream = self.streams[self.source_of(number)]
        begin = int(np.random.default_rng([self.seed, 2, number]).integers(len(stream) - self.block + 1))
        return stream[begin : begin + self.block]

    def batch(self, step: int, tokens: int, length: int) -> Tensor:
        """[tokens / length, length] int64 of a step; `tokens` is a multiple of the block, the block of `length`."""
        count = tokens // self.block
        blocks = np.stack([self.block_at(step * count + index) for index in range(count)])
        return torch.from_numpy(blocks.astype(np.int64)).view(-1, length)


def spread(stream: Tokens, length: int, count: int) -> Tensor:
    """[up to count, length] int64: sequences that lie evenly over a stream and do not overlap; for evaluation."""
    places = min(count, len(stream) // length)
    begins = [index * (len(stream) // max(places, 1)) for index in range(places)]
    rows = [stream[begin : begin + length] for begin in begins]
    return torch.from_numpy(np.stack(rows).astype(np.int64)) if rows else torch.zeros(0, length, dtype=torch.int64)
