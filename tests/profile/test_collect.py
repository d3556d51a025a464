"""Traces against whole attention matrices, and what they must never need: one of those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from dense_reference import DRAFT, TARGET, continuation, dense_pass
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dustin_profile.choices import Lookahead
from dustin_profile.traces import collect
from dustin_profile.traces.collect import Collector, Prompted, ShortContinuationError, TraceSettings, place_windows
from dustin_profile.traces.windows import Windows
from dustin_runtime.errors import NothingMeasuredError
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.weights import random_decoder

VOCAB = 600
"""Shared ids: far fewer than the embedding has."""
SETTINGS = TraceSettings(continuation=14, windows=4, depth=3, width=3)
HISTORY = {layer: [5, 0, 3] for layer in range(4)}
EVALUATION = {0: [1, 4], 1: [2, 3], 2: [0, 5], 3: [3, 1]}
LOOKAHEAD = {layer: [3, 0] for layer in range(3)}
PROMPT = torch.randint(0, VOCAB, (61,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def models() -> tuple[Decoder, Decoder]:
    # Large queries and keys, so that attention is far from uniform.
    decoders = random_decoder(TARGET, torch.float32, "cpu", 1), random_decoder(DRAFT, torch.float32, "cpu", 2)
    for model in decoders:
        for layer in model.weights.layers:
            layer.qkv.mul_(1.7)
    return decoders


def collector(models: tuple[Decoder, Decoder], settings: TraceSettings = SETTINGS, **changes: Any) -> Collector:
    arguments: dict[str, Any] = {
        "history": HISTORY,
        "evaluation": EVALUATION,
        "lookahead": LOOKAHEAD,
        "settings": settings,
        "shared_vocab": VOCAB,
        "stop_ids": frozenset(),
        "capacity": 80,
    }
    return Collector(*models, **(arguments | changes))


def check_windows(
    found: Windows,
    models: tuple[Decoder, Decoder],
    answer: Sequence[int],
    settings: TraceSettings,
    evaluation: dict[int, list[int]] = EVALUATION,
    draft_texts: Sequence[Sequence[int]] | None = None,
) -> None:
    """Compare with dense passes; `draft_texts` are what the draft reads from each window's pending token on."""
    target, draft = models
    text = PROMPT + list(answer)
    prefixes = place_windows(len(PROMPT), len(answer), settings)
    assert found.prefix.tolist() == prefixes
    attention, _ = dense_pass(target, text)
    columns = max(prefixes)
    assert found.truth.shape == (len(prefixes), columns)
    assert found.history.dtype == found.lookahead.dtype == torch.float16
    for window, i in enumerate(prefixes):
        heads = [(layer, head) for layer, chosen in evaluation.items() for head in chosen]
        queries = range(i, i + settings.width)
        truth = torch.stack([attention[layer, head, q] for layer, head in heads for q in queries]).mean(0)
        torch.testing.assert_close(found.truth[window, :i].double(), truth[:i], atol=2e-6, rtol=1e-4)
        torch.testing.assert_close(found.tail[window].double(), truth[i:].sum(), atol=1e-5, rtol=1e-4)
        read = PROMPT + list(answer) if draft_texts is None else text[:i] + list(draft_texts[window])
        ahead, _ = dense_pass(draft, read)
        for layer in range(4):
            history = sum(attention[layer, head, i - 1, :i] for head in HISTORY[layer])
            close_in_half(found.history[layer, window, :i], history)
        for layer in range(3):
            rows = [ahead[layer, head, q, :i] for head in LOOKAHEAD[layer] for q in range(i, i + settings.depth)]
            close_in_half(found.lookahead[layer, window, :i], torch.stack(rows).sum(0))
        for scores in (found.truth[window], found.history[:, window], found.lookahead[:, window]):
            assert not scores[..., i:].any()
    torch.testing.assert_close(found.truth.sum(1) + found.tail, torch.ones(len(prefixes)), atol=1e-5, rtol=0)


def close_in_half(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-3)


@pytest.mark.parametrize("width", [3, 4])
def test_traces_are_rows_of_the_full_attention_matrices(models: tuple[Decoder, Decoder], width: int) -> None:
    settings = replace(SETTINGS, width=width)
    found = collector(models, settings).trace("d", PROMPT)
    answer = continuation(models[0], PROMPT, settings.continuation, VOCAB)
    assert max(answer) < VOCAB
    assert found.document == "d"
    assert len(found.prefix) == 4
    check_windows(found, models, answer, settings)
    peak = found.truth.max(1).values
    assert (peak > 3 / found.prefix).all(), "attention is too uniform for this test to see a mistake"


def test_every_head_may_be_the_truth(models: tuple[Decoder, Decoder]) -> None:
    every = {layer: list(range(6)) for layer in range(4)}
    found = collector(models, evaluation=every).trace("d", PROMPT)
    check_windows(found, models, continuation(models[0], PROMPT, 14, VOCAB), SETTINGS, every)


def test_documents_continued_together_are_those_of_each_alone(models: tuple[Decoder, Decoder]) -> None:
    """Three prompts of different lengths in groups of two: one answer is given, one ends early, one row stays idle."""
    prompts = [PROMPT, PROMPT[7:40], PROMPT[::-1]]
    stop = continuation(models[0], prompts[2], 14, VOCAB)[9]
    alone = collector(models, stop_ids=frozenset([stop]))
    asked = [Prompted("a", prompts[0]), Prompted("b", prompts[1], PROMPT[:12]), Prompted("c", prompts[2])]
    together = collector(models, stop_ids=frozenset([stop]), rows=2).trace_all(asked)
    for one, found in zip(asked, together, strict=True):
        assert isinstance(found, Windows)
        expected = alone.trace(*one)
        assert found.document == one.document
        assert torch.equal(found.text, expected.text) and torch.equal(found.agrees, expected.agrees)
        assert torch.equal(found.prefix, expected.prefix)
        torch.testing.assert_close(found.truth, expected.truth, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found.history, expected.history, atol=1e-6, rtol=2e-3)
        torch.testing.assert_close(found.lookahead, expected.lookahead, atol=1e-6, rtol=2e-3)
    assert len(expected.text) == 10 and expected.text[-1] == stop


@pytest.mark.parametrize("lookahead", ["trajectory", "proposals"])
def test_what_the_draft_would_propose_is_compared_with_the_text(
    models: tuple[Decoder, Decoder], lookahead: Lookahead
) -> None:
    proposed = [continuation(models[1], PROMPT, 1, VOCAB)[0]]  # the draft's own token, then one it does not propose
    proposed.append((continuation(models[1], [*PROMPT, *proposed], 1, VOCAB)[0] + 1) % VOCAB)
    answer = [*proposed, *PROMPT[:10]]
    found = collector(models, replace(SETTINGS, lookahead=lookahead)).trace("d", PROMPT, answer)
    expected = [
        continuation(models[1], [*PROMPT, *answer[:at]], 1, VOCAB)[0] == token for at, token in enumerate(answer)
    ]
    assert found.text.tolist() == answer
    assert found.agrees.tolist() == expected
    assert expected[:2] == [True, False]


def test_a_given_answer_is_forced_and_cut_to_the_continuation(models: tuple[Decoder, Decoder]) -> None:
    answer = torch.randint(0, VOCAB, (20,), generator=torch.Generator().manual_seed(6)).tolist()
    found = collector(models).trace("d", PROMPT, answer)
    check_windows(found, models, answer[:14], SETTINGS)


def test_proposals_are_the_drafts_own_greedy_tokens(models: tuple[Decoder, Decoder]) -> None:
    settings = replace(SETTINGS, windows=7, lookahead="proposals")  # windows overlap
    found = collector(models, settings).trace("d", PROMPT)
    answer = continuation(models[0], PROMPT, 14, VOCAB)
    texts = []
    for i in found.prefix.tolist():
        read = [*PROMPT, *answer][: i + 1]
        texts.append([read[-1], *continuation(models[1], read, settings.depth - 1, VOCAB)])
    assert any(text != [*PROMPT, *answer][i : i + 3] for i, text in zip(found.prefix.tolist(), texts, strict=True))
    check_windows(found, models, answer, settings, draft_texts=texts)


def test_the_caches_of_one_document_do_not_reach_the_next(models: tuple[Decoder, Decoder]) -> None:
    fresh = collector(models).trace("d", PROMPT)
    used = collector(models)
    used.trace("longer", [*PROMPT[::-1], 7, 8, 9])
    again = used.trace("d", PROMPT)
    for name in ("prefix", "truth", "tail", "history", "lookahead"):
        assert torch.equal(getattr(fresh, name), getattr(again, name)), name


def test_the_continuation_ends_at_a_stop_token(models: tuple[Decoder, Decoder]) -> None:
    answer = continuation(models[0], PROMPT, 14, VOCAB)
    stop = answer[8]
    ended = answer[: answer.index(stop) + 1]
    found = collector(models, stop_ids=frozenset([stop])).trace("d", PROMPT)
    check_windows(found, models, ended, SETTINGS)


@pytest.mark.parametrize(("depth", "width", "answer"), [(3, 3, 2), (3, 4, 3), (5, 3, 4)])
def test_a_continuation_shorter_than_a_window_is_refused(
    models: tuple[Decoder, Decoder], depth: int, width: int, answer: int
) -> None:
    settings = replace(SETTINGS, depth=depth, width=width)
    need = max(depth, width)
    with pytest.raises(ShortContinuationError, match=rf"^doc: the continuation has {answer} tokens, a window needs"):
        collector(models, settings).trace("doc", PROMPT, PROMPT[:answer])
    assert len(collector(models, settings).trace("doc", PROMPT, PROMPT[:need]).prefix) == 1


def test_attention_that_is_not_finite_is_refused(models: tuple[Decoder, Decoder]) -> None:
    broken = random_decoder(DRAFT, torch.float32, "cpu")
    broken.weights.layers[0].qkv[0, 0] = float("nan")
    with pytest.raises(NothingMeasuredError, match=r"^doc: attention is not finite") as caught:
        collector((models[0], broken)).trace("doc", PROMPT)
    assert not isinstance(caught.value, ShortContinuationError)


def test_no_tensor_of_all_queries_and_keys_ever_exists(
    models: tuple[Decoder, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window needs w or Γ queries of a few heads; a prompt twice as long makes rows longer, not more of them."""
    shapes: list[torch.Size] = []
    original = collect.attention_rows

    def record(*arguments: Any) -> Any:
        for entries, rows in original(*arguments):
            shapes.append(rows.shape)
            yield entries, rows

    monkeypatch.setattr(collect, "attention_rows", record)
    for repeats in (4, 8):
        shapes.clear()
        prompt = PROMPT * repeats
        collector(models, capacity=len(prompt) + 14).trace("d", prompt)
        # Windows x their queries x heads of one KV head; keys.
        assert max(shape[1] * shape[2] for shape in shapes) <= 4 * 3 * 2
        assert max(shape[3] for shape in shapes) == len(prompt) + 14


@given(
    prompt=st.integers(1, 50),
    length=st.integers(0, 60),
    windows=st.integers(1, 20),
    depth=st.integers(1, 8),
    width=st.integers(1, 8),
)
def test_windows_are_spread_evenly_from_the_prompts_end(
    prompt: int, length: int, windows: int, depth: int, width: int
) -> None:
    prefixes = place_windows(prompt, length, TraceSettings(99, windows, depth, width))
    room = length - max(depth, width)
    assert len(prefixes) == (min(windows, room + 1) if room >= 0 else 0)
    if prefixes:
        assert prefixes[0] == prompt
        assert prefixes == sorted(set(prefixes))
        assert prefixes[-1] + max(depth, width) <= prompt + length
    if len(prefixes) > 1:
        assert prefixes[-1] == prompt + room
        gaps = [after - before for before, after in pairwise(prefixes)]
        assert max(gaps) - min(gaps) <= 1
