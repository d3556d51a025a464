"""A draft with a window over a given continuation, in one pass: what the runtime's draft proposes token by token."""

from __future__ import annotations

import pytest
import torch
from tiny_pair import TinyPair

from dustin_profile.traces.windowed import proposals
from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.window import WindowAttention
from dustin_runtime.loading import open_pair
from dustin_runtime.policies.streaming import STREAMING_SINK
from dustin_runtime.prefill import prefill


@pytest.mark.parametrize("prompt_tokens", [5, 60])
def test_one_pass_proposes_what_single_steps_do(tiny_pair: TinyPair, prompt_tokens: int) -> None:
    pair = open_pair(str(tiny_pair.target), str(tiny_pair.draft), offline=True)
    draft = pair.load_draft(pair.load_target(torch.float64, "cpu"))
    ids = torch.randint(2, 2000, (prompt_tokens + 30,), generator=torch.Generator().manual_seed(0)).tolist()
    prompt, text = ids[:prompt_tokens], torch.tensor(ids[prompt_tokens:])
    budgets = (8, 24, 1000)
    found = proposals(draft, draft.cache(1, len(ids)), prompt, text, budgets, pair.shared_vocab)
    for k, own in zip(budgets, found, strict=True):
        cache, expected = draft.cache(1, len(ids)), []
        prefill(draft, cache, prompt[:-1])
        attend = WindowAttention(k, STREAMING_SINK) if k < 1000 else dense_attention
        for at in range(prompt_tokens - 1, len(ids) - 1):
            hidden = draft.forward(torch.tensor([[ids[at]]]), torch.tensor([at]), cache, attend, extent=at + 1)
            expected.append(int(draft.logits(hidden[0, -1])[: pair.shared_vocab].argmax()))
        assert own.tolist() == expected
    assert found[0].tolist() != found[2].tolist() or prompt_tokens < 8
