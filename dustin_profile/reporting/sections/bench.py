"""Decoding speed: every method in one engine, and where a step's time goes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from dustin_profile.method_styles import Dash, label, style
from dustin_profile.reporting.blocks import Block, Cell, Code, Content, Figure, Figures, Group, Heading, Row, Table
from dustin_profile.reporting.charts import bars, lines, stacked
from dustin_profile.reporting.documents.run import Bench, BenchRow
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sources import Evidence
from dustin_profile.reporting.speeds import ranked, synthetic
from dustin_profile.reporting.titles import pair_of, slug
from dustin_profile.reporting.wording import count, plain, plural, times

HEADER = ("method", "tokens/s", "over vanilla", "data", "step, ms", "floor, ms", "× floor", "τ", "accepted at 1, 2, …")
PARTS = {
    "draft": "draft",
    "scores": "scores",
    "lists": "lists, beside the drafting",
    "selection": "selection",
    "verify_attention": "verify: attention",
    "linears": "verify: linears",
    "rest": "rest",
    "all_reduce": "all-reduce",
}
SLOW_REST = 0.1
"""Share of a vanilla step beyond its parts that is worth a word."""
Case = tuple[int, int]
"""Rows of the batch, tokens of context."""


def build(evidence: Evidence) -> Content | None:
    found = ranked(evidence)
    if not found:
        return None
    blocks: list[Block] = []
    for number, source in enumerate(found):
        data = source.data
        suffix = slug(number, len(found))
        apart = ", synthetic" if synthetic(data) else ""
        blocks.append(Heading(f"{pair_of(data)} on {data.devices}, {data.dtype}{apart}"))
        case = widest(data)
        figures = [speed_figure(data, f"speed{suffix}"), _parts_figure(data, case, f"step{suffix}")]
        figures += _acceptance_figures(data, f"acceptance{suffix}")
        blocks.append(Figures(figures))
        blocks.append(_table(data))
        if data.command:
            blocks.append(Code(data.command))
    return Content(
        "All methods run in the same engine on the same device in the same run. The floor is the time in which the"
        " device could read the bytes that a method must move; “× floor” is how near the step comes to it. τ is how"
        " many tokens a step emits; where nothing is synthetic, it and what is accepted are of each method's own text.",
        blocks,
    )


def cases(data: Bench) -> dict[Case, list[BenchRow]]:
    """Rows by case, the shortest contexts first."""
    found: dict[Case, list[BenchRow]] = {}
    for row in data.rows:
        found.setdefault((row.batch, row.context), []).append(row)
    return dict(sorted(found.items(), key=lambda item: (item[0][1], item[0][0])))


def widest(data: Bench) -> Case:
    """The case of the most cached tokens, where verification costs most."""
    return max(cases(data), key=lambda case: case[0] * case[1])


def case_name(case: Case) -> str:
    return f"{plural(case[0], 'row')} of {plural(case[1], 'token')}"


def row_name(row: BenchRow) -> str:
    """The method, and below it what its draft reads, and what the cache holds if that is 8 bits."""
    return label(row.method) + (f"\n{row.how}" if row.how else "")


def speed_figure(data: Bench, name: str) -> Figure:
    """Tokens per second of every method in the case of the most cached tokens."""
    case = widest(data)
    rows = [
        (
            style(row.method),
            row_name(row),
            row.tokens_per_s,
            count(row.tokens_per_s) + (f"  {times(row.alpha)}" if row.alpha and row.method != "vanilla" else ""),
        )
        for row in cases(data)[case]
    ]
    return Figure(
        name,
        f"Decoding speed, {case_name(case)}, {pair_of(data)}, and over vanilla." + _said(data),
        f"Tokens per second by method, {pair_of(data)}",
        partial(bars, rows=rows, xlabel=f"tokens/s, and over vanilla: {case_name(case)}"),
        synthetic=synthetic(data),
        title=f"{pair_of(data)}, {data.devices}".replace(" with ", "\nwith ", 1),
        height=1.1 + 0.42 * len(rows),
    )


def _parts_figure(data: Bench, case: Case, name: str) -> Figure:
    rows = cases(data)[case]
    return Figure(
        name,
        f"Where the time of a step goes, {case_name(case)}; parts are timed alone. A step emits τ tokens:"
        " one for vanilla, more for the others." + _said(data),
        f"Milliseconds of each part of a step by method, {pair_of(data)}",
        partial(
            stacked,
            rows=[(row_name(row), row.components_ms) for row in rows],
            parts=PARTS,
            xlabel="ms per step",
            marks=[row.roofline_ms for row in rows],
            mark_label="floor of the step",
        ),
        synthetic=synthetic(data),
        height=1.6 + 0.42 * len(rows),
    )


def _acceptance_figures(data: Bench, name: str) -> list[Figure]:
    """How far drafts are right, at the shortest and the longest context; nothing where that was assumed."""
    if synthetic(data):
        return []
    found = cases(data)
    figures = []
    for case in dict.fromkeys([next(iter(found)), widest(data)]):
        curves = [
            (
                replace(style(row.method), label=row_name(row).replace("\ndraft reads", ","), dash=_dash(row)),
                list(range(1, len(row.acceptance_per_position) + 1)),
                row.acceptance_per_position,
            )
            for row in found[case]
            if row.acceptance_per_position
        ]
        if curves:
            figures.append(
                Figure(
                    f"{name}-{case[0]}x{case[1]}",
                    f"Share of steps that accept at least so many drafts, {case_name(case)}, each on its own text;"
                    " after the method: tokens that its draft reads.",
                    f"Acceptance by position and method, {case_name(case)}, {pair_of(data)}",
                    partial(lines, curves=curves, xlabel="drafts accepted, at least", ylabel="share of steps"),
                    height=2.9,
                )
            )
    return figures


def _dash(row: BenchRow) -> Dash:
    return "-" if row.draft_reads == "all" else "--"


def _said(data: Bench) -> str:
    return f" Synthetic: {', '.join(words)}." if (words := synthetic(data)) else ""


def _table(data: Bench) -> Table:
    rows: list[Row | Group] = []
    for case, found in cases(data).items():
        rows.append(Group(case_name(case) + (", synthetic" if any(row.synthetic for row in found) else "")))
        best = max(found, key=lambda row: row.tokens_per_s)
        rows += [_row(row, row is best) for row in found]
    k = f", k = {data.selection.budget}" if data.selection else ""
    speed = data.roofline.bytes_per_s / 1e9
    moved = f"{speed / 1e3:.3g} TB/s" if speed >= 1e3 else f"{speed:.3g} GB/s"
    note = f"Floor at {moved} ({data.roofline.device}){k}." + _said(data)
    return Table("Decoding speed by method", HEADER, rows, note, frozenset({0, 3, 8}), markdown=True).without_empty()


def unexplained_ms(row: BenchRow) -> float:
    """What a vanilla step takes beyond its parts if that is worth a word, since ratios to it flatter; else 0."""
    rest = row.components_ms.get("rest", 0.0)
    return rest if row.method == "vanilla" and rest > SLOW_REST * row.step_ms else 0.0


def _row(row: BenchRow, best: bool) -> Row:
    unexplained = unexplained_ms(row)
    cells = [
        Cell(label(row.method), row.how),
        Cell(count(row.tokens_per_s), tone="strong" if best else ""),
        Cell(times(row.alpha) if row.alpha else ""),
        Cell("synthetic" if row.synthetic else "real", tone="bad" if row.synthetic else ""),
        Cell(plain(row.step_ms, 2), f"parts: {plain(row.step_ms - unexplained, 2)}" if unexplained else ""),
        Cell(plain(row.roofline_ms, 2), tone="muted"),
        Cell(plain(row.over_roofline, 2), tone="muted"),
        Cell(plain(row.tau, 2), tone="muted"),
        Cell("" if row.synthetic else " ".join(f"{share:.2f}" for share in row.acceptance_per_position), tone="muted"),
    ]
    return Row(cells, strong=style(row.method).own)


SECTION = Section("speed", "Decoding speed", "dustin-run bench --config RUN --json bench.json", build)
