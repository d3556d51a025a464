"""What every benchmark's document says about where it was measured; no host, no user, no path."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import dustin_runtime
from dustin_runtime.pricing import DEVICES, Device

_DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGES = ("torch", "triton", "flash-attn", "flashinfer-python")


def environment(device: torch.device) -> dict[str, Any]:
    """`device`, its name or the processor's architecture, and `versions` of what decides times."""
    versions = {"dustin": dustin_runtime.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    if device.type != "cuda":
        return {"device": f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)", "versions": versions}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if driver := _driver():
        versions["driver"] = driver
    return {"device": torch.cuda.get_device_name(device), "versions": versions}


def roofline_device(device: torch.device) -> tuple[str, Device]:
    """Which entry of `DEVICES` the floor is computed for; an unknown GPU is compared with an H200."""
    if device.type != "cuda":
        return "cpu", DEVICES["cpu"]
    name = torch.cuda.get_device_name(device).lower()
    known = next((key for key in DEVICES if key in name), "h200")
    return known, DEVICES[known]


def _driver() -> str | None:
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[0] if found else None
