"""Kernels run where they are at home if there is a GPU, else in Triton's interpreter on small cases."""

from __future__ import annotations

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported


@pytest.fixture
def device() -> str:
    pytest.importorskip("triton")
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture
def generator(device: str) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(0)
