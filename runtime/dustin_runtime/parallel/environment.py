"""What torchrun tells a process about the run it belongs to; read without importing torch."""

from __future__ import annotations

import os

from dustin_runtime.errors import UsageError


def world_size() -> int:
    """Processes of this run: 1 if it was not torchrun that started it.

    Raises:
        UsageError: the environment is no torchrun's.
    """
    return _number("WORLD_SIZE") if "RANK" in os.environ else 1


def rank() -> int:
    """This process's number in the run. Raises as `world_size`."""
    return _number("RANK")


def local_rank() -> int:
    """Its number on its host. Raises as `world_size`."""
    return _number("LOCAL_RANK")


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise UsageError(f"{name} is {text!r} in the environment, no number; start several processes with torchrun")
    return int(text)
