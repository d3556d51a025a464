"""Result files to report on, and pictures that are not drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from result_files import RESULTS

from dustin_profile.reporting import report
from dustin_profile.reporting.blocks import Figure
from dustin_profile.reporting.drawing import Drawn
from dustin_runtime.files import read_json


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are empty: to draw them takes longer than all the rest."""
    monkeypatch.setattr(report, "draw", lambda figure: _blank(figure))


def _blank(figure: Figure) -> Drawn:
    return Drawn(figure, "<svg></svg>", "<svg></svg>", b"\x89PNG")


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """A committed result with something in it changed."""

    def change(name: str, edit: Callable[[dict[str, Any]], object]) -> Path:
        document = read_json(RESULTS / name)
        edit(document)
        path = tmp_path / name
        path.write_text(json.dumps(document))
        return path

    return change
