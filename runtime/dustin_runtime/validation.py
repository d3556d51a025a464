"""Validated data from YAML: errors say file, line, key and remedy in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dustin_runtime.errors import ConfigError, MissingError

Model = TypeVar("Model", bound=BaseModel)


class FieldFault(ValueError):
    """What a validator of a whole model finds; `at` leads from that model to the field concerned.

    pydantic knows only where the model stands. An error about a file names the line of the field.
    """

    def __init__(self, message: str, *at: int | str) -> None:
        super().__init__(message)
        self.at = at


def one_line(error: ValidationError) -> str:
    """The first fault of a validation, as `field.sub.field: what is wrong`."""
    first = _first(error)
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown key"
    elif first["type"] == "missing":
        message = "is missing"
    return f"{field}: {message}" if field else message


def read_yaml(path: Path, model: type[Model]) -> Model:
    """Read a YAML file (version 1.2, safe types only) into `model`.

    Raises:
        MissingError: the file is absent or unreadable.
        ConfigError: it is not YAML, or does not validate; names line and key, and the nearest key for a misspelt one.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        # Round-trip mode builds plain containers that remember lines; like safe mode it constructs no objects.
        data = YAML(typ="rt").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise MissingError(f"{path}: not readable as text ({error})") from None
    except (YAMLError, ValueError, RecursionError) as error:  # ValueError: 2001-99-99, say, is no date
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        reason = " ".join(str(getattr(error, "problem", error)).split())
        raise ConfigError(f"{path}{where}: not YAML ({reason})") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: {'is empty' if data is None else 'must be a mapping of keys to values'}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first, hint = _first(error), ""
        location = first["loc"]
        cause = first.get("ctx", {}).get("error")
        place = location + (cause.at if isinstance(cause, FieldFault) else ())
        if first["type"] == "extra_forbidden":
            hint = suggest(str(location[-1]), _known_keys(model, location[:-1]))
        raise ConfigError(f"{path}{_line(data, place)}: {one_line(error)}{hint}") from None


def dump_yaml(value: dict[str, Any], header: str = "") -> str:
    """YAML 1.2 text of plain data in its own key order; short lists stay on one line."""
    from io import StringIO

    from ruamel.yaml import YAML

    yaml = YAML(typ="rt")
    yaml.default_flow_style = None
    yaml.width = 110
    stream = StringIO()
    yaml.dump(value, stream)
    return header + stream.getvalue()


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'budget'?`, or nothing when no known word is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _first(error: ValidationError) -> ErrorDetails:
    """An unknown key before all else: if it is misspelt, the right one is missing only for that."""
    faults = error.errors()
    return next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])


def _line(data: Any, location: tuple[int | str, ...]) -> str:
    """`:LINE` of the innermost key of `location` that the file has."""
    line = None
    for part in location:
        try:
            line = data.lc.data[part][0]
            data = data[part]
        except (AttributeError, KeyError, IndexError, TypeError):
            break
    return "" if line is None else f":{line + 1}"


def _known_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Field names of the (nested) model at `location`."""
    current: Any = model
    for part in location:
        if isinstance(part, str) and isinstance(current, type) and issubclass(current, BaseModel):
            if part not in current.model_fields:
                return []
            current = current.model_fields[part].annotation
        nested = [x for x in (*getattr(current, "__args__", ()), current) if isinstance(x, type)]
        current = next((x for x in nested if issubclass(x, BaseModel)), current)
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []
