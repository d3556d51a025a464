"""Where a result came from, without anything that names a user or a machine's paths."""

from __future__ import annotations

import platform
from dataclasses import asdict, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "optuna", "numpy", "triton", "rouge")


def versions() -> dict[str, str]:
    """Versions of dustin, Python and the packages that decide results."""
    import dustin_runtime

    found = {"dustin": dustin_runtime.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def device_name(device: str) -> str:
    """The GPU's name, or the processor's architecture and the threads in use."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"


def device_kind(device: str) -> str:
    """What decides results of a device: as `device_name`, without the threads, which sum in another order at most."""
    return device_name(device) if device.startswith("cuda") else f"cpu ({platform.machine()})"


def arguments(settings: Any) -> dict[str, Any]:
    """The settings that differ from their defaults; paths by their last part."""
    found: dict[str, Any] = {}
    for field in fields(settings):
        group = getattr(settings, field.name)
        if is_dataclass(group) and not isinstance(group, type):
            defaults = {option.name: option.default for option in fields(group)}
            found |= {name: _plain(value) for name, value in asdict(group).items() if value != defaults[name]}
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path) or (isinstance(value, str) and Path(value).is_absolute()):
        return Path(value).name
    return value
