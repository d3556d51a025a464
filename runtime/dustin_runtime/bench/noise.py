"""Caches of noise. Over ranks, what several of them hold is the same on each: they could not decide alike otherwise."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from dustin_runtime.cache import KVCache
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.policies import Policy
from dustin_runtime.policies.base import Prompted
from dustin_runtime.scaled import E4M3, narrowed, scale_for
from dustin_runtime.state import State
from dustin_runtime.step import Stepper


def fill(stepper: Stepper, state: State, context: int) -> None:
    """Caches of noise, every row `context` tokens long and active."""
    device = state.lengths.device
    for side, model, cache in (
        ("target", stepper.target, state.target_cache),
        ("draft", stepper.draft, state.draft_cache),
    ):
        if model is not None and cache is not None:
            blocks = state.blocks if side == "draft" else None
            _fill_cache(cache, model, side, blocks.here.start if blocks else 0)
    if state.history_query is not None:  # of the rank's own heads
        share = stepper.target.split and stepper.target.split.share
        state.history_query.normal_(generator=_random(device, "history", share.rank if share else 0))
    for row in range(state.rows) if state.memory or state.draft_lists else ():
        drafted = None
        place = state.blocks.place(row) if state.blocks else row
        if stepper.draft and state.draft_cache and place is not None:
            cache = state.draft_prefill or state.draft_cache.row(place)
            drafted = _prompted(stepper.draft, stepper.policy, cache, context, f"draft {row}")
        if state.memory:
            cache = state.target_cache.row(row)
            target = _prompted(stepper.target, stepper.policy, cache, context, f"target {row}")
            state.memory.admit(row, target, drafted)
        if state.draft_lists and drafted:
            state.draft_lists.take(row, drafted)
    state.sampling.seed.copy_(torch.arange(state.rows))
    state.recent.random_(0, 1000, generator=_random(device, "recent", 0))
    state.lengths.fill_(context)
    state.active.fill_(True)


def _fill_cache(cache: KVCache, model: Decoder, side: str, first: int) -> None:
    """Head by head and row by row, so that these have the same noise on every rank that holds them, and in one process.

    Args:
        first: number of the cache's first row.
    """
    heads = model.split.share.kv_heads if model.split else range(model.shape.kv_heads)
    one = scale_for(torch.ones((), device=cache.keys.device))
    for scales in (cache.key_scales, cache.value_scales):
        if scales is not None:
            scales.copy_(one)
    for kind, layers in (("keys", cache.keys), ("values", cache.values), ("scored", cache.scored)):
        for index, layer in enumerate(layers if layers is not None else ()):
            for number, row in enumerate(layer, start=first):  # [slots, kv_heads, head_size]
                for place, head in enumerate(heads):
                    source = _random(layer.device, f"{side} {kind} {index} {number}", head)
                    if layer.dtype == E4M3:
                        noise = torch.empty_like(row[:, place], dtype=model.dtype).normal_(generator=source)
                        row[:, place] = narrowed(noise[None, :, None], one.expand(1, 1))[0, :, 0]
                    else:
                        row[:, place].normal_(generator=source)


def _random(device: torch.device, what: str, number: int) -> torch.Generator:
    """Numbers of their own for each part of a state."""
    seed = hashlib.blake2b(f"{what} {number}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(seed) >> 1)


def _prompted(model: Decoder, policy: Policy, cache: KVCache, context: int, what: str) -> Prompted:
    """A prompt in a cache of noise. Queries come head by head, as keys do; methods that ask what positions received are
    not split over ranks."""
    shape, device = model.shape, cache.keys.device
    size = (1, policy.prompt_queries, shape.query_heads, shape.head_size)
    queries = {}
    for layer in range(shape.layers) if policy.prompt_queries else ():
        queries[layer] = torch.empty(size, device=device, dtype=model.dtype)
        for place, head in enumerate(model.query_heads):
            queries[layer][:, :, place].normal_(generator=_random(device, f"{what} queries {layer}", head))
    mass = {layer: torch.rand(1, shape.kv_heads, context, device=device) for layer in range(shape.layers)}
    return Prompted(context, cache, queries, mass, zlib.crc32(what.encode()))


def fingerprint(model: Decoder) -> int:
    """A number of all weights that are whole on every rank, to compare them by; exact, without a copy."""
    return hash(tuple(int(x.view(_INTEGERS[x.itemsize]).sum(dtype=torch.int64)) for x in _whole(model)))


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _whole(model: Decoder) -> Iterator[Tensor]:
    weights = model.weights
    yield weights.embedding
    yield weights.norm
    if model.split is None:
        yield weights.head
    for layer in weights.layers:
        yield layer.attention_norm
        yield layer.mlp_norm
        if model.split is None:
            yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
