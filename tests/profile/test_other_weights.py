"""A config that is used with weights that it was not searched with: said, on one line, and served."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import dustin_profile

from dustin_runtime.config import load_config
from dustin_runtime.errors import OtherWeightsWarning
from dustin_runtime.loading import open_configured

CONFIG = Path(__file__).parents[2] / "results" / "arr-smollm2.yaml"


def test_a_draft_of_the_same_shape_is_named() -> None:
    with pytest.warns(OtherWeightsWarning, match=r"^draft self:4 has other weights .*recipe:smollm2-135m-draft"):
        open_configured(load_config(CONFIG), None, "self:4", offline=True)


def test_the_pair_itself_is_not(recwarn: pytest.WarningsRecorder) -> None:
    open_configured(load_config(CONFIG), None, None, offline=True)
    assert not [one for one in recwarn if one.category is OtherWeightsWarning]


def test_a_command_says_so_and_goes_on(tmp_path: Path) -> None:
    options = ("--context", 300, "--documents", 1, "--tokens", 12, "--budget", 64, "--method", "streaming")
    found = dustin_profile(
        "eval", "fidelity", CONFIG, "--target", "smollm2", "--draft", "self:4", *options, "--run-dir", tmp_path, "-q"
    )
    assert found.code == 0
    warnings = [line for line in found.err.splitlines() if line.startswith("warning: draft self:4 has other weights")]
    assert len(warnings) == 1
