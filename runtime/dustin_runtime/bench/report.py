"""The documents of benchmarks as Markdown, aligned so that it also reads well in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PARTS = ("sparse", "history", "lookahead", "selection")


def attention_markdown(document: dict[str, Any]) -> str:
    """Render a document of `bench.attention.measure`."""
    settings, roofline = document["settings"], document["roofline"]
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    lines = [
        f"# Self-attention of one verification step ({document['data']} KV caches)",
        "",
        f"{document['device']}; {versions}; {document['timing']}.",
        "",
        f"{settings['layers']} layers, {settings['query_heads']} query and {settings['kv_heads']} KV heads of"
        f" {settings['head_size']}, {settings['dtype']}; depth {settings['depth']}, {settings['depth'] + 1} query"
        f" tokens a row; k = {settings['budget']}.",
        "",
        f"    {document['command']}",
        "",
        "## Speed-up",
        "",
        *table(
            [
                *("data", "workload", "best full ms", "kernel", "sparse ms", "estimation ms", "speed-up", "paper"),
                *("roofline speed-up", "unpacked ms", "speed-up of unpacked", "estimation / step", "estimation / full"),
            ],
            [_speedup(row) for row in document["rows"]],
        ),
        "",
        f"## Parts (roofline: {roofline['device']}, {roofline['bytes_per_s'] / 1e12:.3g} TB/s)",
        "",
        *table(
            ["data", "workload", "part", "ms", "min", "max", "repeats", "GB", "GB/s", "roofline ms", "of roofline"],
            [line for row in document["rows"] for line in _parts(row)],
        ),
        "",
        *(f"* {note}" for note in document["notes"]),
        *(f"* Not measured: {name}: {reason}." for name, reason in document["missing_kernels"].items()),
    ]
    return "\n".join(lines) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table: text to the left, what begins with a digit or stands for a missing figure right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(cell[:1].isdigit() or cell == "-" for cell in column[1:]) and bool(rows) for column in columns]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(cells, widths, numeric, strict=True)
        )
        return f"| {' | '.join(aligned)} |"

    rule = ("-" * (width + 1) + (":" if number else "-") for width, number in zip(widths, numeric, strict=True))
    return [line(header), f"|{'|'.join(rule)}|", *map(line, rows)]


def _speedup(row: dict[str, Any]) -> list[str]:
    return [
        row["data"],
        row["workload"],
        _number(row["best_full_ms"]),
        row["best_full"],
        _number(row["sparse"]["ms"]),
        _number(row["estimation_ms"]),
        _times(row["speedup"]),
        _times(row["paper_speedup"]),
        _times(row["roofline_speedup"]),
        _number(row["unpacked_ms"]),
        _times(row["speedup_of_unpacked"]),
        f"{row['estimation_of_step']:.1%}",
        f"{row['estimation_of_full']:.2%}",
    ]


def _parts(row: dict[str, Any]) -> list[list[str]]:
    labelled = [(_kernel(figures), figures) for figures in row["full"]] + [(name, row[name]) for name in PARTS]
    return [
        [
            row["data"],
            row["workload"],
            label,
            *(_number(figures[key]) for key in ("ms", "min_ms", "max_ms")),
            str(figures["repeats"]),
            f"{figures['bytes'] / 1e9:.3g}",
            f"{figures['gb_per_s']:.0f}",
            _number(figures["roofline_ms"]),
            f"{figures['roofline_ms'] / figures['ms']:.0%}",
        ]
        for label, figures in labelled
    ]


def _kernel(figures: dict[str, Any]) -> str:
    return f"full: {figures['kernel']}" + ("" if figures["causal"] else " (not causal)")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else f"{value:.1g}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
