"""What evaluate.py measured, as Markdown."""

from __future__ import annotations

from typing import Any

from dustin_profile.report import with_interval


def markdown(results: dict[str, Any]) -> str:
    """Three tables: acceptance, recovery, and time of one forward pass."""
    lines = ["# Evaluation of drafts", ""]
    if rows := results["acceptance"]:
        lines += ["## τ and acceptance per position, greedy", ""]
        lines += _table(
            ["draft", "text", "context", "Γ", "τ", "τ by prompt (95 %)", "accepted at 1, 2, …", "prompts"],
            [
                [
                    row["draft"],
                    row["text"],
                    str(row["context"]),
                    str(row["depth"]),
                    "" if row["tau"] is None else f"{row['tau']:.2f}",
                    with_interval(row["interval"]) if row["interval"] else "",
                    " ".join(f"{value:.2f}".lstrip("0") for value in row["accepted"]),
                    str(row["prompts"]),
                ]
                for row in rows
            ],
        )
    if rows := results["arr"]:
        budget = results["inputs"]["budget"]
        lines += ["", f"## ARR at k = {budget}, held-out documents", ""]
        lines += _table(
            ["draft", "text", "context", "oracle", "hybrid", "T", "D", "H − T (95 %)", "H − D (95 %)", "documents"],
            [
                [
                    row["draft"],
                    row["text"],
                    str(row["context"]),
                    *(f"{row['arr'][name]['mean']:.3f}" for name in ("oracle", "hybrid", "dustin_t", "dustin_d")),
                    *(with_interval(row["hybrid_minus"][name], sign=True) for name in ("dustin_t", "dustin_d")),
                    str(row["documents"]),
                ]
                for row in rows
            ],
        )
    if rows := results["timing"]:
        lines += ["", "## Time of one forward pass, logits included", ""]
        lines += _table(
            ["draft", "context", "draft, 1 token", "target, 1 token", "target, 5 tokens", "draft / target, 1 token"],
            [
                [
                    row["draft"],
                    str(row["context"]),
                    *(f"{1000 * row[name]:.1f} ms" for name in ("draft_1", "target_1", "target_5")),
                    f"{row['draft_1'] / row['target_1']:.2f}",
                ]
                for row in rows
            ],
        )
    where = results["inputs"]
    lines += ["", f"{where['device']}, {where['dtype']}, {where['new_tokens']} tokens per prompt."]
    return "\n".join(lines) + "\n"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
