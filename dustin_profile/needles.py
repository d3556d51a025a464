"""Facts to hide in a haystack: each a sentence, a question about it, and the part of the sentence that answers."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from dustin_profile.texts import read_text
from dustin_runtime.errors import ConfigError


class Needle(BaseModel):
    """One fact. The answer stands in the needle word for word, exactly once: its tokens are the answer span."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    needle: str = Field(min_length=1)
    answer: str = Field(min_length=1)
    question: str = Field(min_length=1)

    @field_validator("needle", "answer", "question")
    @classmethod
    def _one_line(cls, value: str) -> str:
        if len(value.splitlines()) > 1 or value != value.strip():
            raise ValueError("must be one line without spaces around it")
        return value

    @field_validator("answer")
    @classmethod
    def _in_needle(cls, answer: str, info: ValidationInfo) -> str:
        if not (answer[0].isalnum() and answer[-1].isalnum()):
            raise ValueError("must begin and end with a letter or digit: punctuation is no part of the span")
        if (needle := info.data.get("needle")) is not None and needle.count(answer) != 1:
            raise ValueError("must stand in the needle word for word, exactly once")
        return answer

    @field_validator("question")
    @classmethod
    def _not_in_question(cls, question: str, info: ValidationInfo) -> str:
        if (answer := info.data.get("answer")) is not None and answer.lower() in question.lower():
            raise ValueError("must not contain the answer")
        return question


class _NeedleFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    needles: list[Needle] = Field(min_length=1)


def load_needles(path: Path | None = None) -> list[Needle]:
    """The project's own needles, or those of a YAML file with the same fields (`needles`: a list).

    Raises:
        ConfigError: an entry is invalid; the message names it (counted from 0) and its field.
        MissingError: the file is absent, empty or not text.
    """
    if path is None:
        name = "needles.yaml"
        text = resources.files("dustin_profile").joinpath(name).read_text(encoding="utf-8")
    else:
        name, text = str(path), read_text(path)
    try:
        data = YAML(typ="safe", pure=True).load(text)
        if not isinstance(data, dict):
            raise ConfigError(f"{name}: needles: must be a list under this key")
        return _NeedleFile.model_validate(data).needles
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "needles"
        raise ConfigError(f"{name}: {field}: {first['msg'].removeprefix('Value error, ')}") from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not YAML ({' '.join(str(error).split())})") from None
