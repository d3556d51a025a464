"""KL of `dustin-layers` by its settings, beside Dustin, SnapKV and the two oracles, paired by document.

python tools/study_lists.py CONFIG --pair smollm2 --data BOOKS --budget 256 --context 2112 --documents 6 -o lists.json

One setting at a time is varied around the defaults; `--cells` gives others, as a JSON list or a file of one, such as
'[{"share": 0.25, "per_step": 4}, {"method": "dustin-d"}]'. All cells of a document share one prefill. The file is
written after every document, and one that is there is continued.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dustin_profile.cli.given_texts import open_texts
from dustin_profile.data import Prompt
from dustin_profile.evaluation.fidelity import measure, prepare
from dustin_profile.evaluation.given_texts import GivenTexts, Models, split
from dustin_profile.evaluation.oracle import ORACLES, bound
from dustin_profile.progress import say
from dustin_profile.provenance import versions
from dustin_profile.report import table, with_interval
from dustin_profile.settings import ModelSettings
from dustin_profile.statistics import interval
from dustin_runtime.config import DustinConfig, Fusion, OwnLists, changed, load_config
from dustin_runtime.errors import DustinError
from dustin_runtime.files import write_json
from dustin_runtime.policies import Policy, make_policy
from dustin_runtime.policies.dustin_fused import DustinFused
from dustin_runtime.policies.dustin_layers import DustinLayers

LAYERS, FUSED, BASE = DustinLayers.name, DustinFused.name, "dustin"
BESIDE = (BASE, "dustin-d", "dustin-t", "snapkv-8", *ORACLES)
VARIED: dict[str, tuple[Any, ...]] = {
    "share": (0.25, 0.75),
    "queries": (1, 4, 16, 32),
    "per_step": (2, 4, "all"),
    "heads": ("kv_head",),
}
Cell = dict[str, Any]


@dataclass(frozen=True)
class Named:
    name: str
    policy: Policy


def default_cells() -> list[Cell]:
    """Dustin and bounds, the defaults, and each setting's other values."""
    return [
        *({"method": name} for name in BESIDE),
        {},
        *({field: value} for field, values in VARIED.items() for value in values),
    ]


def policies(cells: Sequence[Cell], budgets: Sequence[int], served: DustinConfig) -> list[Named]:
    """Every cell at every budget; what Dustin is compared with needs it, so it is always among them."""
    found: dict[str, Policy] = {}
    for budget in budgets:
        for cell in [{"method": BASE}, *cells]:
            fields = dict(cell)
            method = fields.pop("method", LAYERS)
            selection = changed(served.selection, budget, None)
            name = method
            if method == LAYERS:
                if fields.get("per_step") == "all":
                    fields["per_step"] = served.pair.target.layers
                own = OwnLists.model_validate(fields)
                selection = selection.model_copy(update={"own": own})
                name = f"{LAYERS} {own.share:g} q{own.queries} s{own.per_step} {own.heads}"
            if method == FUSED:
                if fields.get("per_step") == "all":
                    fields["per_step"] = served.pair.target.layers
                fusion = Fusion.model_validate(fields)
                selection = selection.model_copy(update={"fusion": fusion})
                weights = f"{fusion.own:g}/{fusion.lookahead:g}/{fusion.history:g}"
                name = f"{FUSED} {weights} q{fusion.queries} s{fusion.per_step} {fusion.heads} kept {fusion.kept:g}"
            policy = ORACLES[method](selection) if method in ORACLES else make_policy(method, selection)
            found[f"{name} k{budget}"] = policy
    return [Named(name, policy) for name, policy in found.items()]


def document(texts: GivenTexts, models: Models, prompt: Prompt, cells: Sequence[Named]) -> dict[str, Any]:
    """All cells on one document."""
    ids, text = split(prompt, texts.tokens)
    depth, vocab = texts.config.depth, texts.pair.shared_vocab
    window = max(cell.policy.prompt_queries for cell in cells)
    mass = any(cell.policy.prompt_mass for cell in cells)
    ready = prepare(*models, ids, text, vocab, depth, window, mass)
    entry: dict[str, Any] = {"id": prompt.id, "source": prompt.source, "prompt_tokens": len(ids), "cells": {}}
    for cell, policy in zip(cells, bound([cell.policy for cell in cells], ready, depth), strict=True):
        found = measure(ready, policy, depth, vocab)
        entry["cells"][cell.name] = {
            "kl": float(found.kl[1:].mean()),
            "agreement": float(found.agrees[1:].double().mean()),
            "read": found.read,
            "windows": [float(f"{float(part.mean()):.6g}") for part in found.kl[1:].split(depth + 1)],
        }
    return entry


def rows(documents: Sequence[dict[str, Any]], cells: Sequence[Named]) -> list[list[str]]:
    """A line for each cell, in the order given."""
    found = []
    for cell in cells:
        mine = [one["cells"][cell.name] for one in documents]
        base = [one["cells"][f"{BASE} k{_budget(cell)}"]["kl"] for one in documents]
        kl = [one["kl"] for one in mine]
        less = interval([x - y for x, y in zip(kl, base, strict=True)], seed=0)
        found.append(
            [
                cell.name,
                f"{sum(one['read'] for one in mine) / len(mine):.0f}",
                f"{sum(kl) / len(kl):.4f}",
                f"{median(value for one in mine for value in one['windows']):.4f}",
                with_interval(less._asdict()),
                f"{sum(one['agreement'] for one in mine) / len(mine):.3f}",
            ]
        )
    return found


def _budget(cell: Named) -> int:
    assert cell.policy.selection is not None
    return cell.policy.selection.budget


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="heads, sink, window and depth; its m in proportion")
    for name in ("pair", "target", "draft"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--data", default="topics")
    parser.add_argument("--context", type=int, default=2112, help="tokens of a document, its text included")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64, help="of a document's text")
    parser.add_argument("--budget", type=int, action="append", help="repeat for several; default 256")
    parser.add_argument("--cells", help="a JSON list or a file of one, instead of the default cells")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    given, cells = arguments.cells, default_cells()
    if given:
        cells = json.loads(given if given.lstrip().startswith("[") else Path(given).read_text(encoding="utf-8"))
    served = load_config(arguments.config)
    settings = {name: getattr(arguments, name) for name in ("pair", "target", "draft", "device", "dtype")}
    texts = open_texts(
        served,
        ModelSettings(**settings, offline=True),
        arguments.data,
        arguments.context,
        arguments.documents,
        arguments.tokens,
    )
    named = policies(cells, arguments.budget or [256], served)
    inputs = json.loads(json.dumps(texts.made_from(1) | {"cells": [cell.name for cell in named]}))
    documents: list[dict[str, Any]] = []
    if arguments.output and arguments.output.exists():
        held = json.loads(arguments.output.read_text(encoding="utf-8"))
        if held["inputs"] != inputs:
            parser.error(f"{arguments.output} was made from other inputs; give another file")
        documents = held["documents"]
    done = {one["id"] for one in documents}
    pending = [prompt for _, prompt in texts.usable() if prompt.id not in done]
    models = texts.load() if pending else None
    for prompt in pending:
        assert models is not None
        documents.append(document(texts, models, prompt, named))
        say(f"{prompt.id}: document {len(documents)}")
        if arguments.output:
            write_json(
                arguments.output,
                {"kind": "dustin-study-lists", "inputs": inputs, "versions": versions(), "documents": documents},
            )
    header = ["cell", "tokens read", "KL, nats", "median of windows", f"minus {BASE} (95 %)", "same choice"]
    print("\n".join(table(header, rows(documents, named))))


if __name__ == "__main__":
    try:
        main()
    except DustinError as error:
        raise SystemExit(f"error: {error}") from None
