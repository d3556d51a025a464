"""Scoring heads on needle prompts (CompressKV, arXiv 2508.02401, Eq. 5), at O(keys) per head and answer token.

A prompt is prefilled like any other; only the queries that produce the answer's tokens meet the cached keys again, one
layer and one KV head at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dustin_profile.choices import Mode
from dustin_profile.prompts import Sample
from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.scoring import attention_rows
from dustin_runtime.errors import NothingMeasuredError
from dustin_runtime.greedy import GreedyDecoder
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.prefill import CHUNK, prefill


class Score(NamedTuple):
    """What one prompt says about every head."""

    accepted: bool
    response: str
    span: Tensor
    """[layers, query_heads] fp32: attention mass on the answer, mean over the steps, credit `span`."""
    copies: Tensor
    """The same with credit `copies`."""


class Prober:
    """Runs needle prompts through one model, keeping the part of the cache that consecutive prompts share."""

    def __init__(
        self,
        model: Decoder,
        *,
        mode: Mode,
        decode: Callable[[Sequence[int]], str],
        accept: Callable[[str, int], bool],
        stop: Callable[[list[int]], bool],
        vocab: int,
        capacity: int,
        steps: int = 32,
    ) -> None:
        self.model = model
        self.decode, self.accept, self.stop = decode, accept, stop
        self.cache = model.cache(1, capacity + steps)
        self.decoder = GreedyDecoder(model, self.cache, vocab, steps) if mode == "generate" else None
        self._held: list[int] = []

    def reused(self, ids: Sequence[int]) -> int:
        """How many leading tokens of `ids` the cache holds already.

        Only whole chunks count, so that every chunk is computed in the same shape whatever came before: an
        interrupted run gives the same bits as an undisturbed one.
        """
        return min(_common(self._held, ids), len(ids) - 2) // CHUNK * CHUNK

    @torch.inference_mode()
    def score(self, sample: Sample) -> Score:
        """Score every head on one prompt.

        The token at answer step t is credited by the query that produces it, the one before it, with its whole
        attention mass on the answer's tokens inside the needle.

        Raises:
            NothingMeasuredError: the model computes something that is not finite.
        """
        ids = sample.ids
        shared = self.reused(ids)
        prefill(self.model, self.cache, ids[shared:-1], shared)  # the last token is the first query to observe
        self._held = ids[:-1]
        if self.decoder:
            last = prefill(self.model, self.cache, ids[-1:], len(ids) - 1)
            _require_finite(last, sample)
            (answer,) = self.decoder(last.unsqueeze(0), [len(ids)], self.stop)
            response = self.decode(answer)
            if not self.accept(response, sample.needle):
                nothing = torch.zeros(self.model.shape.layers, self.model.shape.query_heads)
                return Score(False, response, nothing, nothing)
        else:
            answer = sample.answer_ids
            response = self.decode(answer)
        mass = self._span_mass([ids[-1], *answer[:-1]], len(ids) - 1, sample.span)
        _require_finite(mass, sample)
        held = Counter(ids[position] for position in sample.span)
        copies = torch.tensor([float(held[token]) for token in answer])
        steps = len(answer)
        return Score(True, response, mass @ copies.clamp(max=1) / steps, mass @ copies / steps)

    def _span_mass(self, tokens: list[int], start: int, span: Sequence[int]) -> Tensor:
        """Attention mass on `span` of every head and query: [layers, query_heads, len(tokens)] fp32, on the CPU."""
        shape = self.model.shape
        mass = torch.zeros(shape.layers, len(tokens), shape.query_heads, device=self.model.device)
        position = torch.arange(start, start + len(tokens), device=self.model.device).unsqueeze(0)
        answer = torch.tensor(span, device=self.model.device)
        heads = range(shape.query_heads)

        def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, begin: Tensor) -> Tensor:
            for entries, rows in attention_rows(q, k, heads, shape.group, position):
                mass[layer][:, entries] = rows[0][..., answer].sum(dim=-1)
            return dense_attention(layer, q, k, v, begin)

        ids, begin = torch.tensor([tokens], device=self.model.device), position[:, 0]
        self.model.forward(ids, begin, self.cache, observe, extent=start + len(tokens))
        return mass.transpose(1, 2).cpu()


def _require_finite(values: Tensor, sample: Sample) -> None:
    if not bool(values.isfinite().all()):
        raise NothingMeasuredError(
            f"needle {sample.needle} at length {sample.length}: the model computes values that are not finite;"
            " try --dtype float32, or download it again"
        )


def _common(held: Sequence[int], ids: Sequence[int]) -> int:
    """Length of the common prefix."""
    for index, (left, right) in enumerate(zip(held, ids, strict=False)):
        if left != right:
            return index
    return min(len(held), len(ids))
