"""A pair of models: found, checked against each other, then loaded."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dustin_runtime.config import DustinConfig, ModelIdentity, PairIdentity
from dustin_runtime.errors import CapacityError, ConfigError, MissingError, OtherWeightsWarning, UsageError
from dustin_runtime.memory_plan import DraftStores
from dustin_runtime.models.shape import ModelShape, RopeScaling

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from dustin_runtime.models.decoder import Decoder
    from dustin_runtime.models.source import Source
    from dustin_runtime.parallel.collectives import Collectives

SELF = "self:"
"""A draft called `self:N` is the target's first N layers with the target's own norm and head."""


@dataclass(frozen=True)
class Pair:
    """A target and its draft, tokenizers checked, weights not loaded yet.

    Attributes:
        draft_source: None for a draft made of the target's first layers.
        draft_stores: what of its weights the draft has for itself; the rest it shares with its target.
        shared_vocab: ids below it are in both tokenizers; no other id is proposed, sampled or compared.
    """

    target_source: Source
    draft_source: Source | None
    target_shape: ModelShape
    draft_shape: ModelShape
    draft_id: str
    tokenizer: PreTrainedTokenizerFast
    tokenizer_hash: str
    shared_vocab: int
    rope: RopeScaling | None
    draft_stores: DraftStores = "all"

    @property
    def target_id(self) -> str:
        return self.target_source.id

    def identity(self) -> PairIdentity:
        """What an emitted config records of the pair."""
        return PairIdentity(
            target=ModelIdentity.of(self.target_id, self.target_shape),
            draft=ModelIdentity.of(self.draft_id, self.draft_shape),
            tokenizer=self.tokenizer_hash,
            shared_vocab=self.shared_vocab,
        )

    def provenance(self) -> dict[str, Any]:
        """Where both models came from: ids, resolved revisions, content hashes (of the target's files for `self:N`)."""
        return {
            side: {"id": name, "revision": source.revision, "sha256": source.content_hash()}
            for side, name, source in (
                ("target", self.target_id, self.target_source),
                ("draft", self.draft_id, self.draft_source or self.target_source),
            )
        }

    def stop_ids(self) -> frozenset[int]:
        """Ids that end a text: end-of-text and end-of-turn."""
        from dustin_runtime.models.tokenizer import stop_ids

        return frozenset(stop_ids(self.tokenizer, self.target_source.generation_config()))

    def with_rope(self, rope: RopeScaling | None) -> Pair:
        """The same pair under another RoPE scaling; None leaves it."""
        if rope is None:
            return self
        target, draft = self.target_shape.with_rope(rope), self.draft_shape.with_rope(rope)
        return replace(self, target_shape=target, draft_shape=draft, rope=rope)

    def load_target(
        self, dtype: torch.dtype, device: str, ranks: Collectives | None = None, *, pipeline: bool = False
    ) -> Decoder:
        """Load the target's weights, or what of them is this rank's."""
        from dustin_runtime.models.weights import load_decoder

        return load_decoder(self.target_source.path, self.target_shape, dtype, device, ranks, pipeline=pipeline)

    def load_draft(self, target: Decoder) -> Decoder:
        """Load the draft's weights next to the target's, or share the target's.

        Every rank has the whole draft, for its own rows; only `self:N` is split as the target is, whose layers it has.
        """
        from dustin_runtime.models.weights import load_decoder, load_headless

        if self.draft_source is None:
            return target.first_layers(self.draft_shape.layers)
        if self.draft_stores == "layers":
            return load_headless(self.draft_source.path, self.draft_shape, target)
        return load_decoder(self.draft_source.path, self.draft_shape, target.dtype, target.device)


def open_pair(target: str, draft: str, *, rope: str | None = None, offline: bool = False) -> Pair:
    """Find both models and check that they belong together.

    Args:
        target, draft: hub id with optional @revision, folder, GGUF file, or the embedded `smollm2`; the draft may be
            `self:N`, `recipe:NAME`, or a folder that takes embedding and head from its target (`models.headless`).
        rope: `default`, `linear:FACTOR` or `yarn:FACTOR`, replacing both models' own RoPE scaling.

    Raises:
        MissingError: a model cannot be found or read.
        ConfigError: the models have different tokenizers, a draft of more layers than its target, or a draft that
            takes embedding and head from another target than this one.
        UsageError: `self:N` or `rope` is malformed.
    """
    from dustin_runtime.models.source import resolve
    from dustin_runtime.models.tokenizer import compare_tokenizers, tokenizer_hash

    target_source = resolve(target, offline=offline)
    target_shape = target_source.shape()
    if target_source.headless():
        raise ConfigError(f"--target {target}: has no embedding of its own; give it as --draft")
    tokenizer = target_source.tokenizer()
    hashed = tokenizer_hash(tokenizer)
    shared = len(tokenizer)
    stores: DraftStores = "all"
    if draft.startswith(SELF):
        draft_source, stores = None, "nothing"
        layers = self_layers(draft, target_shape)
        draft_shape = target_shape.model_copy(update={"layers": layers})
    else:
        draft_source = resolve(draft, offline=offline)
        draft_shape = draft_source.shape()
        if marker := draft_source.headless():
            from dustin_runtime.models.headless import require_fit

            require_fit(marker, (draft_source.id, draft_shape), (target_source.id, target_shape), hashed)
            stores = "layers"
        else:
            shared = compare_tokenizers(tokenizer, draft_source.tokenizer())
    pair = Pair(
        target_source=target_source,
        draft_source=draft_source,
        target_shape=target_shape,
        draft_shape=draft_shape,
        draft_id=draft_source.id if draft_source else draft,
        tokenizer=tokenizer,
        tokenizer_hash=hashed,
        shared_vocab=min(shared, target_shape.vocab, draft_shape.vocab),
        rope=None,
        draft_stores=stores,
    )
    scaling = parse_rope(rope, target_shape) if rope else None
    if scaling and scaling.type == "yarn" and draft_shape.context != target_shape.context:
        raise UsageError(
            f"--rope {rope}: target and draft were trained on {target_shape.context} and {draft_shape.context} tokens;"
            " one scaling cannot serve both"
        )
    return pair.with_rope(scaling)


def open_configured(
    config: DustinConfig, target: str | None, draft: str | None, *, rope: str | None = None, offline: bool = False
) -> Pair:
    """Find the pair that a config was made for: under the ids it recorded, unless it is said where.

    Warns with `OtherWeightsWarning` where a model has other weights than the one that was searched: these may be the
    same in another file format, or another model of the same shape, whose heads are others.

    Raises:
        MissingError: a model cannot be found.
        ConfigError: what is found is another pair.
        UsageError: `rope` is not what the config was searched with.
    """
    recorded = config.pair
    try:
        pair = open_pair(target or recorded.target.id, draft or recorded.draft.id, rope=rope, offline=offline)
    except MissingError as error:
        if target and draft:
            raise
        raise MissingError(f"{error}; say with --target and --draft where the config's models are") from None
    if rope and pair.rope != config.rope:
        searched = f"{config.rope.type}:{config.rope.factor:g}" if config.rope else "the models' own scaling"
        raise UsageError(f"--rope {rope}: the config was searched with {searched}; leave the option out")
    pair = pair if rope else pair.with_rope(config.rope)
    config.require((pair.target_id, pair.target_shape), (pair.draft_id, pair.draft_shape), pair.tokenizer_hash)
    _warn_of_other_weights(config, pair)
    return pair


def _warn_of_other_weights(config: DustinConfig, pair: Pair) -> None:
    found = pair.provenance()
    for side in ("target", "draft"):
        recorded = config.provenance.get(side)
        recorded = recorded if isinstance(recorded, dict) else {}
        searched = recorded.get("sha256")
        if searched and searched != found[side]["sha256"]:
            warnings.warn(
                f"{side} {found[side]['id']} has other weights than the config was searched with"
                f" ({recorded.get('id', side)}, {searched[:12]}; here {found[side]['sha256'][:12]}): fine if it is the"
                " same model in another format; another model's heads are others, which dustin-profile search finds",
                OtherWeightsWarning,
                stacklevel=3,
            )


def parse_rope(text: str, shape: ModelShape) -> RopeScaling:
    """Read `default`, `linear:FACTOR` or `yarn:FACTOR`; the trained length is the model's own context.

    Raises:
        UsageError: not of that form.
    """
    kind, _, factor = text.partition(":")
    try:
        if kind == "default" and not factor:
            return RopeScaling()
        if kind == "linear":
            return RopeScaling(type="linear", factor=float(factor))
        if kind == "yarn":
            return RopeScaling(type="yarn", factor=float(factor), original_context=shape.context)
    except ValueError:
        pass
    raise UsageError(f"--rope {text}: give default, linear:FACTOR or yarn:FACTOR with a factor of at least 1")


def pick_device(name: str) -> str:
    """`auto` is the first GPU if there is one.

    Raises:
        UsageError: torch does not know the device.
        CapacityError: a GPU is asked for that is not there.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: unknown; give auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise CapacityError(f"--device {name}: {count or 'no'} CUDA devices are available; use --device cpu")
    if device.type == "cpu":
        return "cpu"
    if device.index is not None:
        torch.cuda.set_device(device)  # Triton launches on the current device, whatever its arguments' is
    return name


def pick_dtype(name: str, device: str) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 on a CPU.

    Raises:
        UsageError: unknown name.
    """
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    if name == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    if name not in known:
        raise UsageError(f"--dtype {name}: unknown (known: auto, {', '.join(known)})")
    return known[name]


def self_layers(draft: str, target: ModelShape) -> int:
    """N of `self:N`.

    Raises:
        UsageError: N is not a number.
        ConfigError: the target has fewer layers.
    """
    try:
        layers = int(draft.removeprefix(SELF))
    except ValueError:
        raise UsageError(f"--draft {draft}: give a number of layers, such as self:6") from None
    if not 1 <= layers <= target.layers:
        raise ConfigError(f"--draft {draft}: the target has {target.layers} layers; give 1 to {target.layers}")
    return layers
