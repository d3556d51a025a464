"""`dustin-profile pairs`: lists the known pairs; `pairs show` prints one of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dustin_runtime.recipe_files import complete_pair

if TYPE_CHECKING:
    from rich.console import Console

    from dustin_runtime.pairs import ModelRecipe, PairRecipe

app = typer.Typer(help="List the known target and draft pairs, or show one.")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
AliasArgument = Annotated[
    str, typer.Argument(help="Name of a pair, such as qwen72b:0.5b.", autocompletion=complete_pair)
]


@app.callback(invoke_without_command=True)
def _list(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List the known target and draft pairs, or show one."""
    if context.invoked_subcommand is None:
        list_pairs(as_json)


@app.command("show")
def _show(context: typer.Context, alias: AliasArgument, as_json: JsonFlag = False) -> None:
    """Show one pair: its settings and both models' shapes."""
    before = context.parent.params["as_json"] if context.parent else False
    show_pair(alias, as_json or before)


def list_pairs(as_json: bool) -> None:
    """Print every pair: a table, or one JSON document.

    Raises:
        ConfigError: a recipe is invalid.
    """
    from dustin_runtime.pairs import all_pairs

    pairs = all_pairs()
    if as_json:
        typer.echo(json.dumps({"pairs": [_summary(pair) for pair in pairs]}, indent=1, ensure_ascii=False))
        return
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for name in ("pair", "target", "draft"):
        table.add_column(name, overflow="fold")
    table.add_column("depth", justify="right")
    table.add_column("budget", justify="right")
    for pair in pairs:
        names = (model.rpartition("/")[2] for model in (pair.target.hub, pair.draft_id))
        table.add_row(pair.name, *names, str(pair.depth), str(pair.budget))
    _console().print(table)


def show_pair(alias: str, as_json: bool) -> None:
    """Print one pair with both models' shapes: two tables, or one JSON document.

    Raises:
        UsageError: no pair is called `alias`.
        ConfigError: its recipe is invalid.
    """
    from dustin_runtime.pairs import find_pair

    pair = find_pair(alias)
    if as_json:
        full = {**_summary(pair), **pair.model_dump(mode="json", include={"target", "draft"})}
        typer.echo(json.dumps(full, indent=1, ensure_ascii=False))
        return
    from rich.table import Table

    console = _console()
    settings = Table(box=None, show_header=False)
    for key, value in _summary(pair).items():
        settings.add_row(key, ", ".join(value) if isinstance(value, list) else str(value))
    console.print(settings)
    target, draft = _facts(pair.target), _facts(pair.draft)
    models = Table(box=None, header_style="bold")
    for name in ("", "target", "draft"):
        models.add_column(name, overflow="fold")
    for key in target:
        models.add_row(key, target[key], draft[key])
    console.print(models)


def _console() -> Console:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 120  # one line a row for the next program, whatever the terminal's width
    return console


def _summary(pair: PairRecipe) -> dict[str, Any]:
    return {
        "pair": pair.name,
        "aliases": list(pair.aliases),
        "target_id": pair.target_id,
        "draft_id": pair.draft_id,
        "depth": pair.depth,
        "budget": pair.budget,
        "source": pair.source,
    }


def _facts(model: ModelRecipe) -> dict[str, str]:
    shape = model.shape
    options = (f"{name} ({rope.type}, factor {rope.factor:g})" for name, rope in model.rope_options.items())
    return {
        "model": model.hub,
        "parameters": f"{shape.parameters / 1e9:.3f} billion",
        "layers": str(shape.layers),
        "query / KV heads": f"{shape.query_heads} / {shape.kv_heads}",
        "head size": str(shape.head_size),
        "hidden / MLP": f"{shape.hidden} / {shape.ffn}",
        "vocabulary": f"{shape.vocab} rows, {model.tokenizer_vocab or 'unknown'} tokens",
        "context": str(shape.context),
        "RoPE": f"{shape.rope.type}, theta {shape.rope_theta:g}, factor {shape.rope.factor:g}",
        "RoPE options": ", ".join(options) or "none",
    }
