"""The YAML that the profiler emits and the runtime serves.

The functional block is what the runtime reads. `evidence` and `provenance` say how good it is and where it came from;
the runtime never reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from dustin_runtime.budget import budget_fault
from dustin_runtime.errors import ConfigError, UsageError
from dustin_runtime.files import write_text
from dustin_runtime.models.shape import Family, ModelShape, RopeScaling
from dustin_runtime.validation import FieldFault, dump_yaml, one_line, read_yaml

SCHEMA_VERSION = 1
MAX_DEPTH = 64
MOST_REST_QUERIES = 16
"""Of a layer, that what stands in for unread tokens is made from."""
ADAPTIVE_SIZES = (128, 256, 512, 1024)
"""Budgets that an adaptive one chooses from, unless a configuration says otherwise."""

# One function per step: MIGRATIONS[n] turns the mapping of schema version n into that of n + 1.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelIdentity(_Strict):
    """What must agree between a config and a loaded model."""

    id: str
    family: Family
    layers: int = Field(ge=1)
    query_heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_size: int = Field(ge=1)
    hidden: int = Field(ge=1)

    @classmethod
    def of(cls, name: str, shape: ModelShape) -> ModelIdentity:
        return cls(id=name, **{field: getattr(shape, field) for field in list(cls.model_fields)[1:]})


class PairIdentity(_Strict):
    """The two models a configuration was searched for."""

    target: ModelIdentity
    draft: ModelIdentity
    tokenizer: str = Field(description="hash of the shared tokenizer")
    shared_vocab: int = Field(ge=1, description="ids below this are in both tokenizers; no other id is ever proposed")


class LayerHeads(_Strict):
    """Query heads of one layer that are asked for their attention."""

    layer: int = Field(ge=0)
    heads: tuple[int, ...] = Field(min_length=1)


class Rest(_Strict):
    """What stands in for the tokens that `dustin-rest` does not read: one for each query head of every layer."""

    queries: int = Field(
        default=8, ge=1, le=MOST_REST_QUERIES, description="last processed queries of a layer that it is made from"
    )
    period: int = Field(default=128, ge=1, le=2**20, description="steps in which every layer is asked anew once")
    weight: float = Field(default=1.0, gt=0, le=1, description="of the attention that it would have, what it gets")


class Split(_Strict):
    """How `dustin-merged` makes one ranking of lookahead and history, each as shares of its sum."""

    weight: float = Field(default=0.5, ge=0, le=1, description="of lookahead; history has the rest")
    exponent: float = Field(default=0.5, gt=0, le=1, description="of every share, before it is weighted")


class Selection(_Strict):
    """Which tokens verification reads (arXiv 2606.24957, Eq. 6)."""

    budget: int = Field(ge=1, description="k: prefix tokens that verification reads")
    sink: int = Field(ge=0, description="first tokens, always kept, counted in budget")
    window: int = Field(ge=0, description="last prefix tokens, always kept, counted in budget")
    m: int = Field(ge=0, description="how many of the budget the draft's lookahead chooses")
    history: LayerHeads = Field(description="target layer and heads asked about the last processed token")
    lookahead: tuple[LayerHeads, ...] = Field(description="draft layers and heads asked about the drafted tokens")
    retrieval_heads: tuple[tuple[int, ...], ...] = Field(
        default=(), description="the first retrieval heads of every target layer, which CompressKV asks"
    )
    split: Split | None = Field(default=None, description="how dustin-merged joins scores; None is its defaults")
    rest: Rest | None = Field(
        default=None, description="how dustin-rest stands in for what is not read; None is its defaults"
    )

    @model_validator(mode="after")
    def _within_budget(self) -> Selection:
        if fault := budget_fault(self.budget, self.m, self.sink, self.window):
            raise FieldFault(fault, fault.partition(":")[0])
        if self.m and not self.lookahead:
            raise FieldFault(f"m is {self.m} but lookahead names no draft layer", "lookahead")
        return self

    @model_serializer(mode="wrap")
    def _without_nothing(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out what newer methods ask for where it is None, as files and run directories from before have it."""
        data: dict[str, Any] = serialise(self)
        for field in ("split", "rest"):
            if data.get(field, ...) is None:
                del data[field]
        return data


class Estimate(_Strict):
    """Attention recovery rate (ARR) of a step, from what its list holds of the scores: least squares over documents.

    `intercept + history * h + lookahead * l`, cut to [0, 1]: h and l are the shares of the history and of the lookahead
    score on the prefix that lie on the list.
    """

    intercept: float = Field(allow_inf_nan=False)
    history: float = Field(allow_inf_nan=False)
    lookahead: float = Field(allow_inf_nan=False)
    rms: float = Field(ge=0, allow_inf_nan=False, description="error, root of the mean square")
    overestimate: float = Field(allow_inf_nan=False, description="estimate minus ARR that one window in twenty exceeds")


class Guard(_Strict):
    """What tells steps that recover little, so that they can be verified in full (`--guard`)."""

    budget: int = Field(ge=1, description="k that `estimate` was fitted at")
    m: int | None = Field(
        default=None, ge=0, description="of it, and of another k in proportion; None if that is not known"
    )
    depth: int | None = Field(
        default=None,
        ge=1,
        description="draft tokens per step that it was fitted at; None if that is not known",
    )
    draft_cache: Literal["full", "sink+window"] = Field(default="full", description="of the draft that was traced")
    estimate: Estimate
    sizes: tuple[int, ...] = Field(min_length=1, description="k that `across` was fitted at, together")
    across: Estimate = Field(description="the estimate for every other k")
    documents: int = Field(ge=1, description="that the two were fitted on")
    errors_of: Literal["held_out", "in_sample"] = Field(description="documents that errors were measured on")

    @model_validator(mode="after")
    def _ascending(self) -> Guard:
        if list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise FieldFault(f"sizes {list(self.sizes)}: give budgets in ascending order", "sizes")
        return self

    @model_serializer(mode="wrap")
    def _without_nothing(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out what older files do not say."""
        data: dict[str, Any] = serialise(self)
        return {name: value for name, value in data.items() if value is not None}

    def at(self, budget: int) -> Estimate:
        """The estimate for lists of so many tokens."""
        return self.estimate if budget == self.budget else self.across


class AdaptiveBudget(_Strict):
    """A budget for each step and row: the smallest whose estimated ARR reaches the target, else the largest."""

    target_arr: float = Field(gt=0, le=1)
    sizes: tuple[int, ...] = Field(default=ADAPTIVE_SIZES, min_length=1, description="k to choose from, ascending")

    @model_validator(mode="after")
    def _ascending(self) -> AdaptiveBudget:
        if list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise FieldFault(f"sizes {list(self.sizes)}: give budgets in ascending order", "sizes")
        return self


def changed(selection: Selection, budget: int | None, m: int | None) -> Selection:
    """The selection with another budget, m in proportion as far as it leaves room for what is protected, or another m.

    Raises:
        UsageError: the split is invalid.
    """
    changes: dict[str, int] = {}
    if budget is not None:
        room = max(budget - selection.sink - selection.window, 0)
        changes = {"budget": budget, "m": min(selection.m * budget // selection.budget, room)}
    if m is not None:
        changes["m"] = m
    try:
        return Selection.model_validate(selection.model_dump() | changes)
    except ValidationError as error:
        flags = ", ".join(flag for flag, value in (("--budget", budget), ("--m", m)) if value is not None)
        raise UsageError(f"{flags}: {one_line(error)}") from None


class DustinConfig(_Strict):
    """An emitted configuration."""

    schema_version: int = SCHEMA_VERSION
    pair: PairIdentity
    depth: int = Field(ge=1, le=MAX_DEPTH, description="draft tokens per step (Gamma)")
    selection: Selection
    draft_cache: Literal["full", "sink+window"] = Field(
        default="full", description="what the draft attends to: everything, or as many first and last tokens as budget"
    )
    rope: RopeScaling | None = Field(default=None, description="RoPE scaling that replaces both models' own")
    guard: Guard | None = Field(default=None, description="what estimates a step's ARR; None if that was not fitted")
    adaptive_budget: AdaptiveBudget | None = Field(default=None, description="instead of selection.budget")
    evidence: dict[str, Any] = {}
    provenance: dict[str, Any] = {}

    @model_serializer(mode="wrap")
    def _without_nothing(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out what files from before it do not have, where it is None."""
        data: dict[str, Any] = serialise(self)
        for name in ("guard", "adaptive_budget"):
            if data.get(name, ...) is None:
                del data[name]
        return data

    @model_validator(mode="after")
    def _heads_exist(self) -> DustinConfig:
        for side, model, chosen in (
            ("history", self.pair.target, (self.selection.history,)),
            ("lookahead", self.pair.draft, self.selection.lookahead),
        ):
            for number, entry in enumerate(chosen):
                at: tuple[int | str, ...] = ("selection", side)
                if side == "lookahead":
                    at += (number,)
                if entry.layer >= model.layers:
                    raise FieldFault(
                        f"selection.{side}.layer {entry.layer}: {model.id} has layers 0..{model.layers - 1}",
                        *at,
                        "layer",
                    )
                if wrong := [head for head in entry.heads if not 0 <= head < model.query_heads]:
                    raise FieldFault(
                        f"selection.{side}.heads {wrong[0]}: {model.id} has query heads 0..{model.query_heads - 1}",
                        *at,
                        "heads",
                    )
                if len(set(entry.heads)) < len(entry.heads):
                    raise FieldFault(f"selection.{side}.heads of layer {entry.layer} repeat a head", *at, "heads")
                if entry.layer in [other.layer for other in chosen[:number]]:
                    raise FieldFault(f"selection.{side} repeats a layer", *at, "layer")
        target, heads = self.pair.target, self.selection.retrieval_heads
        if heads and len(heads) != target.layers:
            raise FieldFault(
                f"selection.retrieval_heads has {len(heads)} layers, {target.id} has {target.layers}",
                "selection",
                "retrieval_heads",
            )
        for layer, chosen_heads in enumerate(heads):
            if not chosen_heads or not set(chosen_heads) <= set(range(target.query_heads)):
                raise FieldFault(
                    f"selection.retrieval_heads {layer}: give some of {target.id}'s query heads"
                    f" 0..{target.query_heads - 1}",
                    "selection",
                    "retrieval_heads",
                    layer,
                )
        if self.adaptive_budget:
            if self.guard is None:
                raise FieldFault(
                    "adaptive_budget needs guard, whose estimate it goes by: search again", "adaptive_budget"
                )
            smallest, sink, window = self.adaptive_budget.sizes[0], self.selection.sink, self.selection.window
            if fault := budget_fault(smallest, 0, sink, window):
                raise FieldFault(f"adaptive_budget.sizes: {fault}", "adaptive_budget", "sizes")
        return self

    @property
    def draft_budget(self) -> int | None:
        """Tokens of its cache that the draft reads; None for all."""
        return self.selection.budget if self.draft_cache == "sink+window" else None

    def require(self, target: tuple[str, ModelShape], draft: tuple[str, ModelShape], tokenizer: str) -> None:
        """Refuse to be used with models it was not made for.

        Ids may differ (a local copy has another name); what decides is the shape and the tokenizer.

        Raises:
            ConfigError: names the first field that differs.
        """
        for side, (name, shape) in (("target", target), ("draft", draft)):
            wanted: ModelIdentity = getattr(self.pair, side)
            found = ModelIdentity.of(name, shape)
            for field in list(ModelIdentity.model_fields)[1:]:
                if (want := getattr(wanted, field)) != (have := getattr(found, field)):
                    raise ConfigError(
                        f"pair.{side}.{field}: the config was made for {wanted.id} with {want}, {name} has {have};"
                        " load the pair it was made for, or run dustin-profile search for this one"
                    )
        if tokenizer != self.pair.tokenizer:
            raise ConfigError("pair.tokenizer: the loaded tokenizer is not the one that the config was made with")


class _Versioned(BaseModel):
    """Only the version, read first so that a newer file is refused by its version, not by its unknown keys."""

    model_config = ConfigDict(extra="allow")
    schema_version: int


def load_config(path: Path) -> DustinConfig:
    """Read an emitted YAML.

    Raises:
        MissingError: absent or unreadable.
        ConfigError: names line and key of the first fault; a newer schema is refused by its version.
    """
    if path.is_dir():
        path = path / "config.yaml"
    versioned = read_yaml(path, _Versioned)
    version = versioned.schema_version
    if version > SCHEMA_VERSION or version < min(MIGRATIONS, default=SCHEMA_VERSION):
        raise ConfigError(
            f"{path}: schema_version {version} is not readable here (this is {SCHEMA_VERSION}): "
            + ("upgrade dustin" if version > SCHEMA_VERSION else "search again")
        )
    if version == SCHEMA_VERSION:
        return _with_fit(read_yaml(path, DustinConfig))
    data = versioned.model_dump()
    while data["schema_version"] < SCHEMA_VERSION:
        data = MIGRATIONS[data["schema_version"]](data)
    try:
        return _with_fit(DustinConfig.model_validate(data))
    except ValidationError as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None


def _with_fit(config: DustinConfig) -> DustinConfig:
    """A guard from before it said what it was fitted at was fitted at what stands beside it."""
    guard = config.guard
    if guard is None or guard.depth is not None or guard.budget != config.selection.budget:
        return config
    said = guard.model_copy(update={"m": config.selection.m, "depth": config.depth})
    return config.model_copy(update={"guard": said})


def save_config(config: DustinConfig, path: Path) -> None:
    """Write a config atomically, in the order of the schema."""
    write_text(
        path,
        dump_yaml(config.model_dump(mode="json"), "# Emitted by dustin-profile search; serve it with dustin-run.\n"),
    )
