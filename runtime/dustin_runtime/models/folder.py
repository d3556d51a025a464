"""Model folders in the Hugging Face layout: their config, and their safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dustin_runtime.errors import ConfigError, MissingError
from dustin_runtime.files import read_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`.

    Raises:
        MissingError: it is absent, or not JSON.
        ConfigError: it is not an object, or describes quantised weights.
    """
    path = folder / "config.json"
    if not path.is_file():
        gguf = sorted(folder.glob("*.gguf"))
        remedy = f"the GGUF file itself, {gguf[0]}" if gguf else "a folder with config.json and safetensors weights"
        raise MissingError(f"{path}: no such file; give {remedy}")
    config = _object(path)
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "unnamed") if isinstance(quantised, dict) else quantised
        raise ConfigError(f"{path}: quantization_config ({method}) is not supported; give 16- or 32-bit weights")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a model's weights, complete, in the order of their names.

    Raises:
        MissingError: there are none, or the index names a file that is absent.
    """
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.is_file():
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        what = f"only pickled weights ({pickled[0]}), which are never loaded" if pickled else "no weights"
        raise MissingError(
            f"{folder}: {what}; {_SINGLE} or {_INDEX} is needed: load the model with transformers and save it with "
            "save_pretrained, which writes safetensors"
        )
    shards = _object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise MissingError(f"{index}: names no weights; download it again")
    names = sorted({str(name) for name in shards.values()})
    if outside := [name for name in names if Path(name).name != name]:
        raise ConfigError(f"{index}: {outside[0]} is not a file name in this folder")
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise MissingError(f"{folder / absent[0]}: no such file ({len(absent)} of {len(names)} shards); download again")
    return [folder / name for name in names]


def safetensors_header(path: Path) -> bytes:
    """The JSON header of a safetensors file, after checking that the file is as long as its tensors say.

    Raises:
        MissingError: the file is absent, truncated or not safetensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if length > size - 8:
                raise MissingError(f"{path}: truncated, or not a safetensors file; download it again")
            header = handle.read(length)
        ends = [entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"]
    except OSError as error:
        raise MissingError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, AttributeError, KeyError, IndexError, TypeError):
        raise MissingError(f"{path}: not a safetensors file, or damaged; download it again") from None
    if (needed := 8 + length + max(ends, default=0)) > size:
        raise MissingError(f"{path}: truncated: {size} bytes of {needed}; download it again")
    return header


def _object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object; download it again")
    return value
