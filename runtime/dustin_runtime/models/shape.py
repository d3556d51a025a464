"""What a model looks like, from its Hugging Face `config.json`: everything that prices, builds or identifies it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dustin_runtime.errors import CapacityError, ConfigError
from dustin_runtime.validation import one_line

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

FAMILY_OF_ARCHITECTURE: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


class RopeScaling(BaseModel):
    """How rotary frequencies are stretched beyond the context a model was trained on.

    `original_context` is the trained length; the other fields are those of the type's own publication
    (`llama3`: Llama 3.1's config; `yarn`: arXiv 2309.00071).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = Field(default=1.0, ge=1.0, allow_inf_nan=False)
    original_context: int | None = Field(default=None, ge=1)
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Factor on cos and sin; None is YaRN's own 0.1 ln(factor) + 1."""

    @model_validator(mode="after")
    def _complete(self) -> RopeScaling:
        if self.type in ("llama3", "yarn") and self.original_context is None:
            raise ValueError(f"rope type {self.type} needs original_context, the length the model was trained on")
        return self


class ModelShape(BaseModel):
    """Sizes and switches of one decoder. Equal shapes need equal memory and time, whatever the weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: Family
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    ffn: int = Field(ge=1, description="inner width of the gated MLP")
    query_heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_size: int = Field(ge=2)
    vocab: int = Field(ge=1, description="rows of the embedding: padded beyond the tokenizer's own vocabulary")
    context: int = Field(ge=1, description="positions that the model may be used at")
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope: RopeScaling = RopeScaling()
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> ModelShape:
        if self.query_heads % self.kv_heads:
            raise ValueError(f"{self.query_heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.head_size % 2:
            raise ValueError(f"head size {self.head_size} is odd, which rotary embedding cannot split")
        return self

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def parameters(self) -> int:
        """Number of weights, an embedding shared with the head counted once."""
        width = (self.query_heads + 2 * self.kv_heads) * self.head_size
        attention = self.hidden * width + self.query_heads * self.head_size * self.hidden
        extras = (width if self.qkv_bias else 0) + (2 * self.head_size if self.qk_norm else 0) + 2 * self.hidden
        layer = attention + 3 * self.hidden * self.ffn + extras
        return self.layers * layer + self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    def kv_bytes(self, tokens: int, element_bytes: int) -> int:
        """Bytes of keys and values of `tokens` positions, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * tokens * element_bytes

    def with_rope(self, rope: RopeScaling) -> ModelShape:
        """The same model with another RoPE scaling; YaRN and linear scaling widen the context by their factor."""
        context = self.context
        if rope.type in ("yarn", "linear"):
            context = max(context, int((rope.original_context or self.context) * rope.factor))
        return self.model_copy(update={"rope": rope, "context": context})


def check_context(shape: ModelShape, tokens: int, what: str) -> None:
    """Refuse more positions than the model can be used at.

    Raises:
        CapacityError: naming `what` asks for them.
    """
    if tokens > shape.context:
        stretch = ", or stretch the model (--rope yarn:FACTOR; a config has to be searched with it)"
        hint = stretch if shape.rope.type == "default" else ""
        raise CapacityError(f"{what}: {tokens} tokens exceed the model's context of {shape.context}: shorten it{hint}")


def shape_from_hf(config: Mapping[str, Any], name: str = "config.json") -> ModelShape:
    """Read a Hugging Face `config.json`.

    Raises:
        ConfigError: for an architecture, RoPE type, activation or bias that the decoder lacks; it names it.
    """
    architecture = (config.get("architectures") or ["none given"])[0]
    family = FAMILY_OF_ARCHITECTURE.get(architecture)
    if family is None:
        known = ", ".join(FAMILY_OF_ARCHITECTURE)
        raise ConfigError(f"{name}: architecture {architecture} is not supported (supported: {known})")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"{name}: hidden_act {activation} is not supported (supported: silu)")
    for flag in ("mlp_bias",) + (("attention_bias",) if family in ("llama", "mistral", "qwen3") else ()):
        if config.get(flag):
            raise ConfigError(f"{name}: {flag} is not supported for {architecture}")
    try:
        heads = int(config["num_attention_heads"])
        context = int(config["max_position_embeddings"])
        theta, rope = _rope(config, context, name)
        if family == "mistral" and config.get("sliding_window"):
            context = min(context, int(config["sliding_window"]))  # beyond it the model would need windowed attention
        if family in ("qwen2", "qwen3") and config.get("use_sliding_window"):
            raise ConfigError(f"{name}: use_sliding_window is not supported (set it to false)")
        return ModelShape(
            family=family,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            query_heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            context=context,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope=rope,
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
        )
    except KeyError as missing:
        raise ConfigError(f"{name}: {missing.args[0]} is missing") from None
    except ValidationError as error:
        raise ConfigError(f"{name}: {one_line(error)}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: a size is not a number ({error})") from None


def _rope(config: Mapping[str, Any], context: int, name: str) -> tuple[float, RopeScaling]:
    """RoPE base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    raw = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(raw.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ConfigError(f"{name}: RoPE type {kind} is not supported (supported: default, linear, llama3, yarn)")
    if unknown := sorted({"mscale", "mscale_all_dim", "partial_rotary_factor"} & raw.keys()):
        raise ConfigError(f"{name}: RoPE parameter {unknown[0]} is not supported")
    if raw.get("truncate") is False:
        raise ConfigError(f"{name}: RoPE parameter truncate=false is not supported")
    names = {
        "factor": "factor",
        "original_max_position_embeddings": "original_context",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    }
    fields = {ours: raw[theirs] for theirs, ours in names.items() if raw.get(theirs) is not None}
    if kind == "default":
        return theta, RopeScaling()
    if kind in ("llama3", "yarn"):
        fields.setdefault("original_context", context)
    return theta, RopeScaling(type=kind, **fields)
