"""ARR of a draft's lookahead on one kind of text at one context: the project's own search, one run directory each."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from dustin_profile.pipeline import Pipeline
from dustin_profile.settings import (
    DataSettings,
    HeadSettings,
    ModelSettings,
    SearchSettings,
    Settings,
    check_settings,
    choose_pair,
)

DEPTH = 4


def recovery(
    folder: Path, models: ModelSettings, heads: HeadSettings, data: DataSettings, search: SearchSettings, name: str
) -> dict[str, Any]:
    """Run the search of a pair, heads found once per draft (and those of the target once in all).

    Args:
        folder: of this draft; its sibling folders may hold the target's heads already.
        name: of the run within it, such as `books-4096`.

    Returns:
        Held-out ARR of every policy with its interval, and the hybrid's gain over each.
    """
    choice = choose_pair(models, DEPTH, search.budget)
    settings = Settings(folder / name, depth=DEPTH, models=models, heads=heads, data=data, search=search)
    check_settings(settings, choice)
    found_before = folder / "srh"
    run_heads = settings.run_dir / "srh"
    if found_before.exists() and not run_heads.exists():
        shutil.copytree(found_before, run_heads)
    for other in sorted(folder.parent.glob("*/srh/target")):
        if not (run_heads / "target").exists():
            shutil.copytree(other, run_heads / "target")
    results = Pipeline(settings, choice).search().results
    if not found_before.exists():
        shutil.copytree(run_heads, found_before)
    return {
        "arr": {policy: entry["arr"] for policy, entry in results["policies"].items()},
        "hybrid_minus": results["hybrid_minus"],
        "m": results["m"]["chosen"],
        "split": results["split"],
        "documents": len(results["documents"]["reported"]),
    }
