"""Known pairs of target and draft: which models, their shapes, how deep to draft and how many tokens to keep."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from dustin_runtime.errors import ConfigError, MissingError, UsageError
from dustin_runtime.models.shape import ModelShape, RopeScaling
from dustin_runtime.recipe_files import complete_pair, pair_names, recipes_folder

__all__ = ["ModelRecipe", "PairRecipe", "all_pairs", "complete_pair", "find_model", "find_pair"]

Recipe = TypeVar("Recipe", bound=BaseModel)

_RECIPE = "recipe:"


class StoredWeights(BaseModel):
    """Weights that lie beside the recipes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str
    """Below the folder of recipes, with `/` between its parts."""
    sha256: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]
    """Of every file that is read, `config.json` and all weights."""

    @model_validator(mode="after")
    def _inside(self) -> Self:
        parts = PurePosixPath(self.folder).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise ValueError(f"folder {self.folder!r} does not lie below the folder of recipes")
        if wrong := [name for name in self.sha256 if PurePosixPath(name).name != name]:
            raise ValueError(f"sha256: {wrong[0]!r} is not a file name")
        if "config.json" not in self.sha256 or len(self.sha256) < 2:
            raise ValueError("sha256 must name config.json and the weights")
        return self


class ModelRecipe(BaseModel):
    """What is known of a model before any of its files is read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hub: str
    """Hub id; `self:N` for a draft of its target's first N layers; `recipe:NAME` for weights beside the recipes."""
    shape: ModelShape
    tokenizer_vocab: int | None = Field(default=None, ge=1)
    """Ids that the tokenizer knows; the rows of the embedding beyond them are padding."""
    notes: str = ""
    rope_options: dict[str, RopeScaling] = {}
    """Recommended RoPE scalings that the model's own config leaves off, by name."""
    weights: StoredWeights | None = None
    """Given for `recipe:NAME`, and only then."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.hub.startswith(_RECIPE) != (self.weights is not None):
            raise ValueError(f"weights belong to a hub of {_RECIPE}NAME, and it needs them; hub is {self.hub}")
        if self.tokenizer_vocab is not None and self.tokenizer_vocab > self.shape.vocab:
            raise ValueError(f"tokenizer_vocab {self.tokenizer_vocab} exceeds the embedding's {self.shape.vocab} rows")
        return self


class PairRecipe(BaseModel):
    """A target with its draft, and the settings that the paper or this project runs them with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    aliases: Annotated[tuple[str, ...], Field(min_length=1)]
    target: ModelRecipe
    embedded: str | None = None
    """Id of target weights that come with an installed package instead of the hub."""
    draft: ModelRecipe
    depth: int = Field(ge=1)
    """Draft tokens per step, the paper's Γ."""
    budget: int = Field(gt=20)
    """KV tokens that verification reads, the paper's k; the default sink and window protect 20 of them."""
    source: str
    """Where pair, depth and budget come from."""

    @model_validator(mode="after")
    def _one_tokenizer(self) -> Self:
        target, draft = self.target.tokenizer_vocab, self.draft.tokenizer_vocab
        if target and draft and target != draft:
            raise ValueError(f"the tokenizers of target and draft differ in size ({target} and {draft})")
        return self

    @property
    def name(self) -> str:
        """The alias that lists and files show."""
        return self.aliases[0]

    @property
    def target_id(self) -> str:
        """What to load the target from: a hub id, or the id of embedded weights."""
        return self.embedded or self.target.hub

    @property
    def draft_id(self) -> str:
        """What to load the draft from: a hub id, `self:N`, or `recipe:NAME`."""
        return self.draft.hub


def find_pair(alias: str) -> PairRecipe:
    """The pair called `alias`, with both models' recipes inside. Case does not matter.

    Raises:
        UsageError: no pair is called so; it offers the nearest names.
        ConfigError: the recipe, or a model it names, is invalid.
    """
    wanted = alias.strip().lower()
    if wanted in pair_names():
        return _pair(wanted)
    by_alias = {other: pair for pair in all_pairs() for other in pair.aliases}
    if wanted in by_alias:
        return by_alias[wanted]
    near = difflib.get_close_matches(wanted, by_alias, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(f"unknown pair {alias!r}: {hint}`dustin-profile pairs` lists all")


def all_pairs() -> list[PairRecipe]:
    """Every pair, by name.

    Raises:
        ConfigError: a recipe is invalid, or two of them claim the same alias.
    """
    pairs = [_pair(name) for name in pair_names()]
    owner: dict[str, str] = {}
    for pair in pairs:
        for alias in pair.aliases:
            if alias in owner:
                raise ConfigError(
                    f"{_pair_file(pair.name)}: aliases: {alias!r} is taken by {_pair_file(owner[alias]).name}"
                )
            owner[alias] = pair.name
    return pairs


def find_model(hub_id: str) -> ModelRecipe | None:
    """The recipe of the model with this hub id (or `recipe:NAME`), if there is one.

    Raises:
        ConfigError: the recipe is invalid.
    """
    stem = _stem(hub_id)
    if stem not in {path.stem for path in (recipes_folder() / "models").glob("*.yaml")}:
        return None
    recipe = _model(stem)
    return recipe if recipe.hub == hub_id else None


@cache
def _pair(name: str) -> PairRecipe:
    path = _pair_file(name)
    raw = _read_mapping(path)
    for key in ("target", "draft"):
        if not isinstance(raw.get(key), str):
            raise ConfigError(f"{path}: {key}: name a file of {recipes_folder() / 'models'} without .yaml")
    raw["target"] = _named_model(path, "target", raw["target"])
    if raw["draft"].startswith("self:"):
        raw["draft"] = _first_layers(path, raw["target"], raw["draft"])
    else:
        raw["draft"] = _named_model(path, "draft", raw["draft"])
    pair = _validated(PairRecipe, raw, path)
    if pair.name != name:
        raise ConfigError(f"{path}: aliases: the first is {pair.name!r}, but the file is named for {name!r}")
    if mixed := [alias for alias in pair.aliases if alias != alias.lower()]:
        raise ConfigError(f"{path}: aliases: {mixed[0]!r} must be in lower case")
    return pair


@cache
def _model(stem: str) -> ModelRecipe:
    path = recipes_folder() / "models" / f"{stem}.yaml"
    recipe = _validated(ModelRecipe, _read_mapping(path), path)
    if _stem(recipe.hub) != stem:
        raise ConfigError(f"{path}: hub: {recipe.hub} belongs in a file named for the last part of the id")
    return recipe


def _stem(hub: str) -> str:
    """The name of a model's file without .yaml."""
    return hub.removeprefix(_RECIPE).rpartition("/")[2].lower()


def _pair_file(name: str) -> Path:
    return recipes_folder() / "pairs" / f"{name.replace(':', '_')}.yaml"


def _named_model(path: Path, key: str, stem: str) -> ModelRecipe:
    if not (recipes_folder() / "models" / f"{stem}.yaml").is_file():
        raise ConfigError(f"{path}: {key}: no model recipe is called {stem!r}")
    return _model(stem)


def _first_layers(path: Path, target: ModelRecipe, draft: str) -> ModelRecipe:
    count = draft.removeprefix("self:")
    if not (count.isdecimal() and 0 < int(count) < target.shape.layers):
        raise ConfigError(f"{path}: draft: {draft!r} must be self:N, N from 1 to {target.shape.layers - 1} layers")
    return target.model_copy(update={"hub": draft, "shape": target.shape.model_copy(update={"layers": int(count)})})


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        raw = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MissingError(f"{path}: cannot be read ({error.strerror})") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a mapping of keys to values")
    return raw


def _validated(kind: type[Recipe], raw: dict[str, Any], path: Path) -> Recipe:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "recipe"
        raise ConfigError(f"{path}: {key}: {first['msg']}") from None
