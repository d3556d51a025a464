"""Where recipes lie and what they are called: enough for shell completion, and quick to import.

A model's file is named by the last part of its hub id in lower case (`qwen2.5-72b-instruct.yaml`), a pair's file by
its first alias with `_` for `:` (`qwen72b_0.5b.yaml`). So a name is found, or completed, without parsing anything.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def recipes_folder() -> Path:
    """The folder of recipes: inside the package when it was installed from a wheel, else the repository's."""
    package = Path(__file__).resolve().parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def pair_names() -> list[str]:
    """First alias of every pair, in alphabetical order."""
    return sorted(path.stem.replace("_", ":") for path in (recipes_folder() / "pairs").glob("*.yaml"))


def complete_pair(incomplete: str) -> list[str]:
    """Names of the pairs that begin with `incomplete`, for shell completion."""
    return [name for name in pair_names() if name.startswith(incomplete.lower())]
