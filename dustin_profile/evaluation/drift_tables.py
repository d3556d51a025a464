"""What drift says to people: a table, Markdown, curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dustin_profile.evaluation.repetition import LENGTH
from dustin_profile.plots import drift_curves
from dustin_profile.report import table, with_interval

HEADER = [
    "method",
    "KL, nats (95 %)",
    "first tokens",
    "last tokens",
    "same choice (95 %)",
    "τ",
    "tokens read",
    "repeated",
]


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """The table, for terminal and Markdown: what verifies in full, then by budget, best first."""
    summary = result["summary"]
    return [
        [
            name,
            with_interval(cell["kl"]),
            *(f"{cell['by_tokens'][place]['kl']:.4f}" for place in (0, -1)),
            with_interval(cell["agreement"], digits=3),
            "" if cell["tau"] is None else f"{cell['tau']:.2f}",
            "" if cell["read"] is None else f"{cell['read']:.0f}",
            f"{cell['repeated']:.3f}",
        ]
        for part in panels(result).values()
        for name, cell in sorted(((name, summary[name]) for name in part), key=lambda item: item[1]["kl"]["mean"])
    ]


def panels(result: Mapping[str, Any]) -> dict[int | None, list[str]]:
    """Names of cells by their budget: None, where all is read, then the largest first."""
    found: dict[int | None, list[str]] = {}
    for name, cell in sorted(result["summary"].items(), key=lambda item: item[1]["budget"] or 1 << 62, reverse=True):
        found.setdefault(cell["budget"], []).append(name)
    return found


def markdown(result: Mapping[str, Any]) -> str:
    """The result for people."""
    inputs, documents = result["inputs"], result["documents"]
    models = inputs["models"]
    way = f"temperature {inputs['temperature']:g}, seed {inputs['seed']}" if inputs["temperature"] else "greedy"
    lines = [
        f"# Drift: {models['target']['id']} with {models['draft']['id']}",
        "",
        f"{len(documents)} prompts of up to {max(document['prompt_tokens'] for document in documents)} tokens,"
        f" {inputs['tokens']} generated behind each, {inputs['batch']} at a time, {way}; depth {inputs['depth']};",
        f"{inputs['device']}, {inputs['dtype']};",
        f"versions: {', '.join(f'{name} {version}' for name, version in result['versions'].items())}.",
        "",
        *table(HEADER, rows(result)),
        "",
        "A method's text is read again by the target with its full cache. KL: of the method's predictions from full",
        "verification's, at temperature 1, mean over tokens, then over documents, which are the unit of intervals;",
        f"first and last tokens: its {inputs['bucket']} first and its last. same choice: share of tokens of which both",
        "predict the same as the most likely. τ, and prefix tokens that a KV head read: means over steps, then over",
        f"documents. repeated: share of the text's sequences of {LENGTH} tokens that it had before: such text is easy",
        "to predict, and a KL that falls with it is no merit. NAME-kN: N tokens are its budget.",
        "",
        "![KL by tokens generated](results.png)",
    ]
    for budget, names in panels(result).items():
        cells = [result["summary"][name] for name in names]
        header = ["tokens", *(cell["method"] for cell in cells)]
        lines += ["", f"## {_title(budget)}", "", "KL (same choice) by tokens generated:", ""]
        lines += table(header, _by_tokens(cells))
    return "\n".join(lines) + "\n"


def _by_tokens(cells: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [
        [str(parts[0]["tokens"]), *(f"{part['kl']:.4f} ({part['agreement']:.2f})" for part in parts)]
        for parts in zip(*(cell["by_tokens"] for cell in cells), strict=True)
    ]


def _title(budget: int | None) -> str:
    return "Full verification" if budget is None else f"k = {budget}"


def draw(path: Path, result: Mapping[str, Any]) -> None:
    """KL by tokens generated, a panel for each budget; what verifies in full is in all of them."""
    cells, groups = result["summary"], panels(result)
    full = groups.pop(None, [])
    shown = {_title(budget): [*full, *names] for budget, names in groups.items()} or {_title(None): full}
    drift_curves(
        path,
        {
            title: {
                cells[name]["method"]: [(part["tokens"], part["kl"]) for part in cells[name]["by_tokens"]]
                for name in names
            }
            for title, names in shown.items()
        },
    )
