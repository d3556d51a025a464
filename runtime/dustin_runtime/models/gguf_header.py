"""The header of a GGUF file: metadata, and where each tensor lies.

The layout is that of the GGUF specification, versions 2 and 3; types and block sizes come from the `gguf` package. Its
own reader makes an array object of every string, which takes 6 to 20 seconds for a vocabulary; this one takes tenths.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

from dustin_runtime.errors import ConfigError, MissingError

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as it lies in the file. `shape` has the contiguous dimension last, as torch has it."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    size: int


@dataclass(frozen=True)
class GgufHeader:
    """All that a GGUF file says about itself. `digest` covers the header's bytes."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    digest: str


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data = data
        self.at = at

    def take(self, size: int) -> bytes:
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise EOFError
        return self.data[start : self.at]

    def uint32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def uint64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        return self.take(self.uint64()).decode()

    def value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is GGUFValueType.ARRAY:
            return self.array(GGUFValueType(self.uint32()), self.uint64())
        value = self.scalars(kind, 1)[0]
        # The decimal that was meant: 1e-06, not the 9.999999974752427e-07 that a 32-bit float makes of it.
        return float(str(np.float32(value))) if kind is GGUFValueType.FLOAT32 else value

    def array(self, kind: GGUFValueType, count: int) -> list[Any]:
        if kind in _SCALARS:
            return self.scalars(kind, count)
        if kind is GGUFValueType.STRING:
            return self.strings(count)
        return [self.value(kind) for _ in range(count)]

    def strings(self, count: int) -> list[Any]:
        """The same as `string`, `count` times: inlined, because vocabularies have 10⁵ of them."""
        length, data, at = struct.Struct("<Q").unpack_from, self.data, self.at
        values = []
        for _ in range(count):
            start = at + 8
            at = start + length(data, at)[0]
            if at > len(data):
                raise EOFError
            values.append(data[start:at].decode())
        self.at = at
        return values

    def scalars(self, kind: GGUFValueType, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return values


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file; no tensor is read.

    Raises:
        MissingError: the file is absent, not GGUF, damaged, or shorter than its tensors say.
        ConfigError: it is big-endian, one part of several, or of a version that is not supported.
    """
    if not path.is_file():
        raise MissingError(f"{path}: no such file")
    try:
        with path.open("rb") as handle:
            if handle.read(4) != b"GGUF":
                raise MissingError(f"{path}: not a GGUF file (GGUF is not its first word); give the .gguf file")
            with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except OSError as error:
        raise MissingError(f"{path}: cannot be read ({error.strerror})") from None
    except (EOFError, struct.error):
        raise MissingError(f"{path}: truncated inside its header; download it again") from None
    except (ValueError, KeyError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise MissingError(f"{path}: damaged header ({error}); download it again") from None


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(data, at=4)
    version = cursor.uint32()
    if version not in (2, 3):
        what = "a big-endian file" if version & 0xFFFF == 0 else f"GGUF version {version}"
        raise ConfigError(f"{path}: {what} is not supported; convert the model again with a current llama.cpp")
    tensor_count, field_count = cursor.uint64(), cursor.uint64()
    metadata: dict[str, Any] = {}
    for _ in range(field_count):
        key = cursor.string()
        metadata[key] = cursor.value(GGUFValueType(cursor.uint32()))
    if metadata.get("split.count", 0) not in (0, 1):
        raise ConfigError(f"{path}: one of {metadata['split.count']} parts; join them with llama-gguf-split --merge")
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: TensorInfo(name, shape, kind, start + at, size) for name, shape, kind, at, size in infos}
    end = max((info.offset + info.size for info in tensors.values()), default=start)
    if end > len(data):
        raise MissingError(f"{path}: truncated: {len(data)} bytes of at least {end}; download it again")
    return GgufHeader(path, metadata, tensors, hashlib.sha256(data[: cursor.at]).hexdigest())


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]:
    """Name, shape, encoding, offset from the start of the tensor data, and bytes."""
    name = cursor.string()
    dimensions = cursor.uint32()
    if dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"tensor {name} has {dimensions} dimensions")
    shape = tuple(cursor.uint64() for _ in range(dimensions))[::-1]
    kind = GGMLQuantizationType(cursor.uint32())
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block:
        raise ValueError(f"tensor {name} has rows that are no multiple of {block}, the block of {kind.name}")
    return name, shape, kind, cursor.uint64(), prod(shape) // block * block_bytes
