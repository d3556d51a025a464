"""Collecting traces: the target's own trajectory, then one observed, teacher-forced pass of each model over it.

Of a model that is split over ranks each observes its own heads, and rows are added up over ranks. All of them do the
same, a draft that is whole on each included, and have the same windows: what is decided falls alike.

Attention rows are computed for the queries and heads that a window needs, one layer at a time, and summed at once:
memory grows linearly with the context, and full attention tensors never exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dustin_profile.choices import Lookahead
from dustin_profile.traces.trajectories import Trajectories
from dustin_profile.traces.windows import Windows
from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.scoring import attention_rows
from dustin_runtime.cache import KVCache
from dustin_runtime.errors import NothingMeasuredError
from dustin_runtime.models.decoder import Attention, Decoder
from dustin_runtime.parallel.watch import LONG
from dustin_runtime.prefill import chunk_for, prefill
from dustin_runtime.scaled import Held, shown

Heads = Mapping[int, Sequence[int]]
"""Chosen query heads by layer."""
LOGITS = 128
"""Positions whose logits exist at once."""


class Prompted(NamedTuple):
    """What is traced, by token ids."""

    document: str
    prompt: Sequence[int]
    answer: Sequence[int] | None = None
    """The continuation to force, instead of the target's own."""


@dataclass(frozen=True)
class TraceSettings:
    """How windows are laid over a continuation.

    Attributes:
        continuation: tokens that the target generates after the prompt, at most.
        windows: verification windows per document, at most.
        depth: draft queries of a window (Gamma).
        width: target queries of a window (the paper's w; Gamma, or Gamma + 1 to count the target's own token).
        lookahead: whether the draft reads the trajectory's tokens or its own greedy proposals.
    """

    continuation: int
    windows: int
    depth: int
    width: int
    lookahead: Lookahead = "trajectory"


class ShortContinuationError(NothingMeasuredError):
    """A continuation does not hold one window: this document has nothing to measure, others may."""


class Collector:
    """Traces documents with one pair of models.

    Args:
        history: heads of every target layer whose rows are stored, summed within the layer.
        evaluation: heads whose mean row is the truth.
        lookahead: heads of every draft layer.
        capacity: positions of the longest prompt with its continuation.
        rows: documents that are continued together, which is faster: one pass over the weights is shared.
    """

    def __init__(
        self,
        target: Decoder,
        draft: Decoder,
        *,
        history: Heads,
        evaluation: Heads,
        lookahead: Heads,
        settings: TraceSettings,
        shared_vocab: int,
        stop_ids: frozenset[int],
        capacity: int,
        rows: int = 1,
    ) -> None:
        self.target, self.draft = target, draft
        self.history, self.evaluation = _held(target, history), _held(target, evaluation)
        self.lookahead = _held(draft, lookahead)
        self.truths = sum(len(heads) for heads in evaluation.values())
        self.settings = settings
        self.shared_vocab = shared_vocab
        self.rows = rows
        # A window's proposals may reach beyond the trajectory.
        self.draft_cache = draft.cache(1, capacity + settings.depth)
        self.trajectories = Trajectories(target, rows, capacity, settings.continuation, stop_ids, shared_vocab)

    def trace(self, document: str, prompt: Sequence[int], answer: Sequence[int] | None = None) -> Windows:
        """Trace one document.

        Args:
            answer: the continuation to force, instead of the target's own.

        Raises:
            ShortContinuationError: the continuation is shorter than one window.
            NothingMeasuredError: the attention is not finite.
        """
        (found,) = self.trace_all([Prompted(document, prompt, answer)])
        if isinstance(found, ShortContinuationError):
            raise found
        return found

    @torch.inference_mode()
    def trace_all(self, documents: Sequence[Prompted]) -> Iterator[Windows | ShortContinuationError]:
        """Trace documents, `rows` of which are continued together; one by one as each is done.

        Raises:
            NothingMeasuredError: the attention is not finite.
        """
        for begin in range(0, len(documents), self.rows):
            group = documents[begin : begin + self.rows]
            with self.target.watched(LONG):
                texts = self.trajectories([(one.prompt, one.answer) for one in group])
            for row, (one, text) in enumerate(zip(group, texts, strict=True)):
                found: Windows | ShortContinuationError
                try:
                    with self.target.watched(LONG):
                        found = self._windows(row, one.document, one.prompt, text)
                except ShortContinuationError as error:
                    found = error
                yield found

    def _windows(self, row: int, document: str, prompt: Sequence[int], answer: list[int]) -> Windows:
        """Trace the document whose prompt lies in a row of the target's cache."""
        length = len(prompt)
        prefixes = place_windows(length, len(answer), self.settings)
        if not prefixes:
            need = max(self.settings.depth, self.settings.width)
            raise ShortContinuationError(
                f"{document}: the continuation has {len(answer)} tokens, a window needs {need}: use other documents"
            )
        # The pass starts at the last prompt token: its query is the history of the first window.
        forced = [prompt[-1], *answer]
        truth, history = self._target_rows(self.trajectories.cache.row(row), forced, length - 1, prefixes)
        prefill(self.draft, self.draft_cache, prompt[:-1], chunk=chunk_for(self.draft.device))
        if self.settings.lookahead == "proposals":
            lookahead = self._proposal_rows(forced, length - 1, prefixes)
            hidden = self._forward(self.draft, self.draft_cache, forced, length - 1, dense_attention)
        else:
            lookahead, hidden = self._trajectory_rows(forced, length - 1, prefixes)
        if not all(bool(scores.isfinite().all()) for scores in (truth, history, lookahead)):
            raise NothingMeasuredError(f"{document}: attention is not finite; try --dtype float32")
        columns = torch.arange(max(prefixes), device=truth.device)
        inside = columns < torch.tensor(prefixes, device=truth.device).unsqueeze(1)
        kept = truth[:, : max(prefixes)] * inside
        text = torch.tensor(answer)
        return Windows(
            document=document,
            prefix=torch.tensor(prefixes),
            truth=kept.cpu(),
            tail=(truth.double().sum(1) - kept.double().sum(1)).float().cpu(),
            history=(history[:, :, : max(prefixes)] * inside).half().cpu(),
            lookahead=(lookahead[:, :, : max(prefixes)] * inside).half().cpu(),
            text=text,
            agrees=self._proposed(hidden[0, :-1]).cpu() == text,
        )

    def _proposed(self, hidden: Tensor) -> Tensor:
        """The draft's greedy token behind each position, [tokens] int64."""
        parts = [self.draft.own_logits(part) for part in hidden.split(LOGITS)]
        return torch.cat([self.draft.argmax_finite(part, self.shared_vocab)[0] for part in parts])

    def _target_rows(self, cache: KVCache, forced: list[int], start: int, prefixes: list[int]) -> tuple[Tensor, Tensor]:
        """Truth [W, extent] and history [layers, W, extent], fp32, of one pass over the trajectory."""
        width, count = self.settings.width, len(prefixes)
        extent = start + len(forced)
        first = torch.tensor(prefixes, device=self.target.device)
        before = (first - 1).unsqueeze(1)
        during = first.unsqueeze(1) + torch.arange(width, device=self.target.device)
        truth = torch.zeros(count, extent, device=self.target.device)
        history = torch.zeros(self.target.shape.layers, count, extent, device=self.target.device)
        group = self.target.shape.group

        def observe(layer: int, q: Tensor, k: Held, v: Held, begin: Tensor) -> Tensor:
            if layer in self.history:
                window_rows(history[layer], q, k, self.history[layer], group, before, start)
            if layer in self.evaluation:
                window_rows(truth, q, k, self.evaluation[layer], group, during, start)
            return dense_attention(layer, q, k, v, begin)

        self._forward(self.target, cache, forced, start, observe)
        return self.target.summed(truth) / (width * self.truths), self.target.summed(history)

    def _trajectory_rows(self, forced: list[int], start: int, prefixes: list[int]) -> tuple[Tensor, Tensor]:
        """Lookahead [layers, W, extent] fp32, and the draft's hidden states: it reads the trajectory."""
        extent = start + len(forced)
        positions = torch.tensor(prefixes, device=self.draft.device).unsqueeze(1)
        positions = positions + torch.arange(self.settings.depth, device=self.draft.device)
        result = torch.zeros(self.draft.shape.layers, len(prefixes), extent, device=self.draft.device)

        def observe(layer: int, q: Tensor, k: Held, v: Held, begin: Tensor) -> Tensor:
            if layer in self.lookahead:
                window_rows(result[layer], q, k, self.lookahead[layer], self.draft.shape.group, positions, start)
            return dense_attention(layer, q, k, v, begin)

        hidden = self._forward(self.draft, self.draft_cache, forced, start, observe)
        return self.draft.summed(result), hidden

    def _proposal_rows(self, forced: list[int], start: int, prefixes: list[int]) -> Tensor:
        """Lookahead [layers, W, extent] fp32: at every window the draft reads its own greedy proposals."""
        extent = start + len(forced)
        result = torch.zeros(self.draft.shape.layers, len(prefixes), extent, device=self.draft.device)
        done = start
        for window, prefix in enumerate(prefixes):
            if prefix > done:  # what the window before proposed is overwritten by the trajectory
                self._forward(
                    self.draft, self.draft_cache, forced[done - start : prefix - start], done, dense_attention
                )
            done = prefix
            token = forced[prefix - start]
            for turn in range(self.settings.depth):
                at = prefix + turn

                def observe(
                    layer: int, q: Tensor, k: Held, v: Held, begin: Tensor, window: int = window, at: int = at
                ) -> Tensor:
                    if layer in self.lookahead:
                        row = result[layer, window : window + 1]
                        position = torch.tensor([[at]], device=q.device)
                        window_rows(
                            row, q, shown(k, extent), self.lookahead[layer], self.draft.shape.group, position, at
                        )
                    return dense_attention(layer, q, k, v, begin)

                hidden = self._forward(self.draft, self.draft_cache, [token], at, observe)
                token = int(self.draft.logits(hidden[0, -1])[: self.shared_vocab].argmax())
        return self.draft.summed(result)

    @staticmethod
    def _forward(model: Decoder, cache: KVCache, ids: list[int], start: int, attend: Attention) -> Tensor:
        tokens = torch.tensor([ids], device=model.device)
        position = torch.tensor([start], device=model.device)
        return model.forward(tokens, position, cache, attend, extent=start + len(ids))


def _held(model: Decoder, heads: Heads) -> Heads:
    """Of chosen heads those that are computed here, counted from the first that is; no layer without any."""
    here = model.query_heads
    kept = {layer: [head - here.start for head in chosen if head in here] for layer, chosen in heads.items()}
    return {layer: chosen for layer, chosen in kept.items() if chosen}


def place_windows(prompt: int, continuation: int, settings: TraceSettings) -> list[int]:
    """Where windows begin: evenly spaced pending tokens, the first right after the prompt.

    Returns:
        Distinct ascending prefix lengths, fewer than asked where the continuation is short.
    """
    room = continuation - max(settings.depth, settings.width)
    if room < 0:
        return []
    count = min(settings.windows, room + 1)
    if count == 1:
        return [prompt]
    return [prompt + round(index * room / (count - 1)) for index in range(count)]


def window_rows(
    total: Tensor, q: Tensor, k: Held, heads: Sequence[int], group: int, positions: Tensor, start: int
) -> None:
    """Add to `total` the attention rows of every window's queries, summed over its queries and heads.

    Args:
        total: [W, extent] fp32.
        q: [1, tokens, query_heads, head_size] of tokens at start, start + 1, ...; k: [1, extent, kv_heads, head_size].
        positions: [W, queries] int64 absolute positions.
    """
    windows, queries = positions.shape
    flat = positions.reshape(1, -1)
    chosen = q[:, (flat[0] - start)][:, :, list(heads)]
    for _, rows in attention_rows(chosen, k, heads, group, flat):
        total[:, : k.shape[1]] += rows[0].sum(dim=1).view(windows, queries, -1).sum(dim=1)
