"""Fidelity: full verification has none to lose, and a policy is measured as it serves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from host_reads import HostReads

from dustin_profile.evaluation import fidelity, text_run
from dustin_profile.evaluation.fidelity import Fidelity, measure, prepare, recovered, total_variation
from dustin_profile.evaluation.oracle import ORACLES, bound
from dustin_profile.evaluation.text_run import TextStepper
from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.scoring import ScoredHeads
from dustin_runtime.config import LayerHeads, Selection
from dustin_runtime.engine import Engine
from dustin_runtime.guard import Rule
from dustin_runtime.judge import Coefficients
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.policies import POLICIES, Policy, make_policy
from dustin_runtime.signals import StepSignals
from dustin_runtime.state import State
from dustin_runtime.step import Stepper

SHAPE = ModelShape(
    family="llama", layers=4, hidden=48, ffn=64, query_heads=6, kv_heads=2, head_size=8, vocab=40, context=512,
    tied=True,
)  # fmt: skip
VOCAB, DEPTH = 37, 3
PROMPT, TEXT = [(7 * at * at) % 37 for at in range(90)], [(5 * at + at * at) % 37 for at in range(30)]

ONES = torch.ones(1, 200)


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder(SHAPE, torch.float64, "cpu", seed=1)


def selection(budget: int) -> Selection:
    return Selection(
        budget=budget,
        sink=2,
        window=4,
        m=(budget - 6) // 2,
        history=LayerHeads(layer=2, heads=(1, 5)),
        lookahead=(LayerHeads(layer=1, heads=(0, 4)), LayerHeads(layer=0, heads=(2,))),
        retrieval_heads=((0, 3), (5, 1), (2, 3), (1, 2)),
    )


def of(target: Decoder, name: str, budget: int, text: list[int] = TEXT, depth: int = DEPTH) -> Fidelity:
    ready = prepare(target, target.first_layers(3), PROMPT, text, VOCAB, depth, window=128, mass=True)
    return measure(ready, make_policy(name, selection(budget)), depth, VOCAB)


@pytest.mark.parametrize("name", list(POLICIES))
def test_what_reads_everything_agrees_with_full_verification(target: Decoder, name: str) -> None:
    found = of(target, name, 200)
    assert found.kl.shape == found.loss.shape == found.agrees.shape == (len(TEXT),)
    assert float(found.kl.max()) < 1e-6  # log-probabilities are kept in fp32
    assert bool(found.agrees.all())
    assert found.read == pytest.approx(len(PROMPT) + (len(TEXT) - 1) / 2, abs=3)


def test_total_variation_is_what_two_samplers_cannot_share() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]), torch.tensor([[0.25, 0.25, 0.5], [0.2, 0.3, 0.5]])
    assert total_variation(p.log(), q.log(), 1.0).tolist() == pytest.approx([0.5, 0.0])
    # At half the temperature probabilities are squared: 1/2, 1/2, 0 and 1/6, 1/6, 2/3.
    assert total_variation(p.log(), q.log(), 0.5).tolist() == pytest.approx([2 / 3, 0.0], abs=1e-6)


def test_at_no_temperature_total_variation_is_the_share_of_other_choices(target: Decoder) -> None:
    ready = prepare(target, target.first_layers(3), PROMPT, TEXT, VOCAB, DEPTH, window=128, mass=True)
    policy = make_policy("streaming", selection(8))
    cold, warm = (measure(ready, policy, DEPTH, VOCAB, temperature) for temperature in (1e-5, 1.0))
    assert float(warm.apart[1:].min()) > 0 and float(warm.apart.max()) < 1 and warm.apart[0] == 0
    torch.testing.assert_close(cold.apart, (~cold.agrees).double(), rtol=1e-3, atol=1e-3)
    assert torch.equal(cold.kl, warm.kl)


def test_loss_is_that_of_one_full_pass(target: Decoder) -> None:
    ids = torch.tensor([PROMPT + TEXT])
    hidden = target.forward(ids, torch.zeros(1, dtype=torch.long), target.cache(1, 200), dense_attention)
    rows = target.logits(hidden[0])[len(PROMPT) - 1 : -1, :VOCAB].log_softmax(-1)
    want = -rows.gather(1, torch.tensor(TEXT).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(of(target, "sd", 200).loss, want, rtol=1e-5, atol=1e-5)
    ready = prepare(target, target.first_layers(3), PROMPT, TEXT, VOCAB, DEPTH, window=1)
    torch.testing.assert_close(ready.loss, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.needs_selection])
def test_policies_of_one_prefill_do_not_disturb_each_other(target: Decoder, name: str) -> None:
    ready = prepare(target, target.first_layers(3), PROMPT, TEXT, VOCAB, DEPTH, window=128, mass=True)
    alone = measure(ready, make_policy(name, selection(16)), DEPTH, VOCAB)
    for other in ("dustin", "streaming", "quest", "snapkv", "vanilla"):
        measure(ready, make_policy(other, selection(30)), DEPTH, VOCAB)
    again = measure(ready, make_policy(name, selection(16)), DEPTH, VOCAB)
    for field in ("kl", "agrees", "loss"):
        assert torch.equal(getattr(alone, field), getattr(again, field))
    assert alone.read == again.read
    assert float(alone.kl.max()) > 1e-6


@pytest.mark.parametrize(
    "name",
    [
        *("dustin", "dustin-t", "dustin-rest", "dustin-merged"),
        *("snapkv-8", "h2o", "specattn", "quest", "smallkv", "streaming"),
    ],
)
def test_a_text_is_verified_as_it_would_be_served(target: Decoder, name: str) -> None:
    """On a policy's own text, with its target as its draft so that all is accepted, its choices are the text."""
    policy = make_policy(name, selection(24))
    stepper = Stepper(target, target, policy, policy.selection, DEPTH, VOCAB, forced_rate=1.0)
    (generation,), _ = Engine(stepper).generate([PROMPT], 20)
    ready = prepare(target, target, PROMPT, generation.tokens, VOCAB, DEPTH, window=128, mass=True)
    seen = []
    original = Stepper._accept

    def keep(self, state, logits, best, drafts, probabilities):  # type: ignore[no-untyped-def]
        seen.append((drafts.tolist(), best.tolist()))
        return original(self, state, logits, best, drafts, probabilities)

    # What generation saw at each step is what the measurement must see: same drafts, same choices behind them.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "_accept", keep)
        Engine(stepper).generate([PROMPT], 20)
    served = [choice for _, choice in seen]
    found = []

    class Spy(text_run.TextStepper):
        def _accept(self, state, logits, best, drafts, probabilities):  # type: ignore[no-untyped-def]
            found.append(best.tolist())
            return super()._accept(state, logits, best, drafts, probabilities)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_run, "TextStepper", Spy)
        measure(ready, policy, DEPTH, VOCAB)
    assert found[:4] == served[:4]


def test_recovery_is_the_share_of_the_full_attention_matrix(target: Decoder) -> None:
    ready = prepare(target, target.first_layers(3), PROMPT, TEXT, VOCAB, DEPTH, window=128, mass=True)
    names = ["sd", "dustin", "streaming", "snapkv-8", "quest", "quest-query-head"]
    found = [measure(ready, make_policy(name, selection(20)), DEPTH, VOCAB) for name in names]
    shares = recovered(ready, found, DEPTH)
    assert shares.shape == (6, -(-(len(TEXT) - 1) // (DEPTH + 1)))
    rows: dict[int, torch.Tensor] = {}

    def keep(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(len(PROMPT + TEXT), len(PROMPT + TEXT)).triu(1).bool()
        scores = torch.einsum("tgd,ngd->gtn", q[0], k[0].repeat_interleave(3, 1)) * 8**-0.5
        rows[layer] = scores.masked_fill(hidden, -torch.inf).softmax(-1)  # [query_heads, tokens, keys]
        return dense_attention(layer, q, k, v, start)

    target.forward(torch.tensor([PROMPT + TEXT]), torch.zeros(1, dtype=torch.long), target.cache(1, 200), keep)
    for step in (0, 3, 7):
        begin = len(PROMPT) + step * (DEPTH + 1)
        end = min(begin + DEPTH + 1, len(PROMPT + TEXT) - 1)
        for index, one in enumerate(found):
            total = []
            for layer in range(4):
                lists = one.lists[step][layer]
                for head in range(6):
                    seen = torch.arange(len(PROMPT + TEXT)) >= begin
                    kept = None if lists is None else lists[head * len(lists) // 6]
                    chosen = range(begin) if kept is None else [p for p in kept.tolist() if p >= 0]
                    seen[list(chosen)] = True
                    total.append(float(rows[layer][head, begin:end][:, seen].sum(-1).mean()))
            assert float(shares[index, step]) == pytest.approx(sum(total) / len(total), abs=1e-5)
    assert bool((shares[0] > 1 - 1e-5).all())
    assert bool((shares[1:] < 1).all())


@pytest.mark.parametrize("tokens", [1, 2, 4, 5])
def test_short_texts(target: Decoder, tokens: int) -> None:
    found = of(target, "dustin", 16, TEXT[:tokens])
    assert len(found.kl) == len(found.agrees) == len(found.loss) == tokens
    assert found.kl[0] == 0


def test_no_list_recovers_more_than_the_oracle_of_its_kind(target: Decoder) -> None:
    ready = prepare(target, target.first_layers(3), PROMPT, TEXT, VOCAB, DEPTH, window=128, mass=True)
    chosen = selection(16)
    one_list = ["dustin", "dustin-t", "dustin-d", "streaming"]
    policies = bound([ORACLES[name](chosen) for name in ORACLES], ready, DEPTH)
    policies += [make_policy(name, chosen) for name in [*one_list, "snapkv-8"]]
    found = [measure(ready, policy, DEPTH, VOCAB) for policy in policies]
    assert [kept is not None and kept.shape[-1] for kept in found[1].lists[0]] == [16] * 4
    shares = recovered(ready, found, DEPTH)
    one, by_head, *others = shares
    assert bool((by_head >= one - 1e-9).all())
    for share in others[: len(one_list)]:
        assert bool((one >= share - 1e-9).all())
    assert bool((one > others[3] + 0.01).all())


class Drafting(TextStepper):
    """The same with a pass of the draft for every token, as it drafts when it serves; keeps the scores of all steps."""

    def draft_tokens(self, state: State, signals: StepSignals) -> tuple[torch.Tensor, None]:
        assert self.draft is not None and state.draft_cache is not None
        ids = state.recent
        starts = [state.lengths - 1, *(state.lengths + turn for turn in range(1, self.depth))]
        for turn, start in enumerate(starts):
            tap = signals.tap(dense_attention, last=turn == self.depth - 1)
            self.draft.forward(ids, start, state.draft_cache, tap, state.extent + turn + 1)
            ids = self.following(state)[:, turn : turn + 1]
        return self.following(state)[:, : self.depth], None


@pytest.mark.parametrize("tokens", [2, 9, 29, 30])  # the last step looks beyond the text by up to `DEPTH`
@pytest.mark.parametrize("name", ["dustin", "specattn-all", "specattn"])
def test_lookahead_scores_are_those_of_drafting_token_by_token(
    name: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache holds all of the text's keys from the begin; a step must see those up to each of its queries alone."""
    target = random_decoder(SHAPE, torch.float32, "cpu", seed=1)
    draft = random_decoder(SHAPE.model_copy(update={"layers": 3}), torch.float32, "cpu", seed=2)
    ready = prepare(target, draft, PROMPT, TEXT[:tokens], VOCAB, DEPTH, window=128)
    policy = make_policy(name, selection(16))
    scores: dict[type, list[torch.Tensor]] = {TextStepper: [], Drafting: []}
    for stepper, found in scores.items():

        def keep(self: Any, signals: StepSignals, found: list[torch.Tensor] = found) -> Any:
            found += [signals.lookahead(), *signals.lookahead_rows()]
            return TextStepper._verification(self, signals)

        with monkeypatch.context() as patch:
            patch.setattr(text_run, "TextStepper", type("Keeping", (stepper,), {"_verification": keep}))
            measure(ready, policy, DEPTH, VOCAB)
        with torch.inference_mode():
            for cached in (ready.draft_cache.keys, ready.draft_cache.values):
                cached[:, :, len(PROMPT) :] = 1e4  # drafting has to write anew what it reads
    given, drafted = scores.values()
    steps = -(-(tokens - 1) // (DEPTH + 1))
    assert len(given) == len(drafted) == steps * (1 + (2 if name == "dustin" else 3))
    for step in range(steps):
        assert given[step * len(given) // steps].shape == (1, len(PROMPT) + step * (DEPTH + 1))
    for ours, theirs in zip(given, drafted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert float(ours.sum()) > 0.9


def test_the_draft_reads_a_text_once(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepare(target, target.first_layers(3), PROMPT, TEXT, VOCAB, DEPTH, window=128, mass=True)
    assert [queries.shape for queries in ready.draft_queries] == [(1, len(TEXT) + DEPTH - 1, 6, 8)] * 3
    monkeypatch.setattr(ready.draft, "forward", None)
    for name in POLICIES:
        assert len(measure(ready, make_policy(name, selection(16)), DEPTH, VOCAB).kl) == len(TEXT)


def test_chunks_of_a_text_do_not_matter(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepare(target, target.first_layers(3), PROMPT, TEXT, VOCAB, DEPTH, window=1)
    monkeypatch.setattr(fidelity, "CHUNK", 7)
    parts = prepare(target, target.first_layers(3), PROMPT, TEXT, VOCAB, DEPTH, window=1)
    torch.testing.assert_close(parts.full, whole.full)
    for queries in ("text_queries", "draft_queries"):
        for ours, theirs in zip(getattr(parts, queries), getattr(whole, queries), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_lists_are_shared_by_layers_and_outlive_their_step(target: Decoder) -> None:
    one, by_head = (of(target, name, 16).lists for name in ("dustin", "h2o"))
    for layers in one:
        assert all(kept is layers[0] for kept in layers)
    assert len({id(kept) for layers in by_head for kept in layers}) == 8 * 4
    for step, layers in enumerate(by_head):  # H2O chooses anew in place
        for kept in layers:
            assert kept is not None and kept.dtype == torch.int32
            assert {*range(82 + 4 * step, 90 + 4 * step)} <= set(kept[0].tolist())
            assert int(kept.max()) == 89 + 4 * step


@pytest.mark.parametrize("name", [*ORACLES, *(name for name, policy in POLICIES.items() if policy.needs_selection)])
def test_steps_read_nothing_on_the_host(target: Decoder, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of more steps has no more reads of single values, nor new tensors from the host, than a short one."""
    # The plain scores index by lists of heads, which a GPU's kernel does not.
    monkeypatch.setattr(ScoredHeads, "scores", lambda self, q, keys, position, columns, share=None: ONES[:, :columns])
    reads = []
    for tokens in (6, 30):
        ready = prepare(target, target.first_layers(3), PROMPT, TEXT[:tokens], VOCAB, DEPTH, window=128, mass=True)
        policy = ORACLES[name](selection(16)) if name in ORACLES else make_policy(name, selection(16))
        with HostReads() as seen:
            found = [measure(ready, one, DEPTH, VOCAB) for one in bound([policy], ready, DEPTH)]
            recovered(ready, found, DEPTH)
        reads.append(seen.count)
    assert reads[0] == reads[1] > 0


@torch.inference_mode()
def test_an_8_bit_cache_is_compared_with_full_verification_over_the_models(target: Decoder) -> None:
    """What policies read is rounded, what they are compared with is not; one that reads all adds nothing to it."""
    of_policies = {"target": target, "draft": target.first_layers(3), "window": 128, "mass": True}
    wide, narrow = (
        prepare(**of_policies, prompt=PROMPT, text=TEXT, vocab=VOCAB, depth=DEPTH, kv_dtype=dtype)
        for dtype in (None, torch.float8_e4m3fn)
    )
    assert torch.equal(wide.full, narrow.full) and torch.equal(wide.text_keys, narrow.text_keys)
    assert wide.served_cache is wide.target_cache and narrow.served_cache.keys.dtype == torch.float8_e4m3fn
    full, all_kept = (measure(narrow, make_policy(name, selection(200)), DEPTH, VOCAB) for name in ("sd", "dustin"))
    assert 1e-9 < float(full.kl.mean()) < 0.05
    torch.testing.assert_close(full.kl, all_kept.kl)
    assert float(measure(narrow, make_policy("dustin", selection(24)), DEPTH, VOCAB).kl.mean()) > float(full.kl.mean())
    assert recovered(narrow, [full], DEPTH).tolist() == [pytest.approx([1.0] * len(full.lists))]


def ruled(budget: int, rule: Rule) -> Policy:
    return replace(make_policy("dustin", selection(budget)), rule=rule)  # type: ignore[call-arg]


def test_a_guard_is_measured_step_by_step(target: Decoder) -> None:
    """Steps in full count all tokens as read, and recover all attention."""
    ready = prepare(target, target.first_layers(3), PROMPT, TEXT, VOCAB, DEPTH, window=128)
    estimate = ((24, Coefficients(0.1, 0.4, 0.4)),)
    plain = measure(ready, make_policy("dustin", selection(24)), DEPTH, VOCAB)
    full = measure(ready, ruled(24, Rule(threshold=1.0, estimate=estimate)), DEPTH, VOCAB)
    assert plain.full is None and plain.estimate is None
    assert full.full is not None and full.full.all() and float(full.kl.max()) < 1e-6
    assert full.estimate is not None and len(full.estimate) == len(full.full) == len(full.lists)
    assert (full.estimate < 1).all()
    assert all(layer is None for step in full.lists for layer in step)
    some = measure(ready, ruled(24, Rule(every=3)), DEPTH, VOCAB)
    assert some.full is not None and some.full.tolist() == [step % 3 == 2 for step in range(len(some.lists))]
    assert [step[0] is None for step in some.lists] == some.full.tolist()
    assert plain.read < some.read < full.read
    torch.testing.assert_close(some.kl[: 2 * (DEPTH + 1) + 1], plain.kl[: 2 * (DEPTH + 1) + 1])
    shares = recovered(ready, [plain, some, full], DEPTH)
    torch.testing.assert_close(shares[1][some.full], torch.ones(int(some.full.sum()), dtype=torch.float64))
    torch.testing.assert_close(shares[2], torch.ones_like(shares[2]))
    never = measure(ready, ruled(24, Rule(threshold=1e-9, estimate=estimate)), DEPTH, VOCAB)
    torch.testing.assert_close(never.kl, plain.kl)


def test_several_budgets_read_what_they_choose(target: Decoder) -> None:
    ready = prepare(target, target.first_layers(3), PROMPT, TEXT, VOCAB, DEPTH, window=1)
    sizes = (12, 24, 48)
    estimate = tuple((size, Coefficients(0.1, 0.4, 0.4)) for size in sizes)
    fixed = measure(ready, ruled(24, Rule(threshold=1e-9, estimate=estimate)), DEPTH, VOCAB)
    assert fixed.estimate is not None
    reached = float(fixed.estimate.median())
    found = measure(ready, ruled(48, Rule(sizes=sizes, target_arr=reached, estimate=estimate)), DEPTH, VOCAB)
    counts = {int((step[0] >= 0).sum()) for step in found.lists if step[0] is not None}
    assert counts <= set(sizes) and len(counts) > 1
    assert found.read == pytest.approx(sum(int((step[0] >= 0).sum()) for step in found.lists) / len(found.lists))
    assert found.full is None
