"""Where the text comes from: books that are given, and the code and documentation that a Python installation carries.

What is held out is decided by the hash of a text's name, so it does not change when others come or go. Python's
reference topics (`pydoc_data.topics`, the project's default text) are never trained on: they are evaluated on.
"""

from __future__ import annotations

import ast
import hashlib
import lzma
import sysconfig
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from dustin_runtime.errors import MissingError

PACKAGES = (
    "numpy",
    "scipy",
    "pandas",
    "matplotlib",
    "torch",
    "transformers",
    "optuna",
    "pydantic",
    "rich",
    "sqlalchemy",
)
"""Installed packages that are read beside the standard library."""
HELD_OUT = 16
"""One in so many files of code and documentation is held out."""
LEAST = 400
"""Characters below which a text is left out."""
MOST = 200_000
"""Characters above which a source file is data rather than code."""
_NOT_CODE = {
    "test",
    "tests",
    "testing",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "encodings",
}


class Text(NamedTuple):
    """One document."""

    name: str
    """Without any path of this machine."""
    text: str

    @property
    def held_out(self) -> bool:
        """Whether evaluation alone may read it: with a file, its docstrings are held out."""
        file = self.name.partition(":")[0]
        return int(hashlib.sha256(file.encode()).hexdigest(), 16) % HELD_OUT == 0


def books(folder: Path) -> Iterator[Text]:
    """The .txt and .txt.xz files of a folder, by name.

    Raises:
        MissingError: there are none.
    """
    if not folder.is_dir():
        raise MissingError(f"{folder}: no such folder")
    paths = sorted(path for path in folder.iterdir() if path.name.endswith((".txt", ".txt.xz")))
    if not paths:
        raise MissingError(f"{folder}: holds no .txt or .txt.xz file")
    for path in paths:
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        yield Text(path.name.removesuffix(".xz"), content.decode("utf-8"))


def code() -> Iterator[Text]:
    """Python source of the standard library, then of the installed `PACKAGES`."""
    for name, root, top in _roots():
        for path in sorted(root.rglob("*.py")):
            inner = path.relative_to(root)
            if _NOT_CODE.isdisjoint(inner.parts[:-1]) and (text := _read(path)):
                yield Text("/".join((name, top, *inner.parts)), text)


def documentation() -> Iterator[Text]:
    """Descriptions of the installed packages, and the docstrings of each of their modules."""
    for name in PACKAGES:
        try:
            description = distribution(name).metadata.get_payload()  # type: ignore[attr-defined]
        except PackageNotFoundError:
            continue
        if isinstance(description, str) and len(description) >= LEAST:
            yield Text(f"{name}: description", description)
    for text in code():
        if len(found := "\n\n".join(_docstrings(text.text))) >= LEAST:
            yield Text(f"{text.name}: docstrings", found)


def _roots() -> Iterator[tuple[str, Path, str]]:
    """Name, folder, and what to put before the names in it."""
    paths = sysconfig.get_paths()
    yield "python", Path(paths["stdlib"]), "lib"
    for package in PACKAGES:
        for key in ("purelib", "platlib"):
            if (folder := Path(paths[key]) / package).is_dir():
                yield package, folder, package
                break


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    return text if LEAST <= len(text) <= MOST else ""


def _docstrings(source: str) -> Iterator[str]:
    """Docstrings of a module in their order, each under the name it belongs to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's code
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node)
            if found and len(found) > 80:
                yield found if isinstance(node, ast.Module) else f"{node.name}\n\n{found}"
