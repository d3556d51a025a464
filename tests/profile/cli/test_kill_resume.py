"""A few kills; `tools/kill_resume.py` alone does twenty."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[3] / "tools" / "kill_resume.py"


def test_a_killed_search_ends_like_an_undisturbed_one() -> None:
    done = subprocess.run([sys.executable, TOOL, "--kills", "4"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in ("srh target", "srh draft", "traces", "search"):
        assert re.search(rf"^ \d +{stage} +{stage} ", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"traces/00011\.safetensors +equal", done.stdout)
    assert "DIFFERENT" not in done.stdout
    assert "Traceback" not in done.stderr
