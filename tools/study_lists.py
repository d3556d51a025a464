"""KL of methods, budgets and selections beside Dustin's and the two oracles', paired by document.

python tools/study_lists.py CONFIG --pair smollm2 --data BOOKS --budget 256 --context 2112 --documents 6 -o lists.json

`--cells` gives what is compared, as a JSON list or a file of one, such as '[{"method": "specattn-all"}, {"method":
"dustin-merged", "budget": 512, "selection": {"split": {"weight": 0.67}}}]': a method or an oracle, its budget if not
every `--budget`, and fields of the selection that are changed. All cells of a document share one prefill. The file is
written after every document, and one that is there is continued.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from dustin_profile.cli.given_texts import add_options, json_list, texts_of
from dustin_profile.data import Prompt
from dustin_profile.evaluation.fidelity import measure, prepare
from dustin_profile.evaluation.given_texts import GivenTexts, Models, split
from dustin_profile.evaluation.oracle import ORACLES, bound
from dustin_profile.progress import say
from dustin_profile.provenance import versions
from dustin_profile.report import table, with_interval
from dustin_profile.statistics import interval
from dustin_runtime.config import DustinConfig, Selection, changed, load_config
from dustin_runtime.errors import DustinError, UsageError
from dustin_runtime.files import write_json
from dustin_runtime.policies import Policy, make_policy
from dustin_runtime.validation import one_line

BASE = "dustin"
DEFAULT_METHODS = (BASE, "dustin-d", "dustin-t", "snapkv-8", *ORACLES)


class Cell(BaseModel):
    """What is compared; `selection` has the fields that differ from the configuration's."""

    model_config = ConfigDict(extra="forbid")
    method: str
    budget: int | None = Field(default=None, ge=1)
    selection: dict[str, Any] = {}


@dataclass(frozen=True)
class Named:
    name: str
    budget: int
    policy: Policy


def read_cells(given: str | None) -> list[Cell]:
    """Of `--cells`. Raises UsageError: it is not such a list."""
    if given is None:
        return [Cell(method=name) for name in DEFAULT_METHODS]
    return json_list("--cells", given, TypeAdapter(Annotated[list[Cell], Field(min_length=1)]))


def policies(cells: Sequence[Cell], budgets: Sequence[int], served: DustinConfig) -> list[Named]:
    """Every cell at its budgets, behind Dustin at each of them, which the others are compared with."""
    found = [
        _named(cell, changed(served.selection, budget, None))
        for cell in cells
        for budget in ([cell.budget] if cell.budget else budgets)
    ]
    compared = dict.fromkeys(one.budget for one in found)
    bases = [_named(Cell(method=BASE), changed(served.selection, budget, None)) for budget in compared]
    return list({one.name: one for one in (*bases, *found)}.values())


def _named(cell: Cell, selection: Selection) -> Named:
    name = " ".join([cell.method, *(f"{field} {json.dumps(value)}" for field, value in cell.selection.items())])
    try:
        selection = Selection.model_validate(selection.model_dump() | cell.selection)
    except ValidationError as error:
        raise UsageError(f"--cells: {name}: {one_line(error)}") from None
    make = ORACLES.get(cell.method)
    policy = make(selection) if make else make_policy(cell.method, selection, "--cells")
    return Named(f"{name} k{selection.budget}", selection.budget, policy)


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
            "places": [] if len(found.kl) <= depth + 1 else places(found.kl[1:], depth),
            "windows": [float(f"{float(part.mean()):.6g}") for part in found.kl[1:].split(depth + 1)],
        }
    return entry


def places(kl: Tensor, depth: int) -> list[float]:
    """Mean KL by place in a step, of texts that fill one."""
    return [float(f"{float(kl[place :: depth + 1].mean()):.6g}") for place in range(depth + 1)]


def rows(documents: Sequence[dict[str, Any]], cells: Sequence[Named]) -> list[list[str]]:
    """A line for each cell, in the order given."""
    found = []
    for cell in cells:
        mine = [one["cells"][cell.name] for one in documents]
        base = [one["cells"][f"{BASE} k{cell.budget}"]["kl"] for one in documents]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="heads, sink, window and depth; its m in proportion")
    add_options(parser, context=2112, tokens=64)
    parser.add_argument("--budget", type=int, action="append", help="repeat for several; default 256")
    parser.add_argument("--cells", help=f"a JSON list or a file of one; default: {', '.join(DEFAULT_METHODS)}")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    cells, served = read_cells(arguments.cells), load_config(arguments.config)
    texts = texts_of(arguments, served)
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
