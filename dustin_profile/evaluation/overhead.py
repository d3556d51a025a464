"""What the estimator costs on this device as the context grows, in the shapes of a config's pair.

Arrangement of arXiv 2606.24957, Figure 8: times over that of full-cache attention in all layers of the target. Caches
are noise, so no model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dustin_profile import plots
from dustin_profile.method_styles import style
from dustin_profile.progress import progress
from dustin_profile.provenance import device_kind, versions
from dustin_profile.report import table
from dustin_profile.rundir import open_stage, read_part
from dustin_runtime.bench import attention
from dustin_runtime.bench.document import roofline_device
from dustin_runtime.bench.estimators import estimators
from dustin_runtime.bench.synthetic import Synthetic
from dustin_runtime.bench.timing import how, measure_ms
from dustin_runtime.bench.workload import Sizes, Workload
from dustin_runtime.config import DustinConfig, ModelIdentity
from dustin_runtime.errors import UsageError
from dustin_runtime.files import clear_temporaries, write_json, write_text, write_with
from dustin_runtime.models.shape import ModelShape

VERSION = 1
HEADER = ["context", "estimator", "ms: least (median)", "of full attention", "of a sparse step", "its bytes of full's"]
GPU_LENGTHS, CPU_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768), (512, 1024, 2048, 4096, 8192)
GPU_BATCH, CPU_BATCH = 8, 1
"""The paper's; on a CPU one row."""


def sizes_of(config: DustinConfig) -> Sizes:
    """The pair's attention, and what the config asks.

    Raises:
        UsageError: it has no lookahead, or leaves nothing to choose.
    """
    if not config.selection.lookahead:
        raise UsageError("selection.lookahead: names no draft layer, so half of the comparison is missing")
    target = config.pair.target
    sizes = Sizes(
        layers=target.layers,
        query_heads=target.query_heads,
        kv_heads=target.kv_heads,
        head_size=target.head_size,
        budget=config.selection.budget,
        depth=config.depth,
        draft=_shape(config.pair.draft, Sizes().draft),
        heads=config.selection,
    )
    sizes.check()
    return sizes


def _shape(model: ModelIdentity, like: ModelShape) -> ModelShape:
    """A model with this attention; its other sizes are not used."""
    names = ("layers", "query_heads", "kv_heads", "head_size")
    return like.model_copy(update={name: getattr(model, name) for name in names})


def run(
    folder: Path,
    config: DustinConfig,
    lengths: Sequence[int],
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Time every length that is not timed yet; write `results.json`, `results.md`, `results.png` and `rows.parquet`.

    Lengths that an earlier call timed from the same inputs are kept.

    Raises:
        CapacityError: a length does not fit.
        ConflictError: the folder holds times of another device, config or batch.
        MissingError: a result in the folder is damaged.
        NothingMeasuredError: a kernel is wrong.
    """
    sizes = sizes_of(config)
    inputs = {
        "version": VERSION,
        "pair": {side: getattr(config.pair, side).model_dump() for side in ("target", "draft")},
        "selection": config.selection.model_dump(mode="json"),
        "depth": config.depth,
        "batch": batch,
        "device": device_kind(str(device)),
        "threads": torch.get_num_threads() if device.type != "cuda" else None,
        "dtype": str(dtype).removeprefix("torch."),
        "repeats": repeats,
    }
    attention.require_room(sizes, [Workload(length, batch) for length in lengths], dtype, device)
    open_stage(folder, inputs, overwrite, of_config=False)
    clear_temporaries(folder)
    files = {length: folder / f"length-{length}.json" for length in sorted(set(lengths))}
    pending = [length for length, file in files.items() if not file.exists()]
    with progress("overhead", sum(pending)) as advance:
        for length in pending:
            write_json(files[length], _measure(sizes, Workload(length, batch), dtype, device, repeats))
            advance(length)
    result = {
        "kind": "dustin-overhead",
        "version": VERSION,
        "data": "synthetic",
        "inputs": inputs,
        "timing": how(device),
        "rows": sorted(map(_read, folder.glob("length-*.json")), key=lambda row: int(row["context"])),
        "provenance": {"versions": versions()},
    }
    _write(folder, result)
    return result


def _read(file: Path) -> dict[str, Any]:
    names = {"context", "full", "sparse", "estimators"}
    return read_part(file, "time its length again", lambda found: names <= found.keys())


@torch.inference_mode()
def _measure(
    sizes: Sizes, workload: Workload, dtype: torch.dtype, device: torch.device, repeats: int
) -> dict[str, Any]:
    """One length: full and sparse attention by the attention benchmark, which checks its kernels, then estimators."""
    document = attention.measure(sizes, [workload], dtype=dtype, device=device, repeats=repeats, command="")
    (row,) = document["rows"]
    full = next(entry for entry in row["full"] if entry["kernel"] == row["best_full"])
    _, roof = roofline_device(device)
    found = {}
    for one in estimators(Synthetic(sizes, workload, dtype, device)):
        timing = measure_ms(one.work, device, repeats, units=one.units)
        found[one.name] = {
            **timing.as_dict(),
            "bytes": one.cost.bytes,
            "roofline_ms": one.cost.milliseconds(roof),
            "of_full": timing.least_ms / full["min_ms"],
            "of_full_bytes": one.cost.bytes / full["bytes"],
            "of_sparse_step": timing.least_ms / (timing.least_ms + row["sparse"]["min_ms"]),
        }
    return {
        "context": workload.context,
        "full": full,
        "sparse": row["sparse"],
        "errors": row["errors"],
        "estimators": found,
    }


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """The table, for terminal and Markdown: full and sparse attention first at every length."""
    found = []
    for row in result["rows"]:
        full, sparse = row["full"], row["sparse"]
        context = str(row["context"])
        found.append([context, f"(full attention: {full['kernel']})", _ms(full), "1", "", "1"])
        share = sparse["min_ms"] / full["min_ms"]
        found.append([context, "(sparse attention)", _ms(sparse), f"{share:.4f}", "", _share(sparse, full)])
        for name, one in row["estimators"].items():
            cells = (_ms(one), f"{one['of_full']:.4f}", f"{one['of_sparse_step']:.3f}", _share(one, full))
            found.append([context, name, *cells])
    return found


def _ms(timing: Mapping[str, Any]) -> str:
    return f"{timing['min_ms']:.3f} ({timing['ms']:.3f})"


def _share(one: Mapping[str, Any], full: Mapping[str, Any]) -> str:
    return f"{one['bytes'] / full['bytes']:.5f}"


def markdown(result: Mapping[str, Any]) -> str:
    """The result for people."""
    inputs = result["inputs"]
    target, draft = (inputs["pair"][side] for side in ("target", "draft"))
    names = ", ".join(f"{name} {version}" for name, version in result["provenance"]["versions"].items())
    threads = f", {inputs['threads']} threads" if inputs["threads"] else ""
    batch = f"{inputs['batch']} row{'' if inputs['batch'] == 1 else 's'}"
    lines = [
        f"# Overhead of estimation: shapes of {target['id']} with {draft['id']}",
        "",
        f"Synthetic caches, {batch}, {inputs['dtype']}, {inputs['device']}{threads}; {result['timing']};"
        f" target {target['layers']} layers of {target['query_heads']}/{target['kv_heads']} heads, draft"
        f" {draft['layers']} of {draft['query_heads']}/{draft['kv_heads']}; k = {inputs['selection']['budget']},"
        f" depth {inputs['depth']}. Shares are of the fastest of {inputs['repeats']} repeats: other programs only add.",
        "",
        *table(HEADER, rows(result)),
        "",
        "An estimator's time is of one step: scores and choice together. Full attention is that of all layers of the",
        "target over the whole cache, the fastest kernel of the run. Sparse step: sparse attention and the estimator.",
        "Bytes: the keys (for Quest the bounds of its pages) that must be read, whatever the device.",
        "",
        "![overhead by context](results.png)",
        "",
        f"Versions: {names}.",
    ]
    return "\n".join(lines) + "\n"


def _write(folder: Path, result: Mapping[str, Any]) -> None:
    import pandas

    frame = pandas.DataFrame(
        [
            {"context": row["context"], "part": name} | {key: part[key] for key in ("ms", "min_ms", "max_ms", "bytes")}
            for row in result["rows"]
            for name, part in {"full": row["full"], "sparse": row["sparse"], **row["estimators"]}.items()
        ]
    )
    write_with(folder / "rows.parquet", lambda temporary: frame.to_parquet(temporary, index=False))
    draw(folder / "results.png", result)
    write_text(folder / "results.md", markdown(result))
    write_json(folder / "results.json", result)


def draw(path: Path, result: Mapping[str, Any]) -> None:
    """Time and bytes over those of full attention, by context; bars reach up to the median."""
    figure = plots.blank(10.0, 4.2)
    left, right = figure.subplots(1, 2, sharey=True)
    contexts = [row["context"] for row in result["rows"]]
    for name in result["rows"][0]["estimators"]:
        found = [row["estimators"][name] for row in result["rows"]]
        share = [one["of_full"] for one in found]
        medians = [
            (one["ms"] - one["min_ms"]) / row["full"]["min_ms"] for one, row in zip(found, result["rows"], strict=True)
        ]
        reach = [[0.0] * len(found), medians]
        left.errorbar(contexts, share, yerr=reach, capsize=2, label=name, **style(name).line)
        right.plot(contexts, [one["of_full_bytes"] for one in found], **style(name).line)
    for axes, what in ((left, "time"), (right, "bytes")):
        axes.axhline(1, color=plots.INK, lw=0.9, ls="--", label="full attention" if axes is left else None)
        axes.set(xscale="log", xlabel="context, tokens", title=f"{what} of estimation / of full attention")
        axes.title.set_fontsize(9)
        axes.set_xticks(contexts, [str(context) for context in contexts])
        axes.set_xticks([], minor=True)
        plots.log_marks(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, lw=0.6)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    plots.save(figure, path)
