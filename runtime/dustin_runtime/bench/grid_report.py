"""The grid as a document, as Markdown and as lines on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dustin_runtime.bench.components import ALL_REDUCE
from dustin_runtime.bench.document import environment, roofline_device
from dustin_runtime.bench.grid import Setup
from dustin_runtime.files import write_json, write_text
from dustin_runtime.links import LINKS
from dustin_runtime.scaled import dtype_name

COMPONENTS = ("draft", "scores", "lists", "selection", "verify_attention", "linears", "rest")
_TITLES = {ALL_REDUCE: "all-reduce"}
_HEADER = (
    "method",
    "draft reads",
    "kv",
    "batch",
    "context",
    "tokens/s",
    "tau",
    "alpha",
    "step ms",
    "floor ms",
    "x floor",
)


def document(setup: Setup, rows: Sequence[dict[str, Any]], pair: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Everything that a reader needs to repeat and to judge the figures."""
    device, world = setup.target.device, setup.ranks.world
    roof, figures = roofline_device(device)
    link = LINKS[roof]
    assumed = {"link_bytes_per_s": link.bytes_per_s, "all_reduce_latency_s": link.latency_s}
    return {
        "kind": "dustin-bench",
        "pair": pair,
        **({"ranks": world} if world > 1 else {}),
        **({"all_reduce": [one.as_dict() for one in setup.sums]} if setup.sums else {}),
        **environment(device),
        "dtype": str(setup.target.dtype).removeprefix("torch."),
        "kv_dtype": dtype_name(setup.kv_dtype, setup.target.dtype),
        "command": " ".join([_program(world), *(_no_folders(argument) for argument in arguments)]),
        "synthetic": setup.synthetic,
        "roofline": {"device": roof, "bytes_per_s": figures.bytes_per_s, **(assumed if world > 1 else {})},
        "selection": setup.selection.model_dump(mode="json"),
        "steps": setup.steps,
        "rows": list(rows),
    }


def _program(world: int) -> str:
    return "dustin-run" if world == 1 else f"torchrun --nproc-per-node {world} -m dustin_runtime"


def _no_folders(argument: str) -> str:
    """Of an absolute path, also as `--option=/path`, the name alone."""
    option, equals, value = argument.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if Path(value).is_absolute() else argument


def save(found: dict[str, Any], path: Path) -> None:
    """Write the document, and Markdown beside it."""
    write_json(path, found)
    write_text(path.with_suffix(".md"), markdown(found))


def line(row: dict[str, Any], header: bool = False, ranks: int = 1) -> str:
    """One case as a line of the terminal's table; what is synthetic stands in every line, over how many ranks above."""
    cells = _cells(row)
    widths = [16, 11, 13, 5, 7, 9, 5, 6, 8, 8, 7]
    parts = [f"{ms:.2f} {name}" for name, ms in row["components_ms"].items()]
    said = f"  [{', '.join(row['synthetic'])}]" if row["synthetic"] else ""
    if "full_steps_share" in row:
        said = f"  {row['full_steps_share']:.1%} in full, {row['kept_tokens_per_step']:.0f} tokens read{said}"
    text = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    text += f"  ms: {', '.join(parts)}{said}"
    if header:
        above = " ".join(f"{name:>{width}}" for name, width in zip(_HEADER, widths, strict=True))
        above += f"  over {ranks} ranks" if ranks > 1 else ""
        text = f"{above}\n{text}"
    return text


def markdown(found: dict[str, Any]) -> str:
    """The document for people."""
    said, roof, ranks = ", ".join(found["synthetic"]), found["roofline"], found.get("ranks", 1)
    timed = {name for row in found["rows"] for name in row["components_ms"]}
    shown = [name for name in COMPONENTS if name in timed or name != "lists"]  # which few methods have
    if ranks > 1:
        shown.insert(-1, ALL_REDUCE)
    head = ["data", *_HEADER, *(f"{_TITLES.get(name, name.replace('_', ' '))} ms" for name in shown)]
    head += ["verify GB/s", "linears GB/s", *(["all-reduce in floor ms"] if ranks > 1 else [])]
    lines = [
        f"# Decoding speed: {found['pair']}",
        "",
        (f"{ranks} ranks, each " if ranks > 1 else "")
        + f"{found['device']}, {found['dtype']}"
        + (f". **Synthetic: {said}.**" if said else "."),
        f"Versions: {', '.join(f'{name} {version}' for name, version in found['versions'].items())}.",
        "",
        f"`{found['command']}`",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for row in found["rows"]:
        parts = [f"{row['components_ms'][name]:.2f}" if name in row["components_ms"] else "" for name in shown]
        rates = [f"{row['components_gb_per_s'].get(name, 0):.0f}" for name in ("verify_attention", "linears")]
        rates += [f"{row['roofline_all_reduce_ms']:.2f}"] if ranks > 1 else []
        data = "synthetic" if row["synthetic"] else "real"
        lines.append(f"| {' | '.join([data, *_cells(row), *parts, *rates])} |")
    for row in found["rows"]:
        if "full_steps_share" in row:
            lines += [
                "",
                f"{row['method']}, batch {row['batch']}, context {row['context']}: {row['full_steps_share']:.1%} of "
                f"steps verified in full, {row['kept_tokens_per_step']:.0f} prefix tokens read per step.",
            ]
    lines += [
        "",
        "data: whether weights, context and acceptance are real. kv: dtype of the target's cache. tau: tokens a step.",
        "alpha: tokens/s over vanilla's at the same batch and context.",
        "floor: what the method must move and compute, components one after the other,",
        f"at {roof['bytes_per_s'] / 1e12:.3g} TB/s ({roof['device']}). Components are timed alone on the state of the",
        "run; `rest` is what the step takes beyond their sum: norms, rotary embedding, choice of tokens, state, and",
        "the gaps between kernels; negative where a part runs faster among the others, or beside another: in a step",
        "scores are computed while the draft runs.",
    ]
    if "lists" in shown:
        lines += ["`lists` is what a method does for its lists beside the drafting."]
    if ranks > 1:
        rate, latency = roof["link_bytes_per_s"] / 1e9, 1e6 * roof["all_reduce_latency_s"]
        lines += [
            "",
            f"Over {ranks} ranks the target is split by heads, MLP and vocabulary; the draft is whole on each, unless",
            "it is made of the target's layers. All measure at once, and the slowest counts. Floor and GB/s are those",
            "of one rank. The floor includes two all-reduces per layer, whose time is assumed, not measured: 2 (N - 1)",
            f"/ N of their bytes at {rate:.3g} GB/s, and {latency:.0f} us each; the last column says how much that is.",
            "`all-reduce` is what they take, timed alone; `scores` have a sum of their own in them.",
        ]
    if sums := found.get("all_reduce"):
        names = list(dict.fromkeys(name for one in sums for name in one["us"]))
        lines += [
            "",
            "Ways to sum what ends a block, timed before the first step; the fastest serves messages of so many",
            "tokens, and fewer:",
            "",
            f"| tokens | MiB | {' | '.join(f'{name} us' for name in names)} | serves |",
            f"|{'---|' * (len(names) + 3)}",
        ]
        for one in sums:
            times = " | ".join(f"{one['us'][name]:.1f}" for name in names)
            lines.append(f"| {one['tokens']} | {one['bytes'] / 2**20:.2f} | {times} | {one['way']} |")
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    alpha = row.get("alpha")
    return [
        row["method"],
        str(row["draft_reads"] or ""),
        row["kv_dtype"],
        str(row["batch"]),
        str(row["context"]),
        f"{row['tokens_per_s']:.0f}",
        f"{row['tau']:.2f}",
        f"{alpha:.2f}" if alpha else "",
        f"{row['step_ms']:.2f}",
        f"{row['roofline_ms']:.2f}",
        f"{row['over_roofline']:.2f}",
    ]
