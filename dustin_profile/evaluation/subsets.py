"""ARR against KL over sampled subsets of the cache, free of any policy (arXiv 2606.24957, App. B, Figure 9, Table 4).

A subset is one list for all heads and layers, drawn once per text; only the last tokens, which are always kept, move
along. Uniform draws would all recover equally little, so tokens are drawn without replacement in proportion to a power
of the attention that full verification pays them: power 0 is uniform, a large one the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dustin_profile import plots
from dustin_profile.data import Prompt
from dustin_profile.evaluation.fidelity import attention_rows, measure, prepare, recovered
from dustin_profile.evaluation.given_texts import GivenTexts, Models, per_document, split
from dustin_profile.evaluation.oracle import GivenLists
from dustin_profile.evaluation.text_run import Prefilled
from dustin_profile.provenance import versions
from dustin_profile.report import table, with_interval
from dustin_profile.statistics import interval, spearman
from dustin_runtime.config import Selection, changed
from dustin_runtime.files import digest_text, write_json, write_text, write_with
from dustin_runtime.selection import select

VERSION = 1
MOST_SHARPNESS = 2.0
ALL_SIZES = "all"
HEADER = ["k", "subsets", "ARR", "KL, nats", "Pearson (95 %)", "Spearman (95 %)", "Pearson of log KL (95 %)"]
_CORRELATIONS = ("pearson", "spearman", "pearson_log")


def run(
    folder: Path, texts: GivenTexts, sizes: Sequence[int], count: int, seed: int, overwrite: bool = False
) -> dict[str, Any]:
    """Measure every document that is not measured yet; write `results.json`, `.md`, `.png` and `rows.parquet`.

    Args:
        folder: of this evaluation.
        sizes: tokens of a subset, sink and window included.
        count: subsets of every size.

    Raises: as `per_document`; UsageError where a size leaves nothing to draw.
    """
    selections = [changed(texts.config.selection, size, None) for size in dict.fromkeys(sizes)]
    made_from = texts.made_from(VERSION) | {
        "sizes": [selection.budget for selection in selections],
        "subsets": count,
        "seed": seed,
    }
    found = per_document(
        folder,
        texts,
        made_from,
        overwrite,
        "subsets",
        len(selections) * count,
        lambda models, prompt, advance: _document(texts, models, prompt, selections, count, seed, advance),
        lambda entry: {"id", "subsets", "text_tokens"} <= entry.keys(),
    )
    result = {
        "kind": "dustin-subsets",
        "inputs": made_from,
        "versions": versions(),
        "summary": summarise(found),
        "documents": found,
    }
    _write(folder, result)
    return result


def _document(
    texts: GivenTexts,
    models: Models,
    prompt: Prompt,
    selections: Sequence[Selection],
    count: int,
    seed: int,
    advance: Callable[[float], None],
) -> dict[str, Any]:
    ids, text = split(prompt, texts.tokens)
    depth, vocab = texts.config.depth, texts.pair.shared_vocab
    ready = prepare(*models, ids, text, vocab, depth, window=1)
    attention = text_attention(ready, depth)
    entries: list[dict[str, Any]] = []
    found = []
    for selection in selections:
        for index in range(count):
            sharpness = MOST_SHARPNESS * index / max(count - 1, 1)
            random = np.random.default_rng(int(digest_text(f"{seed}/{prompt.id}/{selection.budget}/{index}")[:16], 16))
            lists = sampled_lists(attention, ready, depth, selection, sharpness, random)
            found.append(measure(ready, GivenLists(selection, lists, len(ids), depth + 1), depth, vocab))
            entries.append({"budget": selection.budget, "sharpness": sharpness})
            advance(1)
    shares = recovered(ready, found, depth)
    for entry, one, arr in zip(entries, found, shares, strict=True):  # the first token comes from the prefill
        entry |= {"arr": float(arr.mean()), "kl": float(one.kl[1:].mean())}
        entry["agreement"] = float(one.agrees[1:].double().mean())
    return {
        "id": prompt.id,
        "source": prompt.source,
        "prompt_tokens": len(ids),
        "text_tokens": len(text),
        "subsets": entries,
    }


@torch.inference_mode()
def text_attention(ready: Prefilled, depth: int) -> Tensor:
    """What full verification of the text attends to, [positions] fp64: mean over layers, heads and queries."""
    positions = len(ready.prompt) + len(ready.text) - 1
    total = torch.zeros(positions, dtype=torch.float64, device=ready.target.device)
    layers, rows = ready.target.shape.layers, 0
    for begin in range(0, len(ready.text) - 1, depth + 1):
        for layer in range(layers):
            found = attention_rows(ready, layer, begin, depth)
            total[: found.shape[2]] += found.sum(dim=(0, 1), dtype=torch.float64)
            rows += found.shape[0] * found.shape[1]
    return (total / rows).cpu()


def sampled_lists(
    attention: Tensor,
    ready: Prefilled,
    depth: int,
    selection: Selection,
    sharpness: float,
    random: np.random.Generator,
) -> Tensor:
    """One subset, as lists of the text's steps: sink, window, and the same drawn tokens as far as there is room.

    Dividing weights by exponential noise and taking the largest draws without replacement in proportion to them
    (Efraimidis and Spirakis, 2006).

    Returns:
        [steps, 1, 1, 1, budget] int64 ascending.
    """
    noise = torch.from_numpy(random.exponential(size=len(attention)))
    keys = (attention.clamp(min=1e-12) ** sharpness / noise).float().to(ready.target.device)
    lists = []
    prefixes = range(len(ready.prompt), len(ready.prompt) + len(ready.text) - 1, depth + 1)
    for prefix, length in zip(prefixes, torch.tensor(prefixes, device=keys.device).split(1), strict=True):
        kept = select(
            None,
            keys[None, :prefix],
            length,
            budget=selection.budget,
            m=0,
            sink=selection.sink,
            window=selection.window,
        )
        lists.append(kept[None, :, None])
    return torch.stack(lists)


def summarise(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Correlations within documents, by size and over all sizes: means over documents with their intervals."""
    sizes = dict.fromkeys(one["budget"] for one in documents[0]["subsets"])
    found = {}
    for size in [*sizes, ALL_SIZES]:
        points = [
            [(one["arr"], one["kl"]) for one in document["subsets"] if size in (one["budget"], ALL_SIZES)]
            for document in documents
        ]
        pooled = [point for theirs in points for point in theirs]
        arr, kl = zip(*pooled, strict=True)
        within = [correlations(theirs) for theirs in points]
        found[str(size)] = {
            "subsets": len(pooled),
            "arr": [min(arr), max(arr)],
            "kl": [min(kl), max(kl)],
            "pooled": correlations(pooled),
        } | {name: _interval([one[name] for one in within]) for name in _CORRELATIONS}
    return found


def correlations(points: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    """Of ARR with KL, of their ranks, and of ARR with the logarithm of KL; None where one side does not vary."""
    if (ranks := spearman(points)) is None:
        return dict.fromkeys(_CORRELATIONS)
    arr, kl = np.asarray(points, dtype=np.float64).T
    return {
        "pearson": float(np.corrcoef(arr, kl)[0, 1]),
        "spearman": ranks,
        "pearson_log": float(np.corrcoef(arr, np.log(kl.clip(min=1e-12)))[0, 1]),
    }


def _interval(values: Sequence[float | None]) -> dict[str, Any] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    found = interval(known, seed=0)
    low, high = (None if end is None else min(max(end, -1.0), 1.0) for end in (found.low, found.high))
    return found._replace(low=low, high=high)._asdict()


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The table, for terminal and Markdown."""
    return [
        [
            size,
            str(one["subsets"]),
            f"{one['arr'][0]:.3f} to {one['arr'][1]:.3f}",
            f"{one['kl'][0]:.4f} to {one['kl'][1]:.4f}",
            *(with_interval(one[name]) if one[name] else "" for name in _CORRELATIONS),
        ]
        for size, one in result["summary"].items()
    ]


def markdown(result: dict[str, Any]) -> str:
    """The result for people."""
    inputs, summary = result["inputs"], result["summary"]
    pooled = summary[ALL_SIZES]["pooled"]
    lines = [
        f"# ARR and KL of sampled subsets: {inputs['models']['target']['id']}",
        "",
        f"{len(result['documents'])} documents of {inputs['context']} tokens, the last {inputs['tokens']} verified"
        f" {inputs['depth'] + 1} at a time; {inputs['subsets']} subsets of every size, one list for all heads and"
        f" layers, the first {inputs['selection']['sink']} and last {inputs['selection']['window']} tokens always kept;"
        f" {inputs['device']}, {inputs['dtype']}.",
        "",
        *table(HEADER, rows(result)),
        "",
        "Correlations are taken within each document; brackets are over documents. ARR: share of full verification's",
        "attention, of all heads, on what is read. KL: of the predictions from full verification's, mean over tokens.",
        "Tokens are drawn in proportion to powers from 0 (uniform) to 2 of the attention that the text pays them.",
    ]
    if all(value is not None for value in pooled.values()):
        lines += [
            "",
            f"All points of all documents together: Pearson {pooled['pearson']:+.3f}, Spearman"
            f" {pooled['spearman']:+.3f}, Pearson of log KL {pooled['pearson_log']:+.3f}.",
        ]
    names = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join([*lines, "", "![ARR and KL](results.png)", "", f"Versions: {names}."]) + "\n"


def _write(folder: Path, result: dict[str, Any]) -> None:
    import pandas

    frame = pandas.DataFrame(
        [{"document": document["id"]} | one for document in result["documents"] for one in document["subsets"]]
    )
    write_with(folder / "rows.parquet", lambda temporary: frame.to_parquet(temporary, index=False))
    draw(folder / "results.png", result)
    write_text(folder / "results.md", markdown(result))
    write_json(folder / "results.json", result)


def draw(path: Path, result: dict[str, Any]) -> None:
    """A point per subset, coloured by its size: as the paper draws it, and with KL on a logarithmic axis."""
    figure = plots.blank(10.0, 4.2)
    left, right = figure.subplots(1, 2)
    sizes = [size for size in result["summary"] if size != ALL_SIZES]
    for index, size in enumerate(sizes):
        points = [
            (one["arr"], one["kl"])
            for document in result["documents"]
            for one in document["subsets"]
            if str(one["budget"]) == size
        ]
        arr, kl = zip(*points, strict=True)
        for axes in (left, right):
            axes.scatter(arr, kl, s=14, color=f"C{index}", alpha=0.7, lw=0, label=f"k = {size}")
    plots.log_marks(right)
    for axes, name in ((left, "pearson"), (right, "pearson_log")):
        value = result["summary"][ALL_SIZES][name]
        title = f"within documents, {'Pearson' if axes is left else 'Pearson of log KL'}: "
        axes.set_title(title + (with_interval(value, sign=True, digits=2) if value else "none"), fontsize=9)
        axes.set(xlabel="ARR", ylabel="KL(full || subset), nats")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, lw=0.6)
    left.set_ylim(bottom=0)
    left.legend(fontsize=8, frameon=False)
    plots.save(figure, path)
