"""`dustin-profile eval needle` and `eval recall`: facts to find in a long text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from dustin_profile.choices import RecallKind
from dustin_profile.cli.eval import Batch, Budgets, Config, Methods, RunDir, evaluate
from dustin_profile.cli.options import Json, Quiet, with_settings
from dustin_profile.settings import ModelSettings

if TYPE_CHECKING:
    from dustin_profile.evaluation.tasks import Task
    from dustin_runtime.loading import Pair

Lengths = Annotated[
    list[int] | None, typer.Option("--length", help="Tokens of a prompt; repeat for several. Default: 1024, 2048.")
]
HaystackFile = Annotated[
    Path | None, typer.Option("--haystack", help="Text, folder of texts, or JSONL. Default: Python's topics.")
]
LENGTHS = [1024, 2048]


@with_settings(models=ModelSettings)
def needle(
    config: Config,
    models: ModelSettings,
    length: Lengths = None,
    depth_at: Annotated[
        list[float] | None,
        typer.Option("--depth-at", help="Where a needle is put; repeat. Default: 0, 0.25, 0.5, 0.75, 1."),
    ] = None,
    needles: Annotated[Path | None, typer.Option(help="YAML of needles. Default: the project's own.")] = None,
    needle_count: Annotated[int | None, typer.Option(min=1, help="Only the first N needles.")] = None,
    haystack: HaystackFile = None,
    method: Methods = None,
    budget: Budgets = None,
    batch: Batch = 1,
    run_dir: RunDir = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Ask for one fact at every length and depth of a long text."""

    def make(pair: Pair) -> Task:
        from dustin_profile.evaluation.needle import NeedleGrid
        from dustin_profile.haystack import load_haystack
        from dustin_profile.needles import load_needles

        facts = load_needles(needles)[:needle_count]
        depths = depth_at or [0.0, 0.25, 0.5, 0.75, 1.0]
        return NeedleGrid(pair.tokenizer, load_haystack(haystack), facts, length or LENGTHS, depths)

    evaluate(config, models, make, method, budget, batch, run_dir, as_json, quiet)


@with_settings(models=ModelSettings)
def recall(
    config: Config,
    models: ModelSettings,
    length: Lengths = None,
    kind: Annotated[
        list[str] | None, typer.Option("--kind", help=f"Of {', '.join(get_args(RecallKind))}; repeat. Default: all.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Prompts per kind and length.")] = 20,
    facts: Annotated[int, typer.Option(min=1, help="Statements in a prompt: those asked for, and distractors.")] = 8,
    asked: Annotated[int, typer.Option(min=1, help="Values, keys or names that are asked at once.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the facts and their places.")] = 0,
    haystack: HaystackFile = None,
    method: Methods = None,
    budget: Budgets = None,
    batch: Batch = 1,
    run_dir: RunDir = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Ask for several of many facts that are generated, scattered over a long text: no model has seen them."""

    def make(pair: Pair) -> Task:
        from dustin_profile.evaluation.recall import KINDS, Recall
        from dustin_profile.haystack import load_haystack

        return Recall(
            pair.tokenizer,
            load_haystack(haystack),
            length or LENGTHS,
            kinds=cast("list[RecallKind] | None", kind) or KINDS,  # it checks them
            samples=samples,
            facts=facts,
            asked=asked,
            seed=seed,
        )

    evaluate(config, models, make, method, budget, batch, run_dir, as_json, quiet)
