"""What a guard and an adaptive budget buy: KL of Dustin with them, beside the plain method, paired by document.

python tools/study_guard.py CONFIG --pair smollm2 --data BOOKS --context 2304 --documents 6 -o guard.json

First every document is verified without a guard, with an estimate of each step's ARR. Of these come the thresholds
under which 2, 5 and 10 % of steps lie (`--share`), and the targets that a share of steps reaches with the smallest
budget (`--reach`). Then each is measured as it would serve: what follows a step in full depends on it. Beside a guard
stand as many steps in full by turn (`--full-every`), which know nothing, and the bound that knows every step's KL;
beside adaptive budgets the fixed ones. The file is written after every document of either pass, and one that is there
is continued.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dustin_profile.cli.given_texts import add_options, texts_of
from dustin_profile.data import Prompt
from dustin_profile.evaluation.fidelity import Fidelity, measure, prepare, recovered
from dustin_profile.evaluation.given_texts import GivenTexts, Models, split
from dustin_profile.progress import say
from dustin_profile.provenance import versions
from dustin_profile.report import table, with_interval
from dustin_profile.statistics import interval, percentile, spearman
from dustin_runtime.config import AdaptiveBudget, DustinConfig, changed, load_config
from dustin_runtime.errors import DustinError
from dustin_runtime.files import write_json
from dustin_runtime.guard import NEVER
from dustin_runtime.policies import Policy, guarded, make_policy


@dataclass(frozen=True)
class Named:
    name: str
    policy: Policy


def plain(served: DustinConfig, method: str, budgets: Sequence[int]) -> list[Named]:
    """The method at every budget, with estimates."""
    found = []
    for budget in budgets:
        policy = make_policy(method, changed(served.selection, budget, None))
        found.append(Named(f"{method} k{budget}", guarded(policy, served, threshold=NEVER)))
    return found


def ruled(
    served: DustinConfig,
    method: str,
    budget: int,
    sizes: Sequence[int],
    estimates: Sequence[float],
    largest: Sequence[float],
    shares: Sequence[float],
    reached: Sequence[float],
) -> list[Named]:
    """Guards under which so many steps lie, as many in full by turn, and targets that so many steps of a size reach.

    Args:
        estimates: of all steps at `budget`; largest: of all steps at the smallest of `sizes`.
    """
    policy, found = make_policy(method, changed(served.selection, budget, None)), []
    ordered = torch.tensor(estimates, dtype=torch.float64)
    for share in shares:
        threshold = float(f"{float(ordered.quantile(share)):.6g}")
        found.append(Named(f"{method} k{budget} guard {share:g}", guarded(policy, served, threshold=threshold)))
        turns = max(round(1 / share), 1)
        found.append(Named(f"{method} k{budget} every {turns}", guarded(policy, served, every=turns)))
    adaptive = served.model_copy(update={"adaptive_budget": AdaptiveBudget(target_arr=1, sizes=tuple(sizes))})
    small = torch.tensor(largest, dtype=torch.float64)
    for share in reached:
        target = float(f"{float(small.quantile(1 - share)):.6g}")
        found.append(Named(f"{method} adaptive {share:g}", guarded(policy, adaptive, target_arr=target)))
    return found


def one_document(
    texts: GivenTexts, models: Models, prompt: Prompt, cells: Sequence[Named]
) -> dict[str, dict[str, Any]]:
    """All cells on one document."""
    ids, text = split(prompt, texts.tokens)
    depth, vocab = texts.config.depth, texts.pair.shared_vocab
    window = max(cell.policy.prompt_queries for cell in cells)
    ready = prepare(*models, ids, text, vocab, depth, window)
    found = [measure(ready, cell.policy, depth, vocab) for cell in cells]
    arrs = recovered(ready, found, depth)
    return {
        cell.name: figures(one, depth) | {"arr": short(arr)} for cell, one, arr in zip(cells, found, arrs, strict=True)
    }


def short(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def figures(found: Fidelity, depth: int) -> dict[str, Any]:
    steps = torch.stack([part.mean() for part in found.kl[1:].split(depth + 1)])
    return {
        "read": found.read,
        "agreement": float(found.agrees[1:].double().mean()),
        "tokens": short(found.kl[1:]),
        "kl": short(steps),
        **({} if found.estimate is None else {"estimate": short(found.estimate)}),
        **({} if found.full is None else {"full": found.full.int().tolist()}),
    }


def rows(documents: Sequence[dict[str, Any]], names: Sequence[str], base: str) -> list[list[str]]:
    """A line for each cell, in the order given."""
    found = []
    for name in names:
        mine = [one["cells"][name] for one in documents]
        kl, less = by_document(mine), by_document([one["cells"][base] for one in documents])
        minus = interval([x - y for x, y in zip(kl, less, strict=True)], seed=0)
        full = [flag for one in mine for flag in one.get("full", [0])]
        steps, tokens = ([value for one in mine for value in one[which]] for which in ("kl", "tokens"))
        found.append(
            [
                name,
                f"{sum(full) / len(full):.1%}",
                f"{sum(one['read'] for one in mine) / len(mine):.0f}",
                f"{sum(kl) / len(kl):.4f}",
                f"{percentile(steps):.3f}",
                f"{percentile(tokens):.3f}",
                with_interval(minus._asdict()),
                f"{sum(one['agreement'] for one in mine) / len(mine):.3f}",
            ]
        )
    return found


def by_document(cells: Sequence[dict[str, Any]]) -> list[float]:
    return [sum(cell["tokens"]) / len(cell["tokens"]) for cell in cells]


def bounds(documents: Sequence[dict[str, Any]], base: str, shares: Sequence[float]) -> list[list[str]]:
    """KL that is left if the steps of most KL, or of the lowest estimates, had none: no new run, so that what follows
    a step does not know of it."""
    steps = [
        pair for one in documents for pair in zip(one["cells"][base]["kl"], one["cells"][base]["estimate"], strict=True)
    ]
    found = []
    for share in shares:
        count = round(share * len(steps))
        row = [f"{share:g}"]
        orders: list[Callable[[tuple[float, float]], float]] = [lambda step: -step[0], lambda step: step[1]]
        for order in orders:
            left = [kl for kl, _ in sorted(steps, key=order)[count:]] + [0.0] * count
            row += [f"{sum(left) / len(left):.4f}", f"{percentile(left):.3f}"]
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="with guard: emitted by dustin-profile search")
    add_options(parser, context=2304, tokens=256)
    parser.add_argument("--method", default="dustin")
    parser.add_argument("--budget", type=int, help="of guards; default: the config's")
    parser.add_argument("--size", type=int, action="append", help="of adaptive budgets, and fixed; repeat")
    parser.add_argument("--share", type=float, action="append", help="of steps in full; repeat; default .02 .05 .1")
    parser.add_argument("--reach", type=float, action="append", help="of steps the smallest suffices for; repeat")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    served = load_config(arguments.config)
    if served.guard is None:
        parser.error(f"{arguments.config} has no guard: emit it anew with dustin-profile search")
    budget = arguments.budget or served.selection.budget
    sizes = sorted(set(arguments.size or [128, 256, 512, 1024]))
    shares, reached = arguments.share or [0.02, 0.05, 0.1], arguments.reach or [0.75, 0.5, 0.25]
    texts = texts_of(arguments, served)
    asked = {"method": arguments.method, "budget": budget, "sizes": sizes, "shares": shares, "reach": reached}
    inputs = json.loads(json.dumps(texts.made_from(1) | asked | {"guard": served.guard.model_dump(mode="json")}))
    documents: dict[str, dict[str, Any]] = {}
    if arguments.output and arguments.output.exists():
        held = json.loads(arguments.output.read_text(encoding="utf-8"))
        if held["inputs"] != inputs:
            parser.error(f"{arguments.output} was made from other inputs; give another file")
        documents = {one["id"]: one for one in held["documents"]}
    loaded: list[Models] = []

    def measured(cells: Sequence[Named], title: str) -> None:
        for _, prompt in texts.usable():
            entry = documents.setdefault(prompt.id, {"id": prompt.id, "source": prompt.source, "cells": {}})
            if pending := [cell for cell in cells if cell.name not in entry["cells"]]:
                loaded[:] = loaded or [texts.load()]
                entry["cells"] |= one_document(texts, loaded[0], prompt, pending)
                say(f"{prompt.id}: {title}")
                if arguments.output:
                    found = {"kind": "dustin-study-guard", "inputs": inputs, "versions": versions()}
                    write_json(arguments.output, found | {"documents": list(documents.values())})

    fixed = plain(served, arguments.method, sorted({budget, *sizes}))
    measured(fixed, "plain")
    order = [documents[prompt.id] for _, prompt in texts.usable()]
    base, smallest = f"{arguments.method} k{budget}", f"{arguments.method} k{sizes[0]}"
    estimates, low = ([value for one in order for value in one["cells"][name]["estimate"]] for name in (base, smallest))
    others = ruled(served, arguments.method, budget, sizes, estimates, low, shares, reached)
    measured(others, "guarded and adaptive")
    header = [
        "cell",
        "full",
        "tokens read",
        "KL, nats",
        "99th % of steps",
        "of tokens",
        "minus plain (95 %)",
        "same choice",
    ]
    print("\n".join(table(header, rows(order, [cell.name for cell in (*fixed, *others)], base))))
    steps = {
        which: [value for one in order for value in one["cells"][base][which]] for which in ("estimate", "arr", "kl")
    }
    print(f"\nRank correlations over {len(steps['kl'])} steps at k = {budget}:")
    for one, other in (("estimate", "arr"), ("arr", "kl"), ("estimate", "kl")):
        print(f"{one} and {other}: {spearman(list(zip(steps[one], steps[other], strict=True)))}")
    print()
    header = ["steps taken out", "by KL: mean", "99th %", "by estimate: mean", "99th %"]
    print("\n".join(table(header, bounds(order, base, shares))))


if __name__ == "__main__":
    try:
        main()
    except DustinError as error:
        raise SystemExit(f"error: {error}") from None
