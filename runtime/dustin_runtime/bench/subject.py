"""What a grid times: a pair of real models, or noise in the shapes of a known pair; loaded only when asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dustin_runtime.bench.workload import SINK, WINDOW, spread_heads
from dustin_runtime.config import DustinConfig, Selection
from dustin_runtime.errors import MissingError, UsageError
from dustin_runtime.memory_plan import DraftStores
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.pairs import find_pair

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from dustin_runtime.loading import Pair
    from dustin_runtime.parallel.collectives import Collectives

LONG = 1 << 20
"""Context of models of noise: positions that their shapes were never trained for are fine."""


@dataclass(frozen=True)
class Subject:
    """A pair of models before it is loaded.

    Attributes:
        draft_stores: what of its weights the draft does not share with the target.
        tokenizer: None for noise, which reads no text.
        origins: of `target` and `draft`, what makes them the models that they are.
        load: target and draft, or what of them is a rank's.
    """

    name: str
    target: ModelShape
    draft: ModelShape
    draft_stores: DraftStores
    selection: Selection
    depth: int
    shared_vocab: int
    tokenizer: PreTrainedTokenizerFast | None
    origins: Callable[[], Mapping[str, Mapping[str, object]]]
    load: Callable[[Collectives | None], tuple[Decoder, Decoder]]


def noise(pair: str, served: DustinConfig | None, dtype: torch.dtype, device: str) -> Subject:
    """Random weights in the shapes of a known pair.

    Raises:
        ConfigError: `served` was made for other shapes.
        UsageError: no pair is called so.
    """
    recipe = find_pair(pair)
    if served:
        found = [(model.hub, model.shape) for model in (recipe.target, recipe.draft)]
        served.require(found[0], found[1], served.pair.tokenizer)
    target, draft = (model.shape.model_copy(update={"context": LONG}) for model in (recipe.target, recipe.draft))
    return Subject(
        recipe.name,
        target,
        draft,
        draft_stores="all",
        selection=served.selection if served else spread(target, draft, recipe.budget),
        depth=served.depth if served else recipe.depth,
        shared_vocab=recipe.target.tokenizer_vocab or min(target.vocab, draft.vocab),
        tokenizer=None,
        origins=lambda: {"target": {"shape": target}, "draft": {"shape": draft}},
        load=lambda ranks: (
            random_decoder(target, dtype, device, 0, ranks),
            random_decoder(draft, dtype, device, 1),
        ),
    )


def real(pair: Pair, name: str, served: DustinConfig | None, depth: int, dtype: torch.dtype, device: str) -> Subject:
    """A pair with its own weights."""

    def load(ranks: Collectives | None) -> tuple[Decoder, Decoder]:
        target = pair.load_target(dtype, device, ranks)
        return target, pair.load_draft(target)

    return Subject(
        name,
        pair.target_shape,
        pair.draft_shape,
        draft_stores=pair.draft_stores,
        selection=served.selection if served else spread(pair.target_shape, pair.draft_shape, 512),
        depth=depth,
        shared_vocab=pair.shared_vocab,
        tokenizer=pair.tokenizer,
        origins=pair.provenance,
        load=load,
    )


def spread(target: ModelShape, draft: ModelShape, budget: int) -> Selection:
    """Heads as a search might choose them, where no config says: four per layer, spread over the KV heads."""
    layers = sorted({draft.layers * part // 4 for part in (1, 2, 3)})
    return Selection(
        budget=budget,
        sink=SINK,
        window=WINDOW,
        m=(budget - SINK - WINDOW) // 3,
        history=spread_heads(target, target.layers // 2),
        lookahead=tuple(spread_heads(draft, layer) for layer in layers),
        retrieval_heads=tuple(spread_heads(target, layer).heads for layer in range(target.layers)),
    )


def parts_of_text(
    tokenizer: PreTrainedTokenizerFast | None, files: Sequence[Path], rows: int, tokens: int
) -> list[list[int]]:
    """Prompts from files: parts of the text, one per row, evenly spaced over it.

    Raises:
        UsageError: there is no tokenizer.
        MissingError: a file cannot be read, or all are too short.
    """
    from dustin_runtime.prompts import gather_prompts

    if tokenizer is None:
        raise UsageError("--random-weights cannot read --file; give --synthetic-context")
    ids: list[int] = []
    for text in gather_prompts([], files, None, ""):
        ids += tokenizer.encode(text, add_special_tokens=False)
    if len(ids) < tokens:
        names = ", ".join(map(str, files))
        raise MissingError(f"{names}: {len(ids)} tokens of text do not fill a context of {tokens}; give more --file")
    step = (len(ids) - tokens) // max(rows - 1, 1)
    return [ids[row * step : row * step + tokens] for row in range(rows)]
