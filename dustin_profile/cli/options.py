"""Command-line options made from the settings classes, so that a default and its help text stand in one place."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import Field, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from dustin_profile.settings import (
    DataSettings,
    HeadSettings,
    ModelSettings,
    ObjectiveSettings,
    SearchSettings,
    StepSettings,
)
from dustin_runtime.recipe_files import complete_pair

if TYPE_CHECKING:
    from dustin_runtime.config import DustinConfig

PANELS = {
    ModelSettings: "Models",
    HeadSettings: "Heads",
    DataSettings: "Calibration data",
    SearchSettings: "Search",
    ObjectiveSettings: "Objective",
    StepSettings: "Steps",
}

_CONTEXT = "command_context"


def with_settings(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of settings classes, and `given` if it has an argument of that name: those of its
    arguments and of the classes' fields that the command line says, were it their default.

    Args:
        groups: argument of the command -> the class whose instance it is to receive.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        asked = inspect.signature(command, eval_str=True).parameters
        own = [p for name, p in asked.items() if name not in groups and name != "given"]
        if "given" in asked:
            own.append(inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
        made = [_parameter(field, hint, PANELS[cls]) for cls in groups.values() for field, hint in _fields(cls)]

        @wraps(command)
        def call(**values: Any) -> None:
            if "given" in asked:
                values["given"] = _given(values.pop(_CONTEXT))
            for name, cls in groups.items():
                values[name] = cls(**{field.name: _value(values.pop(field.name)) for field in fields(cls)})
            command(**values)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*own, *made]]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return decorate


def _fields(cls: type) -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(cls)
    return [(field, hints[field.name]) for field in fields(cls)]


def _parameter(field: Field[Any], hint: Any, panel: str) -> inspect.Parameter:
    flag = "--" + (field.metadata["flag"] or field.name.replace("_", "-"))
    default: Any = field.default
    if get_origin(hint) is tuple:  # Typer knows repeated options as lists
        hint, default = list[get_args(hint)[0]], list(default)  # type: ignore[misc]
    completion: Any = complete_pair if field.name == "pair" else None
    option = typer.Option(flag, help=field.metadata["help"], rich_help_panel=panel, autocompletion=completion)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option]
    )


def _given(context: typer.Context) -> frozenset[str]:
    """Names of parameters that the command line says."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source and source.name == "COMMANDLINE")


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def begin(config: Path, models: ModelSettings, quiet: bool, *, adapts: bool = False) -> DustinConfig:
    """What commands on an emitted config do first: honour --quiet and --offline, and read the config.

    Args:
        adapts: whether the command is asked for several budgets; without, it warns if the config has some.
    """
    from dustin_profile import progress
    from dustin_runtime.cli.support import go_offline
    from dustin_runtime.config import load_config
    from dustin_runtime.errors import ConfigWarning

    progress.quiet = quiet
    if models.offline:
        go_offline()
    served = load_config(config)
    if served.adaptive_budget and not adapts:
        warnings.warn(
            f"adaptive_budget: not used here, k = {served.selection.budget} unless budgets are given; "
            "eval fidelity --target-arr measures it",
            ConfigWarning,
            stacklevel=2,
        )
    return served


RunDir = Annotated[
    Path | None,
    typer.Option("--run-dir", help="Where the run is kept and continued. Default: runs/PAIR.", rich_help_panel="Run"),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Discard stages that were made from other inputs.", rich_help_panel="Run")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Price time, memory and disk, load nothing.", rich_help_panel="Run")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.", rich_help_panel="Run")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.", rich_help_panel="Run")]
Depth = Annotated[
    int | None, typer.Option("--depth", help="Draft tokens per step; default: the recipe's.", rich_help_panel="Models")
]
