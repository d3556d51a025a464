"""Head scores against whole attention matrices, and the rankings made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_reference import TARGET, continuation, dense_pass

from dustin_profile.prompts import Sample
from dustin_profile.settings import HeadSettings
from dustin_profile.srh import score as module
from dustin_profile.srh import stage
from dustin_profile.srh.ranking import agreement, rank, top_heads
from dustin_profile.srh.score import Prober, Score
from dustin_profile.srh.stage import HeadPrompts, find_heads, read_heads
from dustin_runtime.errors import CapacityError, MissingError, NothingMeasuredError
from dustin_runtime.files import read_json
from dustin_runtime.loading import Pair, open_pair
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.weights import random_decoder

VOCAB = 1990
STEPS = 5


@pytest.fixture(scope="module")
def model() -> Decoder:
    decoder = random_decoder(TARGET, torch.float32, "cpu", 3)
    for layer in decoder.weights.layers:
        layer.qkv.mul_(1.7)
    return decoder


def sample(seed: int, tokens: int, insert_at: int | None = None, haystack: int = 0) -> Sample:
    """A prompt of `tokens` random ids on haystack number `haystack`, the answer's four tokens at `insert_at`."""
    at = tokens // 2 if insert_at is None else insert_at
    ids = torch.randint(0, VOCAB, (tokens,), generator=torch.Generator().manual_seed(haystack)).tolist()
    own = torch.randint(0, VOCAB, (8,), generator=torch.Generator().manual_seed(1000 + seed)).tolist()
    ids[at : at + 4] = [own[0], own[1], own[0], own[2]]  # one of the answer's tokens stands in it twice
    ids[-4:] = own[4:]
    # Step 1 and 3 are in the span twice and once, step 2 is not in it.
    return Sample(seed, tokens, 0.5, ids, tuple(range(at, at + 4)), [own[0], own[3], own[2]], at)


def prober(model: Decoder, mode: str = "forced", accept: bool = True, **changes: Any) -> Prober:
    arguments: dict[str, Any] = {
        "mode": mode,
        "decode": lambda ids: " ".join(map(str, ids)),
        "accept": lambda text, needle: accept,
        "stop": lambda tokens: False,
        "vocab": VOCAB,
        "capacity": 1400,
        "steps": STEPS,
    }
    return Prober(model, **(arguments | changes))


def check_score(found: Score, model: Decoder, prompt: Sample, answer: Sequence[int]) -> None:
    attention, _ = dense_pass(model, [*prompt.ids, *answer])
    held = Counter(prompt.ids[position] for position in prompt.span)
    span = copies = torch.zeros(4, 6, dtype=torch.float64)
    for step, token in enumerate(answer):
        mass = attention[:, :, len(prompt.ids) + step - 1, list(prompt.span)].sum(-1)  # the query that produces it
        span = span + mass * (token in held) / len(answer)
        copies = copies + mass * held[token] / len(answer)
    torch.testing.assert_close(found.span.double(), span, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found.copies.double(), copies, atol=1e-6, rtol=1e-4)


def test_forced_scores_are_span_mass_of_the_full_attention_matrices(model: Decoder) -> None:
    prompt = sample(1, 90)
    found = prober(model).score(prompt)
    assert found.accepted
    assert found.response == " ".join(map(str, prompt.answer_ids))
    check_score(found, model, prompt, prompt.answer_ids)
    assert (found.span > 0).all()
    assert not torch.equal(found.span, found.copies)


def test_a_generated_answer_is_credited_like_a_forced_one(model: Decoder) -> None:
    """The model's own second token is put into the span, twice, until it gives that token with it there."""
    ids = sample(1, 90).ids
    answer = continuation(model, ids, STEPS, VOCAB)
    for _ in range(20):
        if ids[40] == answer[1]:
            break
        ids[40] = ids[41] = answer[1]
        answer = continuation(model, ids, STEPS, VOCAB)
    assert ids[40] == answer[1]
    prompt = sample(1, 90)._replace(ids=ids, span=(40, 41, 42))
    found = prober(model, "generate").score(prompt)
    assert found.response == " ".join(map(str, answer))
    check_score(found, model, prompt, answer)
    assert found.copies.sum() > 1.5 * found.span.sum() > 0


def test_generation_ends_where_it_is_told_to_and_rejected_answers_score_nothing(model: Decoder) -> None:
    prompt = sample(1, 90)
    answer = continuation(model, prompt.ids, STEPS, VOCAB)
    found = prober(model, "generate", stop=lambda tokens: len(tokens) == 2).score(prompt)
    assert found.response == " ".join(map(str, answer[:2]))
    rejected = prober(model, "generate", accept=False).score(prompt)
    assert not rejected.accepted
    assert not rejected.span.any()


@pytest.mark.parametrize("mode", ["forced", "generate"])
def test_reusing_a_prefix_changes_no_bit_in_any_order(model: Decoder, mode: str, monkeypatch: Any) -> None:
    """Whole chunks are reused: the first 512 or 1024 tokens of prompts that share more."""
    prompts = [sample(1, 1200, 1100), sample(2, 1200, 1100), sample(3, 1200, 700), sample(4, 1200, 300)]
    prompts += [sample(5, 1200, 1100), sample(6, 900, 800, haystack=1), sample(7, 513, 500), sample(8, 514, 100)]
    fresh = [prober(model, mode).score(prompt) for prompt in prompts]
    computed: list[int] = []
    original = module.prefill

    def count(*arguments: Any, **named: Any) -> Any:
        computed.append(len(arguments[2]))
        return original(*arguments, **named)

    monkeypatch.setattr(module, "prefill", count)
    for order in (range(8), reversed(range(8)), [4, 0, 3, 1, 7, 2, 5, 6]):
        shared = prober(model, mode)
        for index in order:
            found = shared.score(prompts[index])
            assert torch.equal(found.span, fresh[index].span)
            assert torch.equal(found.copies, fresh[index].copies)
            assert found.response == fresh[index].response
    lengths = [len(prompt.ids) - 1 for prompt in prompts]
    assert sum(computed) < 3 * sum(lengths) - 3 * 1024, "nothing was reused"


@pytest.mark.parametrize("mode", ["forced", "generate"])
def test_prompts_continued_together_score_as_each_alone(model: Decoder, mode: str) -> None:
    """Rows copy from each other what they share; the last group leaves two rows idle, the next one uses all again."""
    prompts = [sample(1, 1200, 1100), sample(2, 1200, 1100), sample(3, 1200, 700), sample(4, 1200, 300)]
    prompts += [sample(6, 900, 800, haystack=1), sample(5, 1200, 1100), sample(7, 513, 500), sample(8, 700, 600)]
    alone = [prober(model, mode).score(prompt) for prompt in prompts]
    together = prober(model, mode, rows=3)
    found = [
        score for first in (0, 3, 4) for score in together.score_all(prompts[first : first + (1 if first == 3 else 3)])
    ]
    found += together.score_all(prompts[7:])
    for one, other in zip(found, alone, strict=True):
        assert one.response == other.response
        torch.testing.assert_close(one.span, other.span, atol=1e-7, rtol=1e-4)
        torch.testing.assert_close(one.copies, other.copies, atol=1e-7, rtol=1e-4)


def test_reused_never_takes_the_last_tokens_or_part_of_a_chunk(model: Decoder) -> None:
    probing = prober(model)
    ids = list(range(1100))
    probing._held = [ids[:-1]]
    assert probing.reused(0, ids) == 1024
    assert probing.reused(0, ids[:1026]) == 1024
    assert probing.reused(0, ids[:1025]) == 512  # one token at least is prefilled, one observed
    assert probing.reused(0, [*ids[:600], 0, *ids[601:]]) == 512
    assert probing.reused(0, [5, *ids[1:]]) == 0
    assert prober(model).reused(0, ids) == 0


@pytest.mark.parametrize("mode", ["forced", "generate"])
def test_values_that_are_not_finite_are_no_retrieval_failure(mode: str) -> None:
    broken = random_decoder(TARGET, torch.float32, "cpu")
    broken.weights.layers[2].down[0, 0] = float("inf")
    with pytest.raises(NothingMeasuredError, match="needle 1 at length 90: the model computes values that are not fin"):
        prober(broken, mode, accept=False).score(sample(1, 90))


def test_ranking_is_within_the_layer_and_ties_go_to_the_lower_head() -> None:
    scores = np.array([[0.1, 0.5, 0.5, 0.0, 0.5, 0.2], [0.0] * 6, [0.3, 0.1, 0.2, 0.9, 0.9, 0.0]])
    assert rank(scores) == [[1, 2, 4, 5, 0, 3], [0, 1, 2, 3, 4, 5], [3, 4, 0, 2, 1, 5]]
    assert top_heads(rank(scores)) == {0: [1, 2, 4, 5], 1: [0, 1, 2, 3], 2: [3, 4, 0, 2]}
    many = np.arange(64.0)[None] % 2
    assert rank(many) == [[*range(1, 64, 2), *range(0, 64, 2)]]
    assert top_heads(rank(scores[:, :3])) == {0: [1, 2, 0], 1: [0, 1, 2], 2: [0, 2, 1]}


def test_stability_is_the_overlap_of_the_top_four_and_kendalls_tau() -> None:
    falling = np.arange(8.0)[::-1].copy()
    same = agreement(falling[None], falling[None])
    assert (same.top, same.kendall) == (1.0, pytest.approx(1))
    opposed = agreement(falling[None], -falling[None])
    assert (opposed.top, opposed.kendall) == (0.0, pytest.approx(-1))
    swapped = falling[[0, 1, 2, 4, 3, 5, 6, 7]]  # one of the four, one pair of 28
    both = agreement(np.stack([falling, falling]), np.stack([falling, swapped]))
    assert both.per_layer == [1.0, 0.75]
    assert both.top == 0.875
    assert both.kendall == pytest.approx((1 + 26 / 28) / 2)
    flat = np.zeros((1, 8))
    assert agreement(flat, flat) == (1.0, 0.0, [1.0])  # tau is undefined there


@pytest.fixture(scope="module")
def pair(tiny_pair: Any) -> Pair:
    return open_pair(str(tiny_pair.target), str(tiny_pair.draft), offline=True)


SETTINGS = HeadSettings(lengths=(256, 320), depths=(0.5, 1.0), needle_count=3, mode="forced")


def find(folder: Path, pair: Pair, settings: HeadSettings = SETTINGS, model: Any = None, mode: Any = "forced") -> Path:
    load = model or (lambda: pair.load_target(torch.float32, "cpu"))
    return find_heads(folder, pair, load, torch.float32, "target", mode, settings, HeadPrompts(pair, settings))


def test_the_stage_averages_accepted_samples_and_keeps_both_credits(tmp_path: Path, pair: Pair) -> None:
    path = find(tmp_path, pair)
    data = read_json(path)
    entries = [entry for part in sorted((tmp_path / "target").glob("*-*.json")) for entry in read_json(part)]
    assert len(entries) == data["samples"] == data["accepted"] == 2 * 2 * 3
    for credit in ("span", "copies"):
        credited = find(tmp_path, pair, replace(SETTINGS, credit=credit), model=never)
        data = read_json(credited)
        mean = np.mean([entry[credit] for entry in entries], axis=0)
        np.testing.assert_allclose(data["scores"], mean, rtol=1e-5)
        assert data["ranking"] == rank(mean)
        assert data["credit"] == credit
    assert data["accepted_by_length"] == {
        "256": {"accepted": 6, "samples": 6},
        "320": {"accepted": 6, "samples": 6},
    }
    even, odd = ([e["copies"] for e in entries if e["needle"] % 2 == parity] for parity in (0, 1))
    expected = agreement(np.mean(even, axis=0), np.mean(odd, axis=0))
    assert data["stability"]["top4_overlap"] == pytest.approx(expected.top, abs=1e-4)
    assert data["stability"]["kendall_tau"] == pytest.approx(expected.kendall, abs=1e-4)
    assert read_heads(path) == top_heads(data["ranking"])


def never() -> Decoder:
    raise AssertionError("a finished stage loads no model")


def test_the_stage_continues_and_ends_with_the_same_bytes(tmp_path: Path, pair: Pair) -> None:
    whole = find(tmp_path / "whole", pair)
    cut = find(tmp_path / "cut", pair)
    for name in ("320-1", "256-0.5"):
        (tmp_path / "cut" / "target" / f"{name}.json").unlink()
    cut.unlink()
    assert find(tmp_path / "cut", pair).read_bytes() == whole.read_bytes()
    for part in (tmp_path / "whole" / "target").iterdir():
        assert part.read_bytes() == (tmp_path / "cut" / "target" / part.name).read_bytes()


def test_one_needle_has_no_stability(tmp_path: Path, pair: Pair) -> None:
    settings = HeadSettings(lengths=(256,), depths=(1.0,), needle_count=1)
    assert read_json(find(tmp_path, pair, settings))["stability"] is None


@pytest.mark.parametrize(("side", "flag"), [("target", "--mode forced"), ("draft", "--draft-mode forced")])
def test_nothing_retrieved_names_the_flag_and_leaves_no_result(
    tmp_path: Path, pair: Pair, side: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "is_answer", lambda text, answer: False)
    target = pair.load_target(torch.float32, "cpu")
    models = {"target": target, "draft": pair.load_draft(target)}
    prompts = HeadPrompts(pair, SETTINGS)
    (tmp_path / f"heads-{side}.json").write_text("{}")
    with pytest.raises(NothingMeasuredError, match=f"^{side} tiny-{side}: none of 12 needles .* {flag}") as caught:
        find_heads(tmp_path, pair, lambda: models[side], torch.float32, side, "generate", SETTINGS, prompts)
    assert caught.value.exit_code == 8
    assert not (tmp_path / f"heads-{side}.json").exists()


def test_prompts_beyond_the_context_are_refused_by_the_flag(pair: Pair) -> None:
    with pytest.raises(CapacityError, match=r"^--length 4090: 4122 tokens exceed the model's context of 4096"):
        HeadPrompts(pair, HeadSettings(lengths=(4090,)))


def test_only_heads_files_are_read_as_such(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    for content in ("[]", '{"kind": "dustin-results"}', "{"):
        path.write_text(content)
        with pytest.raises(MissingError, match=str(path)):
            read_heads(path)
