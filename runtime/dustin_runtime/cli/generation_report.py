"""What `dustin-run generate` says of its runs: a JSON document, or lines on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dustin_runtime.config import DustinConfig
    from dustin_runtime.generation import Generation
    from dustin_runtime.parallel.sums import SizeClass
    from dustin_runtime.statistics import Statistics


def warn_of_divergence(statistics: Statistics, most: float) -> None:
    """Say that what was served is further from full verification than it may be, if that is sure."""
    from dustin_runtime.audit import summary

    found = summary(statistics.audits)
    if found is None or found.low is None:
        print("dustin-run: too few steps were audited to judge --max-divergence: raise --audit-share", file=sys.stderr)
    elif found.low > most:
        print(
            f"dustin-run: KL of full from served verification is {found.mean:.4f} [{found.low:.4f}, {found.high:.4f}], "
            f"above --max-divergence {most:g}: give --guard, or raise it, or a larger --budget",
            file=sys.stderr,
        )


def show(
    names: list[str],
    runs: list[tuple[list[Generation], Statistics, list[str]]],
    as_json: bool,
    served: DustinConfig | None,
    sums: Sequence[SizeClass],
    kv_dtype: str,
    rule: dict[str, str],
) -> None:
    from dustin_runtime.audit import summary
    from dustin_runtime.policies import POLICIES

    generations, statistics, texts = runs[0]
    document: dict[str, Any] = {
        "kind": "dustin-generation",
        "method": names[0],
        "kv_dtype": kv_dtype,
        **rule,
        "rows": [
            {"text": text, "tokens": g.tokens, "finished": g.finished, "prompt_tokens": len(g.prompt)}
            for text, g in zip(texts, generations, strict=True)
        ],
        "statistics": statistics.as_dict(),
    }
    if served and POLICIES[names[0]].needs_selection:
        document["budget"] = served.selection.budget
    if sums:
        document["all_reduce"] = [size.as_dict() for size in sums]
    if len(runs) > 1:
        other, other_statistics, _ = runs[1]
        document["compare"] = {"method": names[1], "statistics": other_statistics.as_dict()}
        document["compare"] |= agreement([g.tokens for g in generations], [g.tokens for g in other])
    if as_json:
        print(json.dumps(document))
        return
    sys.stdout.flush()  # where both go to one place, the text comes first
    for name, (_, figures, _) in zip(names, runs, strict=False):
        accepted = " ".join(f"{share:.2f}" for share in figures.acceptance)
        say = f"{name}: {figures.tokens_per_second:.1f} tokens/s, tau {figures.tau:.2f}, "
        say += f"accepted per position {accepted}, " if accepted else ""
        say += f"{figures.kept:.0f} prefix tokens read per step"
        if figures.full_share is not None:
            say += f", {figures.full_share:.1%} of steps verified in full"
        if found := summary(figures.audits):
            between = "" if found.low is None else f" [{found.low:.4f}, {found.high:.4f}]"
            say += f", KL {found.mean:.4f}{between} nats from full verification ({found.tokens} tokens audited)"
        print(say, file=sys.stderr)
    if compared := document.get("compare"):
        print(
            f"agreement with {compared['method']}: {compared['equal_rows']} of {compared['rows']} rows equal, "
            f"{compared['common_prefix']:.1%} of tokens before the first difference, "
            f"{compared['equal_tokens']:.1%} of tokens equal",
            file=sys.stderr,
        )


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, float]:
    """How far two methods' texts agree, over all tokens of the longer text of each row."""
    common = equal = total = 0
    for left, right in zip(ours, theirs, strict=True):
        same = [a == b for a, b in zip(left, right, strict=False)]
        common += same.index(False) if False in same else len(same)
        equal += sum(same)
        total += max(len(left), len(right))
    return {
        "rows": len(ours),
        "equal_rows": sum(a == b for a, b in zip(ours, theirs, strict=True)),
        "common_prefix": common / total,
        "equal_tokens": equal / total,
    }
