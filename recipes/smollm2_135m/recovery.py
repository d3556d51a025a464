"""ARR of a draft's lookahead on one kind of text at one context, by the project's own stages and search."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from dustin_profile.pipeline import Pipeline
from dustin_profile.search.budget import Budget
from dustin_profile.search.evaluate import evaluate
from dustin_profile.search.phases import SearchOptions, search
from dustin_profile.settings import (
    DataSettings,
    HeadSettings,
    ModelSettings,
    SearchSettings,
    Settings,
    check_settings,
    choose_pair,
)
from dustin_profile.statistics import interval, split

DEPTH = 4


def recovery(
    folder: Path, models: ModelSettings, heads: HeadSettings, data: DataSettings, options: SearchSettings, name: str
) -> dict[str, Any]:
    """Trace and search: layers and m are chosen on one part of the documents, the figures are of the rest.

    Args:
        folder: of this draft; its heads are found once. Those of the target are taken from a sibling folder.
        options: budget, sink, window, number of draft layers, share of documents held out, seed.
        name: of the run within it, such as `books-4096`.

    Returns:
        Held-out ARR of every policy with its interval, the hybrid's gain over each, and what was chosen.
    """
    choice = choose_pair(models, DEPTH, options.budget)
    settings = Settings(folder / name, depth=DEPTH, models=models, heads=heads, data=data, search=options)
    check_settings(settings, choice)
    known, own = folder / "srh", settings.run_dir / "srh"
    if known.exists() and not own.exists():
        shutil.copytree(known, own)
    for other in sorted(folder.parent.glob("*/srh/target")):
        if not (own / "target").exists():
            shutil.copytree(other, own / "target")
    store, _ = Pipeline(settings, choice).traces()
    if not known.exists():
        shutil.copytree(own, known)

    entries = store.entries
    ids = [entry["id"] for entry in entries]
    held_out = split(ids, [entry["source"] for entry in entries], options.held_out)
    reported = store.subset(held_out or ids)
    limits = Budget(choice.budget, options.sink, options.window)
    found = search(store.subset(set(ids) - held_out), SearchOptions(limits, options.draft_layers))
    target_layer, draft_layers, m = found.target.layer, found.draft.layers, found.curve.m
    measured = evaluate(reported, target_layer=target_layer, draft_layers=draft_layers, m=m, budget=limits)
    hybrid = measured["hybrid"].arr
    return {
        "arr": {name: interval(by.arr.numpy(), options.seed, share=True)._asdict() for name, by in measured.items()},
        "hybrid_minus": {
            name: interval((hybrid - by.arr).numpy(), options.seed)._asdict()
            for name, by in measured.items()
            if name != "hybrid"
        },
        "chosen": {"target_layer": target_layer, "draft_layers": list(draft_layers), "m": m},
        "documents": len(reported),
    }
