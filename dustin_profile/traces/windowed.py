"""What a draft that keeps its first and last tokens would propose on traced continuations, for any budget.

The prompt is read whole, as in the runtime; behind it every token sees the first few and the last tokens before it. One
pass over a continuation gives all of its proposals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dustin_profile.data import Calibration
from dustin_profile.progress import progress
from dustin_profile.rundir import open_stage, read_part
from dustin_profile.traces.collect import LOGITS
from dustin_profile.traces.store import TraceStore
from dustin_runtime.cache import KVCache
from dustin_runtime.files import digest, write_json
from dustin_runtime.models.decoder import Attention, Decoder
from dustin_runtime.policies.streaming import STREAMING_SINK
from dustin_runtime.prefill import chunk_for, prefill
from dustin_runtime.scaled import Held, plain

VERSION = 1
Windowed = Mapping[str, Mapping[int, Tensor]]
"""By document and budget, as `Windows.agrees`."""


def windowed_inputs(traces: str, budgets: Sequence[int]) -> dict[str, Any]:
    """What is read with windows is made from; `traces` by their digest."""
    return {"version": VERSION, "traces": traces, "budgets": list(budgets)}


def windowed_agreement(
    folder: Path,
    store: TraceStore,
    prompts: Calibration,
    draft: Callable[[], Decoder],
    shared_vocab: int,
    budgets: Sequence[int],
    overwrite: bool = False,
) -> Windowed:
    """Read the traced continuations with every budget; documents that are done are kept.

    Args:
        draft: called if there is something to read.

    Raises:
        ConflictError: the folder is of other traces or budgets.
        MissingError: a file in it is damaged.
    """
    open_stage(folder, windowed_inputs(digest(store.inputs), budgets), overwrite)
    ids = {prompt.id: prompt.ids for prompt in prompts.prompts}
    files = {entry["id"]: folder / f"{entry['file'].split('.')[0]}.json" for entry in store.entries}
    pending = [place for place, file in enumerate(files.values()) if not file.exists()]
    cache: KVCache | None = None
    with progress("windowed draft", len(pending)) as advance:
        for place in pending:
            windows = store[place]
            if cache is None:
                longest = max(len(ids[name]) for name in files)
                cache = draft().cache(1, longest + int(store.inputs["continuation"]))
            found = proposals(draft(), cache, ids[windows.document], windows.text, budgets, shared_vocab)
            said = {str(k): (own == windows.text).int().tolist() for k, own in zip(budgets, found, strict=True)}
            write_json(files[windows.document], {"document": windows.document, "agrees": said})
            advance(1)
    return {name: _read(file, budgets) for name, file in files.items()}


def _read(file: Path, budgets: Sequence[int]) -> dict[int, Tensor]:
    def whole(found: dict[str, Any]) -> bool:
        return set(found.get("agrees", ())) == {str(k) for k in budgets}

    found = read_part(file, "read its document again", whole)
    return {k: torch.tensor(found["agrees"][str(k)], dtype=torch.bool) for k in budgets}


@torch.inference_mode()
def proposals(
    draft: Decoder, cache: KVCache, prompt: Sequence[int], text: Tensor, budgets: Sequence[int], shared_vocab: int
) -> list[Tensor]:
    """The draft's greedy token for every place of a continuation, [C] int64 per budget.

    Args:
        cache: of one row, with room for prompt and continuation.
        text: [C] int64.
    """
    prefill(draft, cache, prompt[:-1], chunk=chunk_for(draft.device))
    start = len(prompt) - 1
    forced = torch.tensor([[prompt[-1], *text[:-1].tolist()]], device=draft.device)
    found = []
    for k in budgets:
        begin = torch.tensor([start], device=draft.device)
        hidden = draft.forward(forced, begin, cache, _windowed(k), extent=start + len(text))
        parts = [draft.own_logits(part) for part in hidden[0].split(LOGITS)]
        found.append(torch.cat([draft.argmax_finite(part, shared_vocab)[0] for part in parts]).cpu())
    return found


def _windowed(budget: int) -> Attention:
    """Every token attends to itself, the first `STREAMING_SINK` and the last tokens before it, `budget` in all."""
    sink = min(STREAMING_SINK, budget - 1)

    def attend(layer: int, q: Tensor, k: Held, v: Held, start: Tensor) -> Tensor:
        k, v = plain(k, q.dtype), plain(v, q.dtype)
        at = (start.unsqueeze(1) + torch.arange(q.shape[1], device=q.device)).unsqueeze(2)
        column = torch.arange(k.shape[1], device=q.device)
        seen = (column <= at) & ((column < sink) | (column >= at - (budget - sink)))
        attended = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), seen.unsqueeze(1), enable_gqa=True
        )
        return attended.transpose(1, 2)

    return attend
