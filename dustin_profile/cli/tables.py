"""Results on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from dustin_profile.check import Verdict


def heads_table(data: dict[str, Any]) -> None:
    """The four heads of every layer with their scores."""
    title = f"{data['side']}: {data['inputs']['model']['id']}, {data['accepted']} of {data['samples']} needles accepted"
    table = Table(
        "layer", "head (attention on the answer)", title=title, box=None, header_style="bold", title_justify="left"
    )
    for layer, (order, scores) in enumerate(zip(data["ranking"], data["scores"], strict=True)):
        table.add_row(str(layer), "  ".join(f"{head} ({scores[head]:.4f})" for head in order[:4]))
    _print(table)


def results_table(results: dict[str, Any]) -> None:
    """The held-out table of a search and what was chosen."""
    from dustin_profile.report import FRONT_HEADER, HEADER, about_front, about_m, front_rows, rows

    pair, chosen = results["pair"], results["selection"]
    title = f"{pair['target']['id']} with {pair['draft']['id']}, k = {chosen['budget']}, {results['split']} documents"
    table = Table(*HEADER, title=title, box=None, header_style="bold", title_justify="left")
    for row in rows(results):
        table.add_row(*row)
    _print(table)
    lookahead = ", ".join(str(entry["layer"]) for entry in chosen["lookahead"])
    print(
        f"history: target layer {chosen['history']['layer']}; lookahead: draft layers {lookahead}; "
        f"m = {chosen['m']}{about_m(results['m'])}"
    )
    if record := results.get("throughput"):
        plain_table("ARR against speed", FRONT_HEADER, front_rows(record))
        print(about_front(record))


def latency_table(document: dict[str, Any]) -> None:
    """Steps as measured and as the model has them."""
    header = ["depth", "k", "draft cache", "scored draft layers", "history", "ms", "model", "fitted"]
    rows = [
        [
            str(row["depth"]),
            str(row["budget"]),
            "sink+window" if row["windowed"] else "full",
            str(row["layers"]),
            "scored" if row["history"] else "",
            f"{row['ms']:.3f}",
            f"{row['predicted_ms']:.3f} ({row['predicted_ms'] / row['ms'] - 1:+.1%})",
            "yes" if row["fitted"] else "no",
        ]
        for row in document["measurements"]
    ]
    inputs = document["inputs"]
    title = f"{document['device']}, {document['dtype']}: batch {inputs['batch']}, {inputs['context']} tokens of context"
    plain_table(title, header, rows)
    print(f"at most {document['max_relative_error']:.1%} off on steps that were not fitted")


def verdict_table(verdict: Verdict) -> None:
    """ARR per document and per policy, baseline beside now."""
    table = Table("ARR", "baseline", "now", "difference", box=None, header_style="bold")
    for name, before, now in verdict.rows:
        table.add_row(name, f"{before:.4f}", f"{now:.4f}", f"{now - before:+.4f}")
    for name, (before, now) in verdict.policies.items():
        table.add_row(f"mean, {name}", f"{before:.4f}", f"{now:.4f}", f"{now - before:+.4f}")
    _print(table)
    outcome = "passed" if verdict.passed else "FAILED"
    print(f"{outcome}: hybrid {verdict.difference:+.4f}, tolerance {verdict.tolerance}")


def plain_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """A table of ready cells."""
    table = Table(*header, title=title, box=None, header_style="bold", title_justify="left")
    for row in rows:
        table.add_row(*row)
    _print(table)


def eval_table(results: dict[str, Any]) -> None:
    """Scores per group of items and of all, a row per method and budget, with the difference from full verification."""
    from dustin_profile.evaluation import answers

    models = " with ".join(results["pair"][side]["id"] for side in ("target", "draft"))
    table = Table(title=f"{results['task']}: {models}", box=None, header_style="bold", title_justify="left")
    for name in ("items", "method", "k"):
        table.add_column(name)
    first = answers.score_of(results)
    for name in ("n", f"{first}, 95 %", "- vanilla, 95 %", "same text", "read", "tau", "tokens/s"):
        table.add_column(name, justify="right")
    for group in sorted(answers.groups(results), key=lambda found: not found):  # all items last, above the prompt
        for place, entry in enumerate(answers.entries(results, group)):
            name = answers.title(group) if place == 0 else ""
            speed = "" if entry["tokens_per_s"] is None else f"{entry['tokens_per_s']:.1f}"
            table.add_row(name, *answers.cells(entry, first), speed)
    _print(table)
    for entry in results.get("averages", ()):
        budget = f" k = {entry['budget']}" if entry["budget"] else ""
        print(
            f"{entry['method']}{budget}: mean of {entry['tasks']} tasks {entry['plain']:.4f},"
            f" weighted by their sizes {entry['weighted']:.4f}"
        )


def price_table(prices: dict[str, Any]) -> None:
    """What a dry run found."""
    title, team = f"{prices['pair']}: {prices['target']['id']} with {prices['draft']['id']}", prices["tensor_parallel"]
    if team > 1:
        title += f", the target split over {team} devices"
    table = Table(title=title, box=None, header_style="bold", title_justify="left")
    for name in ("device", "stage", "time", "memory of each" if team > 1 else "memory", "devices", "disk"):
        table.add_column(name, justify="left" if name in ("device", "stage") else "right")
    previous = None
    for row in prices["stages"]:
        table.add_row(
            "" if row["device"] == previous else f"{row['device']} ({8 * row['element_bytes']} bit)",
            row["stage"],
            duration(row["seconds"]),
            size(row["device_bytes"]),
            _devices(row, team),
            size(row["disk_bytes"]),
        )
        previous = row["device"]
    _print(table)


def _devices(row: dict[str, Any], team: int) -> str:
    """How many devices a stage needs: those of a team, or as many as a target needs that nobody splits."""
    if not row["gpu_bytes"]:
        return ""
    if row["devices"] > team and (team > 1 or row["device"] == "this cpu"):
        return "does not fit"
    return str(row["devices"])


def duration(seconds: float) -> str:
    """`48 s`, `12 min`, `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(count: float) -> str:
    """`1.5 GB` and the like; nothing for zero."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if count else ""
        count /= 1000
    return f"{count:.3g} TB"


def _print(table: Table) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 160  # one line a row, whatever the terminal's width
    console.print(table)
