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
from dustin_runtime.attention.scoring import rows_at
from dustin_runtime.errors import NothingMeasuredError
from dustin_runtime.greedy import GreedyDecoder
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.parallel.watch import LONG
from dustin_runtime.prefill import CHUNK, prefill
from dustin_runtime.scaled import Held

GPU_CHUNK = 1024
"""Prompt tokens at a time on a GPU: smaller, and launches cost more than is computed; larger, and less is shared."""


class Score(NamedTuple):
    """What one prompt says about every head."""

    accepted: bool
    response: str
    span: Tensor
    """[layers, query_heads] fp32: attention mass on the answer, mean over the steps, credit `span`."""
    copies: Tensor
    """The same with credit `copies`."""


class Prober:
    """Runs needle prompts through one model, keeping the parts of the cache that consecutive prompts share.

    All ranks that a model is split over run the same prompts, and come to the same scores.

    Args:
        rows: prompts whose answers are generated together.
    """

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
        rows: int = 1,
    ) -> None:
        self.model = model
        self.decode, self.accept, self.stop = decode, accept, stop
        self.rows = rows
        self.chunk = GPU_CHUNK if model.device.type == "cuda" else CHUNK
        self.cache = model.cache(rows, capacity + steps)
        self.decoder = GreedyDecoder(model, self.cache, vocab, steps) if mode == "generate" else None
        self._held: list[Sequence[int]] = [()] * rows
        """By row, the prompt tokens that the cache holds."""

    def reused(self, row: int, ids: Sequence[int]) -> int:
        """How many leading tokens of `ids` a row of the cache holds already.

        Only whole chunks count, so that every chunk is computed in the same shape whatever came before: an
        interrupted run gives the same bits as an undisturbed one.
        """
        held, size, shared = self._held[row], self.chunk, 0
        while (
            shared + size <= min(len(held), len(ids) - 2)
            and held[shared : shared + size] == ids[shared : shared + size]
        ):
            shared += size
        return shared

    def score(self, sample: Sample) -> Score:
        """Score every head on one prompt. Raises as `score_all`."""
        return self.score_all([sample])[0]

    @torch.inference_mode()
    def score_all(self, samples: Sequence[Sample]) -> list[Score]:
        """Score every head on each of at most `rows` prompts.

        The token at answer step t is credited by the query that produces it, the one before it, with its whole
        attention mass on the answer's tokens inside the needle.

        Raises:
            NothingMeasuredError: the model computes something that is not finite.
        """
        with self.model.watched(LONG):
            for row, sample in enumerate(samples):
                self._prefill(row, sample.ids)  # the last token is the first query to observe
            answers = self._answers(samples) if self.decoder else [sample.answer_ids for sample in samples]
            return [self._score(row, *each) for row, each in enumerate(zip(samples, answers, strict=True))]

    def _prefill(self, row: int, ids: Sequence[int]) -> None:
        """All tokens of a prompt but the last, of which the best row's part is copied."""
        shared, _, source = max((self.reused(other, ids), other == row, other) for other in range(self.rows))
        if source != row:
            for held in (self.cache.keys, self.cache.values):
                held[:, row, :shared] = held[:, source, :shared]
        prefill(self.model, self.cache.row(row), ids[shared:-1], shared, chunk=self.chunk)
        self._held[row] = ids[:-1]

    def _answers(self, samples: Sequence[Sample]) -> list[list[int]]:
        """What the model says, greedily."""
        assert self.decoder
        lengths = [len(sample.ids) for sample in samples]
        last = []
        for row, sample in enumerate(samples):
            last.append(prefill(self.model, self.cache.row(row), sample.ids[-1:], lengths[row] - 1))
            _require_finite(last[-1], sample)
        self._held[len(samples) :] = [()] * (self.rows - len(samples))  # rows that idle lose what they hold
        return self.decoder(torch.stack(last), lengths, self.stop)

    def _score(self, row: int, sample: Sample, answer: list[int]) -> Score:
        ids = sample.ids
        response = self.decode(answer)
        if self.decoder and not self.accept(response, sample.needle):
            nothing = torch.zeros(self.model.shape.layers, self.model.whole.query_heads)
            return Score(False, response, nothing, nothing)
        mass = self._span_mass(row, [ids[-1], *answer[:-1]], len(ids) - 1, sample.span)
        _require_finite(mass, sample)
        held = Counter(ids[position] for position in sample.span)
        copies = torch.tensor([float(held[token]) for token in answer])
        steps = len(answer)
        return Score(True, response, mass @ copies.clamp(max=1) / steps, mass @ copies / steps)

    def _span_mass(self, row: int, tokens: list[int], start: int, span: Sequence[int]) -> Tensor:
        """Attention mass on `span` of every head and query: [layers, query_heads, len(tokens)] fp32, on the CPU.

        Of a model that is split each rank finds that of its own heads, and all have the whole.
        """
        model = self.model
        mass = torch.zeros(model.shape.layers, model.whole.query_heads, len(tokens), device=model.device)
        own = mass[:, model.query_heads.start : model.query_heads.stop]
        position = torch.arange(start, start + len(tokens), device=self.model.device).unsqueeze(0)
        answer = torch.tensor(span, device=self.model.device)

        def observe(layer: int, q: Tensor, k: Held, v: Held, begin: Tensor) -> Tensor:
            own[layer] = rows_at(q, k, position)[0].flatten(0, 1).index_select(2, answer).sum(dim=2)
            return dense_attention(layer, q, k, v, begin)

        ids, begin = torch.tensor([tokens], device=self.model.device), position[:, 0]
        self.model.forward(ids, begin, self.cache.row(row), observe, extent=start + len(tokens))
        return model.summed(mass).cpu()


def _require_finite(values: Tensor, sample: Sample) -> None:
    if not bool(values.isfinite().all()):
        raise NothingMeasuredError(
            f"needle {sample.needle} at length {sample.length}: the model computes values that are not finite;"
            " try --dtype float32, or download it again"
        )
