"""Audited steps are the same steps; what they measure is the KL of full from served verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.audit import Audit, Audits, divergence, summary
from dustin_runtime.config import LayerHeads, Selection
from dustin_runtime.engine import Engine
from dustin_runtime.generation import Draw, Generation
from dustin_runtime.guard import Rule
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.policies import make_policy
from dustin_runtime.signals import StepSignals
from dustin_runtime.state import State
from dustin_runtime.statistics import Statistics
from dustin_runtime.step import Stepper

SHAPE = ModelShape(
    family="llama", layers=4, hidden=48, ffn=64, query_heads=6, kv_heads=2, head_size=8, vocab=40, context=256
)
PROMPTS = [list(range(39)), [3, 3, 8] * 20, [1, 5, 9, 30, 2], [4] * 70]
SELECTION = Selection(
    budget=14,
    sink=2,
    window=4,
    m=4,
    history=LayerHeads(layer=2, heads=(1, 5)),
    lookahead=(LayerHeads(layer=1, heads=(0, 4)),),
    retrieval_heads=((0, 3), (5, 1), (2, 3), (1, 2)),
)


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder(SHAPE, torch.float32, "cpu", seed=1)


def engine(
    target: Decoder, method: str, audits: Audits | None, rule: Rule | None = None, sampled: bool = False, **more: int
) -> Engine:
    selection = SELECTION.model_copy(update=more)
    policy = make_policy(method, selection)
    if rule:
        policy = replace(policy, rule=rule)  # type: ignore[call-arg]
    stepper = Stepper(target, target.first_layers(3), policy, policy.selection, 3, 37, sampled=sampled)
    return Engine(stepper, rows=2, audits=audits)


def run(served: Engine, draws: Sequence[Draw] | None = None) -> tuple[list[Generation], Statistics]:
    return served.generate(PROMPTS, 30, draws=draws)


@pytest.mark.parametrize("method", ["dustin", "dustin-rest", "quest", "h2o", "smallkv", "snapkv-8"])
def test_audits_leave_the_text_as_it_is(target: Decoder, method: str) -> None:
    plain, statistics = run(engine(target, method, None))
    assert statistics.audits == [] and "divergence" not in statistics.as_dict()
    for share in (0.3, 1.0):
        found, audited = run(engine(target, method, Audits(share, seed=5)))
        assert [one.tokens for one in found] == [one.tokens for one in plain]
        assert audited.kept == statistics.kept and audited.accepted_at == statistics.accepted_at
        done, of = len(audited.audits), audited.steps
        assert done == of if share == 1 else 0.1 * of < done < 0.6 * of


def test_drawn_texts_stay_too(target: Decoder) -> None:
    draws = [Draw(1.0, 1.0, seed) for seed in range(len(PROMPTS))]
    plain, _ = run(engine(target, "dustin", None, sampled=True), draws)
    found, audited = run(engine(target, "dustin", Audits(0.5), sampled=True), draws)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert audited.audits


def test_which_steps_are_audited_depends_on_the_seed(target: Decoder) -> None:
    found = [run(engine(target, "dustin", Audits(0.3, seed)))[1].audits for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


@torch.inference_mode()
@pytest.mark.parametrize("method", ["dustin", "dustin-rest", "h2o"])
def test_the_figure_is_that_of_one_full_pass_and_the_state_that_of_the_plain_step(target: Decoder, method: str) -> None:
    served, plain = engine(target, method, Audits(1.0)), engine(target, method, None)
    states = [one.fill(PROMPTS[:2], 100) for one in (served, plain)]
    drafted: list[torch.Tensor] = []
    draft_tokens = served.stepper.draft_tokens

    def note(state: State, signals: StepSignals) -> tuple[torch.Tensor, torch.Tensor | None]:
        found = draft_tokens(state, signals)
        drafted.append(found[0])
        return found

    served.stepper.draft_tokens = note  # type: ignore[method-assign]
    for _ in range(6):
        before, lengths = states[0].target_cache.keys.clone(), states[0].lengths.clone()
        values, recent = states[0].target_cache.values.clone(), states[0].recent.clone()
        result, packed = served.step(states[0], audited=True)
        want, expected = plain.step(states[1])
        assert torch.equal(packed[:, :-1], expected) and torch.equal(result.logits, want.logits)
        assert torch.equal(result.tokens, want.tokens) and torch.equal(result.count, want.count)
        mine, theirs = ([*vars(state).values(), *vars(state.target_cache).values()] for state in states)
        for one, other in zip(mine, theirs, strict=True):
            assert not isinstance(one, torch.Tensor) or torch.equal(one, other)
        cache = target.cache(2, states[0].target_cache.capacity)
        cache.keys.copy_(before)
        cache.values.copy_(values)
        ids = torch.cat((recent[:, 1:], drafted[-1]), dim=1)
        logits = target.logits(target.forward(ids, lengths, cache, dense_attention))[..., :37].double()
        full, have = logits.log_softmax(-1), result.logits.double().log_softmax(-1)
        kl = (full.exp() * (full - have)).sum(-1)
        for row, count in enumerate(result.count.tolist()):
            assert float(packed[row, -1]) == pytest.approx(float(kl[row, :count].sum()), rel=1e-3, abs=1e-6)
            assert float(packed[row, -1]) > 1e-6


def test_full_verification_has_nothing_to_find(target: Decoder) -> None:
    for found in (
        run(engine(target, "dustin", Audits(1.0), Rule(every=1)))[1],
        run(engine(target, "dustin", Audits(1.0), budget=250, m=100))[1],
    ):
        assert found.audits and max(audit.kl for audit in found.audits) < 1e-5
    some = run(engine(target, "dustin", Audits(1.0), Rule(every=2)))[1]
    assert some.full_share is not None and 0.3 < some.full_share < 0.7  # both columns are read as what they are


def test_kl_counts_what_is_emitted() -> None:
    full, served = torch.randn(2, 2, 3, 10, generator=torch.Generator().manual_seed(0))
    each = [
        [
            torch.nn.functional.kl_div(h.log_softmax(-1), w.softmax(-1), reduction="sum")
            for w, h in zip(a, b, strict=True)
        ]
        for a, b in zip(full, served, strict=True)
    ]
    found = divergence(full, served, torch.tensor([2.0, 0.0]))
    assert found.tolist() == pytest.approx([float(each[0][0] + each[0][1]), 0.0], rel=1e-5)


def test_intervals_are_over_prompts_or_else_over_steps() -> None:
    assert summary([]) is None and summary([Audit(0, 0.0, 0)]) is None
    alone = summary([Audit(3, 0.6, 3)])
    assert alone is not None and alone[:3] == (pytest.approx(0.2), None, None)
    steps = summary([Audit(0, 0.2, 2), Audit(0, 0.4, 2)])
    assert steps is not None and (steps.unit, steps.audits, steps.tokens) == ("step", 2, 4)
    assert steps.mean == pytest.approx(0.15)
    assert steps.low == 0 and steps.high == pytest.approx(0.15 + 12.706 * 0.05)
    many = [Audit(prompt, 0.1 * (prompt % 5), 1 + prompt % 3) for prompt in range(40)]
    found = summary(many)
    assert found is not None and found.unit == "prompt"
    assert found.low is not None and found.high is not None and found.low < found.mean < found.high
    assert found.mean == pytest.approx(sum(one.kl for one in many) / sum(one.tokens for one in many))
    few = summary(many[:12])
    assert few is not None and few.low is not None and few.low < few.mean
