"""KL of dustin-merged by weight and exponent, beside fixed m and the best fixed m of each document, paired by document.

python tools/study_splits.py CONFIG --pair smollm2 --data topics --data BOOKS --budget 128 --budget 256 -o splits.json

Cells: Dustin at the configured m and at nine m from 0 to all that is free, and dustin-merged. `--cells` gives others of
the latter, as a JSON list or a file of one, of fields of `selection.split`, such as '[{"weight": 0.75}]'. With a run
directory `--run` one more has the weight that is fitted on the documents that its search chose on, and ARR is given on
the others. A cell's share of the gap is how much of what the best fixed m of each document (in hindsight, of the nine
and the configured one) saves it saves too. All cells of a document share one prefill. The file is written after every
document, and one that is there is continued.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from pydantic import TypeAdapter

from dustin_profile.cli.given_texts import json_list, open_texts
from dustin_profile.data import Prompt
from dustin_profile.evaluation.arr.sources import Sources, searched_documents
from dustin_profile.evaluation.fidelity import measure, prepare
from dustin_profile.evaluation.given_texts import GivenTexts, Models, split
from dustin_profile.progress import say
from dustin_profile.provenance import versions
from dustin_profile.report import table, with_interval
from dustin_profile.search.split_fit import arr_of, fit_split
from dustin_profile.settings import ModelSettings
from dustin_profile.statistics import interval
from dustin_runtime.config import DustinConfig, Selection, Split, changed, load_config
from dustin_runtime.errors import DustinError
from dustin_runtime.files import write_json
from dustin_runtime.policies.dustin import Dustin
from dustin_runtime.policies.dustin_merged import DustinMerged

BASE, MERGED = Dustin.name, DustinMerged.name
EIGHTHS = range(9)
"""Fixed m, of all that is free."""
DEFAULT_CELLS: tuple[dict[str, Any], ...] = tuple(
    {"weight": weight, "exponent": exponent} for exponent in (0.5, 1) for weight in (0.25, 0.5, 0.75)
)


@dataclass(frozen=True)
class Cell:
    """A policy at a budget. `fixed`: its m does not follow the text; oracles choose among those."""

    name: str
    policy: Dustin
    fixed: bool


def cells_at(selection: Selection, cells: Sequence[dict[str, Any]], fitted: Split | None) -> list[Cell]:
    """All cells at one budget, the configured m first, what was fitted last."""
    free = selection.budget - selection.sink - selection.window
    found = [_cell(BASE, Dustin(selection))]
    found += [_cell(f"{BASE} m {eighth}/8", Dustin(changed(selection, None, free * eighth // 8))) for eighth in EIGHTHS]
    splits = {" ".join(f"{name} {value}" for name, value in one.items()): Split.model_validate(one) for one in cells}
    for name, split_by in (splits | ({"fitted": fitted} if fitted else {})).items():
        merged = DustinMerged(selection.model_copy(update={"split": split_by}))
        found.append(_cell(f"{MERGED} {name}".rstrip(), merged))
    return found


def _cell(name: str, policy: Dustin) -> Cell:
    assert policy.selection is not None
    return Cell(f"{name} k{policy.selection.budget}", policy, policy.name == BASE)


def document(texts: GivenTexts, models: Models, prompt: Prompt, kind: str, cells: Sequence[Cell]) -> dict[str, Any]:
    """All cells on one document."""
    ids, text = split(prompt, texts.tokens)
    depth, vocab = texts.config.depth, texts.pair.shared_vocab
    ready = prepare(*models, ids, text, vocab, depth, 1)
    entry: dict[str, Any] = {"id": prompt.id, "kind": kind, "prompt_tokens": len(ids), "cells": {}}
    for cell in cells:
        found = measure(ready, cell.policy, depth, vocab)
        entry["cells"][cell.name] = {
            "kl": float(found.kl[1:].mean()),
            "agreement": float(found.agrees[1:].double().mean()),
            "read": found.read,
            "windows": [float(f"{float(part.mean()):.6g}") for part in found.kl[1:].split(depth + 1)],
        }
    return entry


def oracles(documents: Sequence[dict[str, Any]], cells: Sequence[Cell]) -> tuple[list[float], list[float]]:
    """KL by document of the best fixed m of that document, and of the best one of its kind."""
    fixed = [cell.name for cell in cells if cell.fixed]
    by_document = [min(one["cells"][name]["kl"] for name in fixed) for one in documents]
    best = {}
    for kind in {one["kind"] for one in documents}:
        mine = [one for one in documents if one["kind"] == kind]
        best[kind] = min(fixed, key=lambda name: mean(one["cells"][name]["kl"] for one in mine))
    return by_document, [one["cells"][best[one["kind"]]]["kl"] for one in documents]


HEADER = ["cell", "KL, nats", "median of windows", f"minus {BASE} (95 %)", "share of gap", "same choice"]


def rows(documents: Sequence[dict[str, Any]], cells: Sequence[Cell]) -> list[list[str]]:
    """A line for each cell of one budget, in the order given, and for each oracle."""
    by_document, by_kind = oracles(documents, cells)
    base = [one["cells"][cells[0].name]["kl"] for one in documents]
    gap = mean(base) - mean(by_document)

    def line(name: str, kl: Sequence[float], of: Sequence[dict[str, Any]] | None) -> list[str]:
        less = interval([x - y for x, y in zip(kl, base, strict=True)], seed=0)
        return [
            name,
            f"{mean(kl):.4f}",
            f"{median(value for one in of for value in one['windows']):.4f}" if of else "",
            with_interval(less._asdict(), sign=True),
            f"{(mean(base) - mean(kl)) / gap:+.2f}" if gap > 0 else "",
            f"{mean(one['agreement'] for one in of):.3f}" if of else "",
        ]

    found = []
    for cell in cells:
        mine = [one["cells"][cell.name] for one in documents]
        found.append(line(cell.name, [one["kl"] for one in mine], mine))
    return [*found, line("best m of each kind", by_kind, None), line("best m of each document", by_document, None)]


def learned(run: Path, served: DustinConfig, budgets: Sequence[int]) -> dict[int, Split]:
    """Fitted on the documents that a run's search chose on; on all of them where it held none out."""
    searched = searched_documents(run)
    store = Sources([run / "traces"], served, "all", None).stores[0]
    chosen = [entry["id"] for entry in store.entries if searched is None or entry["sha256"] in searched]
    seen = store.subset(chosen or [entry["id"] for entry in store.entries])
    say(f"fitting on {len(seen)} traced documents")
    return {budget: fit_split(seen, changed(served.selection, budget, None)) for budget in budgets}


def arr_rows(run: Path, served: DustinConfig, cells: Sequence[Cell]) -> list[list[str]]:
    """ARR on the traced documents that nothing was chosen on, at one budget."""
    searched = searched_documents(run)
    sources = Sources([run / "traces"], served, "held-out" if searched else "all", searched)
    values: dict[str, list[float]] = {cell.name: [] for cell in cells}
    for _, windows in sources.windows():
        for cell in cells:
            values[cell.name].append(float(arr_of(windows, cell.policy).mean()))
    base = values[cells[0].name]
    best = [max(values[cell.name][i] for cell in cells if cell.fixed) for i in range(len(base))]
    found = []
    for name, mine in [*values.items(), ("best m of each document", best)]:
        more = interval([x - y for x, y in zip(mine, base, strict=True)], seed=0)
        found.append([name, f"{mean(mine):.4f}", with_interval(more._asdict(), sign=True)])
    return found


def show(title: str, header: list[str], lines: list[list[str]]) -> None:
    print("\n".join(["", title, "", *table(header, lines)]))


def read_cells(given: str) -> list[dict[str, Any]]:
    """Of `--cells`. Raises UsageError: it is not such a list."""
    return [one.model_dump(exclude_unset=True) for one in json_list("--cells", given, TypeAdapter(list[Split]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="heads, sink, window and depth; its m in proportion")
    for name in ("pair", "target", "draft"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--data", action="append", help="repeat for several kinds; default: topics")
    parser.add_argument("--kind", action="append", help="name of each --data; default: each document's source")
    parser.add_argument("--context", type=int, default=2112, help="tokens of a document, its text included")
    parser.add_argument("--documents", type=int, default=6, help="of each --data")
    parser.add_argument("--tokens", type=int, default=64, help="of a document's text")
    parser.add_argument("--budget", type=int, action="append", help="repeat for several; default 256")
    parser.add_argument("--run", type=Path, help="run directory with the traces to fit on and to give ARR of")
    parser.add_argument("--cells", help="a JSON list or a file of one, instead of the default cells")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    data: list[str] = arguments.data or ["topics"]
    if arguments.kind and len(arguments.kind) != len(data):
        parser.error(f"--kind: {len(arguments.kind)} are given for {len(data)} --data; give one for each")
    kinds: list[str | None] = arguments.kind or [None] * len(data)
    served = load_config(arguments.config)
    budgets = arguments.budget or [256]
    given, cells = arguments.cells, list(DEFAULT_CELLS)
    if given:
        cells = read_cells(given)
    splits = learned(arguments.run, served, budgets) if arguments.run else {}
    named = {budget: cells_at(changed(served.selection, budget, None), cells, splits.get(budget)) for budget in budgets}
    if arguments.run:
        for budget in budgets:
            print(f"k {budget}, fitted: {splits[budget].model_dump_json()}")
            header = ["cell", "ARR", f"minus {BASE} (95 %)"]
            show(f"ARR, k = {budget}", header, arr_rows(arguments.run, served, named[budget]))

    settings = {name: getattr(arguments, name) for name in ("pair", "target", "draft", "device", "dtype")}
    models = ModelSettings(**settings, offline=True)
    sizes = (arguments.context, arguments.documents, arguments.tokens)
    opened = [open_texts(served, models, one, *sizes) for one in data]
    every = [cell for budget in budgets for cell in named[budget]]
    inputs = {
        "texts": [texts.made_from(1) for texts in opened],
        "kinds": kinds,
        "cells": {cell.name: cell.policy.selection and cell.policy.selection.model_dump(mode="json") for cell in every},
    }
    inputs = json.loads(json.dumps(inputs))
    documents = measured(arguments.output, inputs, opened, kinds, every, parser.error)
    for budget in budgets:
        mine = named[budget]
        show(f"KL, k = {budget}, {len(documents)} documents", HEADER, rows(documents, mine))
        names = list(dict.fromkeys(one["kind"] for one in documents))
        for kind in names if len(names) > 1 else []:
            of_kind = [one for one in documents if one["kind"] == kind]
            show(f"KL, k = {budget}, {kind}, {len(of_kind)} documents", HEADER, rows(of_kind, mine))


def measured(
    output: Path | None,
    inputs: dict[str, Any],
    opened: Sequence[GivenTexts],
    kinds: Sequence[str | None],
    cells: Sequence[Cell],
    refuse: Callable[[str], Any],
) -> list[dict[str, Any]]:
    """Every document's result, those that the file has as they are."""
    documents: list[dict[str, Any]] = []
    if output and output.exists():
        held = json.loads(output.read_text(encoding="utf-8"))
        if held["inputs"] != inputs:
            refuse(f"{output} was made from other inputs; give another file")
        documents = held["documents"]
    done = {(one["data"], one["id"]) for one in documents}
    models: Models | None = None
    for place, texts in enumerate(opened):
        for _, prompt in texts.usable():
            if (place, prompt.id) in done:
                continue
            models = models or texts.load()
            kind = kinds[place] or prompt.source
            documents.append({"data": place} | document(texts, models, prompt, kind, cells))
            say(f"{prompt.id}: document {len(documents)}")
            if output:
                result = {"kind": "dustin-study-splits", "inputs": inputs, "versions": versions()}
                write_json(output, result | {"documents": documents})
    return documents


if __name__ == "__main__":
    try:
        main()
    except DustinError as error:
        raise SystemExit(f"error: {error}") from None
