"""Kernels run where they are at home if there is a GPU, else in Triton's interpreter on small cases."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from types import SimpleNamespace

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    if importlib.util.find_spec("triton"):
        from triton.language.core import is_builtin
        from triton.runtime import interpreter

        @functools.cache
        def builtins_of(package: object) -> list[str]:
            return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

        def members(package: object) -> list[tuple[str, object]]:
            return [(name, getattr(package, name)) for name in builtins_of(package)]

        # At every call of a device function it looks through all of the language for what it has to replace.
        interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": members})


@pytest.fixture
def device() -> str:
    pytest.importorskip("triton")
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture
def generator(device: str) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(0)
