"""How many drafts the target accepts, greedily, measured by the engine that serves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dustin_profile.data import Prompt
from dustin_profile.statistics import interval
from dustin_runtime.engine import Engine
from dustin_runtime.loading import Pair
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.policies import make_policy
from dustin_runtime.state import StepResult
from dustin_runtime.step import Stepper


def acceptance(
    pair: Pair, target: Decoder, draft: Decoder, prompts: Sequence[Prompt], *, depth: int, new_tokens: int, rows: int
) -> dict[str, Any]:
    """Continue prompts by classic speculative decoding.

    Args:
        rows: prompts at a time.

    Returns:
        τ over all steps; the share of steps that accepted the draft at each position; τ by prompt and its interval.
    """
    stepper = Stepper(target, draft, make_policy("sd", None), None, depth, pair.shared_vocab)
    engine = Engine(stepper, pair.stop_ids())
    taken = [0] * depth
    steps, by_prompt = 0, []
    for begin in range(0, len(prompts), rows):
        part = [prompt.ids for prompt in prompts[begin : begin + rows]]
        counts: list[Tensor] = []

        def keep(result: StepResult, whose: object, counts: list[Tensor] = counts) -> None:
            counts.append(result.count.clone())

        _, figures = engine.generate(part, new_tokens, on_step=keep)
        steps += figures.steps
        taken = [one + other for one, other in zip(taken, figures.accepted_at, strict=True)]
        by_prompt += _by_prompt(counts, len(part))
    found = interval(by_prompt, seed=0)._asdict() if by_prompt else None
    return {
        "tau": 1 + sum(taken) / steps if steps else None,
        "accepted": [count / steps for count in taken] if steps else [],
        "steps": steps,
        "prompts": len(by_prompt),
        "tau_by_prompt": [round(value, 4) for value in by_prompt],
        "interval": found,
    }


def _by_prompt(counts: list[Tensor], rows: int) -> list[float]:
    """τ of each prompt that took a step; every prompt has a row of its own."""
    if not counts:
        return []
    table = torch.stack(counts).double().cpu()[:, :rows]
    steps = (table > 0).sum(0)
    return [float(table[:, row].sum() / steps[row]) for row in range(rows) if steps[row]]


def forward_seconds(model: Decoder, context: int, tokens: int, repeats: int = 15) -> float:
    """Median seconds to process `tokens` tokens behind `context` cached ones, logits included."""
    import statistics
    import time

    from dustin_runtime.attention.dense import dense_attention

    cache = model.cache(1, context + tokens)
    cache.keys.normal_()
    cache.values.normal_()
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=model.device)
    start = torch.full((1,), context, dtype=torch.int64, device=model.device)
    times = []
    with torch.inference_mode():
        for _ in range(repeats + 2):
            began = time.perf_counter()
            float(model.logits(model.forward(ids, start, cache, dense_attention, context + tokens)).sum())
            times.append(time.perf_counter() - began)
    return statistics.median(times[2:])
