"""Fidelity over documents: one prefill each, every policy at every budget, one file per document."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from dustin_profile.data import Prompt
from dustin_profile.evaluation.fidelity import Fidelity, measure, prepare, recovered
from dustin_profile.evaluation.given_texts import GivenTexts, Models, per_document, split
from dustin_profile.evaluation.oracle import ORACLES, bound
from dustin_profile.plots import fidelity_curves, kl_by_position
from dustin_profile.progress import say
from dustin_profile.provenance import versions
from dustin_profile.report import table, with_interval
from dustin_profile.rundir import open_stage
from dustin_profile.statistics import interval, percentile, spearman
from dustin_runtime.config import DustinConfig, changed
from dustin_runtime.errors import UsageError
from dustin_runtime.files import write_json, write_text
from dustin_runtime.misfits import warn_of_config
from dustin_runtime.policies import POLICIES, Asked, Policy, guarded, judged, make_policy

VERSION = 2
BINS = 8
"""Parts of a text."""
FULL, CORRELATION = "full", "arr_kl_rank_correlation"
SERVED = "full-served"
"""Full verification with the cache that policies read, where that has another dtype."""


@dataclass(frozen=True)
class Cell:
    """A policy at a budget; full verification has none."""

    policy: Policy
    budget: int | None

    @property
    def rule(self) -> str:
        """What the guard of its policy does, or several budgets; empty without them."""
        return self.policy.rule.label if judged(self.policy) and self.policy.rule else ""

    @property
    def name(self) -> str:
        rule = f"-{self.rule}" if self.rule else ""
        return SERVED if self.budget is None else f"{self.policy.name}{rule}-k{self.budget}"


def cells(
    methods: Sequence[str] | None, budgets: Sequence[int], config: DustinConfig, rules: Sequence[Asked] = ()
) -> list[Cell]:
    """Every sparse method at every budget, in the order given. m keeps its share of another budget.

    Args:
        methods: None for all that the configuration can serve.
        rules: guards, and several budgets, with which each of Dustin's methods is measured beside itself.

    Raises:
        UsageError: a method is unknown or reads everything, or a budget leaves no room.
    """
    found: list[Cell] = []
    if methods is None:
        methods = [name for name in sparse_methods() if name in ORACLES or not POLICIES[name].lacking(config.selection)]
        if left_out := [name for name in sparse_methods() if name not in methods]:
            say(f"left out, since the config does not say what they need: {', '.join(left_out)}")
    for name in dict.fromkeys(methods):
        if name not in sparse_methods():
            why = "verifies in full, which is what the others are compared with" if name in POLICIES else "unknown"
            raise UsageError(f"--method {name}: {why}; give one of {', '.join(sparse_methods())}")
        selections = {budget: changed(config.selection, budget, None) for budget in budgets}
        for budget, selection in selections.items():
            policy = ORACLES[name](selection) if name in ORACLES else make_policy(name, selection)
            found.append(Cell(policy, budget))
        for asked in rules:
            found += _ruled([cell for cell in found if cell.policy.name == name and not cell.rule], config, asked)
    if rules and not any(cell.rule for cell in found):
        guarded(found[0].policy, config, **rules[0]._asdict())  # says which methods can
    return found


def _ruled(plain: Sequence[Cell], config: DustinConfig, asked: Asked) -> list[Cell]:
    """The cells of one method with a rule; once, where that brings budgets of its own."""
    found: dict[str, Cell] = {}
    for cell in plain:
        if judged(cell.policy):
            policy = guarded(cell.policy, config, **asked._asdict())
            assert policy.selection is not None and cell.policy.selection is not None
            warn_of_config(policy, config, cell.policy.selection, depth=config.depth, windowed=False)
            one = Cell(policy, policy.selection.budget)
            found.setdefault(one.name, one)
    return list(found.values())


def full_served() -> Cell:
    """What another dtype of the cache alone does."""
    return Cell(make_policy("sd", None), None)


def sparse_methods() -> list[str]:
    """Names of the methods that do not read everything, and of their bounds."""
    return [*ORACLES, *(name for name, policy in POLICIES.items() if policy.needs_selection)]


def run(folder: Path, texts: GivenTexts, wanted: Sequence[Cell], overwrite: bool = False) -> dict[str, Any]:
    """Measure every document that is not measured yet; write `results.json`, `results.md`, `results.png`, and for
    longer texts `position.png`.

    Args:
        folder: of this evaluation.

    Returns:
        The document of `results.json`.

    Raises: as `per_document`.
    """
    names, made_from = [cell.name for cell in wanted], _made_from(texts, wanted)
    found = per_document(
        folder,
        texts,
        made_from,
        overwrite,
        "fidelity",
        len(wanted),
        lambda models, prompt, advance: _document(texts, models, prompt, wanted, advance),
        lambda entry: {"id", FULL, "cells", "text_tokens"} <= entry.keys() and set(names) <= entry["cells"].keys(),
    )
    summary = summarise(found, names)
    result = {
        "kind": "dustin-fidelity",
        "inputs": made_from,
        "versions": versions(),
        "summary": summary,
        "documents": found,
    }
    write_json(folder / "results.json", result)
    write_text(folder / "results.md", markdown(result))
    fidelity_curves(folder / "results.png", curves(summary))
    if positions := by_position(found, names):
        kl_by_position(folder / "position.png", positions)
    return result


def reserve(folder: Path, texts: GivenTexts, wanted: Sequence[Cell], overwrite: bool) -> None:
    """What `run` does first, for a caller with long work before it.

    Raises:
        ConflictError: the folder holds what was made from other inputs; names the field.
    """
    open_stage(folder, _made_from(texts, wanted), overwrite, of_config=False)


def _made_from(texts: GivenTexts, wanted: Sequence[Cell]) -> dict[str, Any]:
    return texts.made_from(VERSION) | {"cells": [cell.name for cell in wanted]}


def _document(
    texts: GivenTexts, models: Models, prompt: Prompt, wanted: Sequence[Cell], advance: Callable[[float], None]
) -> dict[str, Any]:
    ids, text = split(prompt, texts.tokens)
    depth, vocab = texts.config.depth, texts.pair.shared_vocab
    window = max((cell.policy.prompt_queries for cell in wanted), default=1)
    mass = any(cell.policy.prompt_mass for cell in wanted)
    ready = prepare(*models, ids, text, vocab, depth, window, mass, texts.kv_dtype)
    entry: dict[str, Any] = {
        "id": prompt.id,
        "source": prompt.source,
        "prompt_tokens": len(ids),
        "text_tokens": len(text),
        FULL: {"loss": float(ready.loss.mean()), "read": len(ids) + (len(text) - 1) / 2},
        "cells": {},
    }
    found = []
    for policy in bound([cell.policy for cell in wanted], ready, depth):
        found.append(measure(ready, policy, depth, vocab, texts.temperature))
        advance(1)
    shares = recovered(ready, found, depth) if found else ()
    for cell, one, arr in zip(wanted, found, shares, strict=True):
        windows = {"kl": [float(part.mean()) for part in one.kl[1:].split(depth + 1)], "arr": arr.tolist()}
        entry["cells"][cell.name] = _figures(one) | {
            "arr": float(arr.mean()),
            "windows": {name: [float(f"{value:.6g}") for value in values] for name, values in windows.items()},
            "tokens_kl": [float(f"{value:.6g}") for value in one.kl[1:].tolist()],
        }
        if one.full is not None:
            entry["cells"][cell.name]["full_share"] = float(one.full.double().mean())
    return entry


def _figures(found: Fidelity) -> dict[str, float]:
    """Means over the tokens that the policy verified: the first comes from the prefill."""
    behind = slice(1, None) if len(found.kl) > 1 else slice(None)
    return {
        "kl": float(found.kl[behind].mean()),
        "agreement": float(found.agrees[behind].double().mean()),
        "loss": float(found.loss.mean()),
        "total_variation": float(found.apart[behind].mean()),
        "read": found.read,
    }


def summarise(documents: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Per cell the mean over documents with its interval; the loss as difference from full verification's, paired.

    Medians are over the windows of all documents: a few windows can hold most of a mean KL.
    """
    full = [document[FULL]["loss"] for document in documents]
    summary: dict[str, Any] = {FULL: {"perplexity": math.exp(sum(full) / len(full))}}
    for name in names:
        rows = [document["cells"][name] for document in documents]
        gain = [row["loss"] - loss for row, loss in zip(rows, full, strict=True)]
        kl = interval([row["kl"] for row in rows], seed=0)
        windows = {figure: [value for row in rows for value in row["windows"][figure]] for figure in ("kl", "arr")}
        summary[name] = {
            "kl": kl._replace(low=None if kl.low is None else max(kl.low, 0.0))._asdict(),  # it is never negative
            "arr": interval([row["arr"] for row in rows], seed=0, share=True)._asdict(),
            "agreement": interval([row["agreement"] for row in rows], seed=0, share=True)._asdict(),
            "loss_difference": interval(gain, seed=0)._asdict(),
            "perplexity": math.exp(sum(row["loss"] for row in rows) / len(rows)),
            "read": sum(row["read"] for row in rows) / len(rows),
            "kl_median": median(windows["kl"]),
            "arr_median": median(windows["arr"]),
            "windows": len(windows["kl"]),
            "kl_p99": percentile(windows["kl"]),
        }
        if all("tokens_kl" in row for row in rows):  # documents measured before have none
            summary[name]["tokens_kl_p99"] = percentile([value for row in rows for value in row["tokens_kl"]])
        if all("total_variation" in row for row in rows):
            apart = interval([row["total_variation"] for row in rows], seed=0, share=True)
            summary[name]["total_variation"] = apart._asdict()
        if all("full_share" in row for row in rows):
            summary[name]["full_share"] = sum(row["full_share"] for row in rows) / len(rows)
    points = [
        (row["arr"], row["kl"]) for document in documents for name, row in document["cells"].items() if name != SERVED
    ]
    summary[CORRELATION] = spearman(points)
    return summary


HEADER = [
    "policy",
    "tokens read",
    "ARR (95 %)",
    "median",
    "KL, nats (95 %)",
    "median",
    "99th %",
    "same choice (95 %)",
    "total variation (95 %)",
    "loss minus full's",
    "perplexity",
]


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The table, for terminal and Markdown: best first within a budget."""
    summary = result["summary"]
    documents = result["documents"]
    read = sum(document[FULL]["read"] for document in documents) / len(documents)
    table = [
        [
            "full verification",
            f"{read:.0f}",
            "1",
            "1",
            "0",
            "0",
            "0",
            "1",
            "0",
            "0",
            f"{summary[FULL]['perplexity']:.3f}",
        ]
    ]
    budget = {name: int(name.rpartition("-k")[2]) for name in summary if "-k" in name}
    served = [SERVED] if SERVED in summary else []
    for name in [*served, *sorted(budget, key=lambda name: (-budget[name], summary[name]["kl"]["mean"]))]:
        cell = summary[name]
        table.append(
            [
                ("full, 8-bit cache" if name == SERVED else name)
                + (f", {cell['full_share']:.1%} of steps in full" if "full_share" in cell else ""),
                f"{cell['read']:.0f}",
                with_interval(cell["arr"]),
                f"{cell['arr_median']:.4f}",
                with_interval(cell["kl"]),
                f"{cell['kl_median']:.4f}",
                f"{cell['kl_p99']:.4f}",
                with_interval(cell["agreement"]),
                with_interval(cell["total_variation"]) if "total_variation" in cell else "",
                f"{cell['loss_difference']['mean']:+.4f}",
                f"{cell['perplexity']:.3f}",
            ]
        )
    return table


def curves(summary: dict[str, Any]) -> dict[str, list[tuple[float, float, float]]]:
    """By policy, tokens read, KL and ARR at every budget."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for name, cell in summary.items():
        policy, _, budget = name.rpartition("-k")
        if budget.isdecimal():
            found.setdefault(policy, []).append((cell["read"], cell["kl"]["mean"], cell["arr"]["mean"]))
    return found


def by_position(documents: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """By cell, the middle of each `BINS`-th part of the text, and mean KL there in the documents of the longest texts.

    Whether errors build up shows in these: the keys of a text come from the policy's own passes. Nothing for texts of
    which a part is less than four windows.
    """
    longest = max(document["text_tokens"] for document in documents)
    cells = [document["cells"] for document in documents if document["text_tokens"] == longest]
    count = min((len(cell[name]["windows"]["kl"]) for cell in cells for name in names), default=0)
    if count < 4 * BINS:
        return {}
    edges = [part * count // BINS for part in range(BINS + 1)]
    found: dict[str, list[tuple[float, float]]] = {}
    for name in names:
        kl = [cell[name]["windows"]["kl"] for cell in cells]
        found[name] = [
            (
                (begin + end) / 2 * longest / count,
                sum(sum(one[begin:end]) for one in kl) / (len(kl) * (end - begin)),
            )
            for begin, end in pairwise(edges)
        ]
    return found


def markdown(result: dict[str, Any]) -> str:
    """The result for people."""
    inputs = result["inputs"]
    models = inputs["models"]
    tokens = sum(document["text_tokens"] for document in result["documents"])
    cache = f", policies over a {inputs['kv_dtype']} cache of the target" if "kv_dtype" in inputs else ""
    lines = [
        f"# Fidelity: {models['target']['id']} with {models['draft']['id']}",
        "",
        f"{len(result['documents'])} documents, {tokens} tokens of text, {inputs['depth'] + 1} verified at a time;",
        f"{inputs['device']}, {inputs['dtype']}{cache};",
        f"versions: {', '.join(f'{name} {version}' for name, version in result['versions'].items())}.",
        "",
        *table(HEADER, rows(result)),
        "",
        "A given text is verified as if every draft were right. KL: of the policy's predictions from full",
        "verification's, mean over tokens, then over documents, which are the unit of intervals; medians and the 99th",
        "percentile are over the windows of all documents, what is verified at a time being one. Total variation: of",
        f"what both would draw from at temperature {inputs.get('temperature', 1):g}, mean over tokens, 0 to 1; sampled",
        "text is exact under the policy's own verification, and by so much no longer the target's. tokens read: of the",
        "prefix, by a KV head, mean over layers, heads and steps; NAME-kN: N tokens are its budget. Quest and",
        "specattn read two layers in full, Quest whole pages, three at least, and with a budget per query head a",
        "KV head reads what any of its query heads does; snapkv, compresskv and streaming-prompt spend their",
        "budget on the prompt and read all that follows; smallkv reads some values without their keys, which",
        "counts half and not for ARR; what stands in for the rest in dustin-rest is one token for each query head,",
        "which counts whole and not for ARR; dustin is dustin-d where m fills a small budget. ARR: share of full",
        "verification's attention, of all heads, on what is read.",
    ]
    if (correlation := result["summary"][CORRELATION]) is not None:
        lines += ["", f"Rank correlation of ARR and KL over documents and policies: {correlation:+.3f}."]
    return "\n".join(lines) + "\n"


def check_room(context: int, tokens: int, budgets: Sequence[int]) -> None:
    """Refuse budgets that say nothing.

    Raises:
        UsageError: a budget is not below the prompt's length.
    """
    if too_large := [budget for budget in budgets if budget >= context - tokens]:
        raise UsageError(
            f"--budget {too_large[0]}: covers a prompt of {context - tokens} tokens (--context {context} less --tokens "
            f"{tokens}), where every policy is full verification; give a longer --context or a smaller --budget"
        )
