"""What stored traces lack: the truth layer by layer, and history from further back.

Traces keep one truth for all layers and history at distance 1, because a search needs no more; all layers' truths would
double them. The target is therefore run once more over a document, prompt and continuation in full, and only ARRs
are kept. What the policies choose still comes from the traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dustin_profile.traces.collect import Heads, window_rows
from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.errors import ConflictError
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.prefill import chunk_for, prefill
from dustin_runtime.scaled import Held


@dataclass(frozen=True, eq=False)
class ForcedRows:
    """Attention of one document's windows, fp32 on the CPU; columns at or beyond a window's prefix are zero."""

    truth: Tensor
    """[layers, W, N]: mean over the layer's evaluation heads and the window's queries."""
    past: Tensor
    """[distances, W, N]: the single query at each distance before the pending token, mean over all evaluation heads."""
    past_history: Tensor
    """[distances, W, N]: the same, summed over the heads of the configured history layer."""

    def mean_truth(self, evaluation: Heads) -> Tensor:
        """[W, N]: over all evaluation heads, as traces hold it."""
        weights = torch.tensor([float(len(evaluation.get(layer, ()))) for layer in range(len(self.truth))])
        return torch.einsum("l,lwn->wn", weights / weights.sum(), self.truth)


class ForcedPass:
    """Runs documents through the target.

    Args:
        evaluation: heads whose mean attention is the truth.
        history_layer, history: the configured layer and its heads.
        distances: of past queries, 1 being the one before the pending token.
        capacity: positions of the longest prompt with its continuation.
    """

    def __init__(
        self,
        target: Decoder,
        *,
        evaluation: Heads,
        history_layer: int,
        history: Sequence[int],
        distances: Sequence[int],
        width: int,
        capacity: int,
    ) -> None:
        self.target = target
        self.evaluation = evaluation
        self.history_layer, self.history = history_layer, history
        self.distances = distances
        self.width = width
        self.cache = target.cache(1, capacity)

    @torch.inference_mode()
    def rows(self, prompt: Sequence[int], text: Sequence[int], prefixes: Tensor) -> ForcedRows:
        """Observe one document, whose prompt is longer than the largest distance.

        Args:
            text: the continuation that was traced.
            prefixes: [W] int64, where the traces' windows begin.

        Raises:
            ConflictError: the text ends before the last window, so it is not the traces'.
        """
        model = self.target
        start = len(prompt) - max(self.distances)
        forced = [*prompt[start:], *text]
        extent, group = start + len(forced), model.shape.group
        if extent < (need := int(prefixes.max()) + self.width):
            raise ConflictError(f"the traces hold its first {extent} tokens, their windows need {need}: trace it again")
        prefill(model, self.cache, prompt[:start], chunk=chunk_for(model.device))
        first = prefixes.to(model.device)
        during = first.unsqueeze(1) + torch.arange(self.width, device=model.device)
        before = [(first - distance).unsqueeze(1) for distance in self.distances]

        def zeros(rows: int) -> Tensor:
            return torch.zeros(rows, len(prefixes), extent, device=model.device)

        truth, past, past_history = zeros(model.shape.layers), zeros(len(before)), zeros(len(before))

        def observe(layer: int, q: Tensor, k: Held, v: Held, begin: Tensor) -> Tensor:
            heads = self.evaluation.get(layer, ())
            if heads:
                window_rows(truth[layer], q, k, heads, group, during, start)
            for index, positions in enumerate(before):
                if heads:
                    window_rows(past[index], q, k, heads, group, positions, start)
                if layer == self.history_layer:
                    window_rows(past_history[index], q, k, self.history, group, positions, start)
            return dense_attention(layer, q, k, v, begin)

        ids, position = torch.tensor([forced], device=model.device), torch.tensor([start], device=model.device)
        model.forward(ids, position, self.cache, observe, extent=extent)
        count = [len(self.evaluation.get(layer, ())) for layer in range(model.shape.layers)]
        truth /= self.width * torch.tensor(count, device=model.device).clamp(min=1)[:, None, None]
        inside = torch.arange(int(prefixes.max()), device=model.device) < first.unsqueeze(1)
        return ForcedRows(
            *(
                (rows[..., : inside.shape[1]] * inside).cpu()
                for rows in (truth, past / max(sum(count), 1), past_history)
            )
        )
