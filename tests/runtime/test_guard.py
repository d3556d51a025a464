"""A guard verifies rows in full where little is recovered; an adaptive budget reads more there."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dustin_runtime.attention.dense import dense_reference
from dustin_runtime.attention.sparse import SparseAttention, sparse_reference
from dustin_runtime.config import (
    AdaptiveBudget,
    DustinConfig,
    Estimate,
    Guard,
    LayerHeads,
    ModelIdentity,
    PairIdentity,
    Selection,
    changed,
    load_config,
    save_config,
)
from dustin_runtime.engine import Engine
from dustin_runtime.errors import ConfigError, ConfigWarning, UsageError
from dustin_runtime.generation import Generation
from dustin_runtime.guard import Rule
from dustin_runtime.judge import MOST, Coefficients, Cut, judge_reference, on_prefix, share_on, smallest
from dustin_runtime.misfits import warn_of_config
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.policies import Policy, guarded, make_policy
from dustin_runtime.statistics import Statistics
from dustin_runtime.step import Stepper

SHAPE = ModelShape(
    family="llama", layers=4, hidden=48, ffn=64, query_heads=6, kv_heads=2, head_size=8, vocab=40, context=256
)
PROMPTS = [list(range(39)), [3, 3, 8] * 20, [1, 5, 9, 30, 2], [4] * 70, [7]]
BUDGET = 14
SELECTION = Selection(
    budget=BUDGET,
    sink=2,
    window=4,
    m=4,
    history=LayerHeads(layer=2, heads=(1, 5)),
    lookahead=(LayerHeads(layer=1, heads=(0, 4)), LayerHeads(layer=0, heads=(2,))),
)
ESTIMATE = Coefficients(0.1, 0.4, 0.4)
METHODS = ("dustin", "dustin-t", "dustin-d", "dustin-look", "dustin-rest")


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder(SHAPE, torch.float32, "cpu", seed=1)


def rule(sizes: Sequence[int] = (), **fields: float) -> Rule:
    by_size = tuple((size, ESTIMATE) for size in (BUDGET, *sizes))
    return Rule(sizes=tuple(sizes), estimate=by_size, **fields)  # type: ignore[arg-type]


def run(
    target: Decoder,
    method: str,
    judge: Rule | None = None,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    rows: int | None = None,
    budget: int = BUDGET,
) -> tuple[list[Generation], Statistics]:
    selection = SELECTION.model_copy(update={"budget": budget, "m": 4 * budget // BUDGET})
    policy = make_policy(method, selection if method != "vanilla" else None)
    policy = replace(policy, rule=judge) if judge else policy  # type: ignore[call-arg]
    stepper = Stepper(target, target.first_layers(3), policy, policy.selection, 3, 37)
    return Engine(stepper, rows=rows).generate(prompts, 30)


def tokens(found: tuple[list[Generation], Statistics]) -> list[list[int]]:
    return [generation.tokens for generation in found[0]]


@pytest.mark.parametrize("method", METHODS)
def test_a_threshold_of_1_is_full_verification(target: Decoder, method: str) -> None:
    found, vanilla = run(target, method, rule(threshold=1.0)), run(target, "vanilla")
    assert tokens(found) == tokens(vanilla)
    assert found[1].full_share == 1 and found[1].as_dict()["full_steps_share"] == 1
    assert tokens(run(target, method)) != tokens(vanilla)  # what the guard is for
    assert run(target, method)[1].full_share is None


@pytest.mark.parametrize("method", METHODS)
def test_every_step_in_full_needs_no_estimate(target: Decoder, method: str) -> None:
    assert tokens(run(target, method, Rule(every=1))) == tokens(run(target, "vanilla"))


@pytest.mark.parametrize("method", METHODS)
def test_a_threshold_that_nothing_is_below_changes_nothing(target: Decoder, method: str) -> None:
    found, plain = run(target, method, rule(threshold=1e-9)), run(target, method)
    assert tokens(found) == tokens(plain)
    assert found[1].full_share == 0
    assert found[1].kept == pytest.approx(plain[1].kept)


@dataclass(frozen=True)
class ByRow(Rule):
    """Every other row in full, whatever its estimate."""

    def full(self, estimate: Tensor | None, due: Tensor | None) -> Tensor:
        assert estimate is not None
        return torch.arange(len(estimate)) % 2 == 0


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_a_mixed_batch_are_those_of_the_two_pure_runs(target: Decoder, method: str) -> None:
    judge = ByRow(threshold=0.5, estimate=((BUDGET, ESTIMATE),))
    mixed, statistics = run(target, method, judge)
    full, sparse = run(target, method, Rule(every=1))[0], run(target, method)[0]
    for row, generation in enumerate(mixed):
        want = sparse[row] if row % 2 else full[row]
        assert generation.tokens == want.tokens
        assert generation.read == pytest.approx(want.read)  # guarded rows count everything
    assert 0 < (statistics.full_share or 0) < 1


def test_a_threshold_between_guards_some_steps_and_rows_do_not_disturb_each_other(target: Decoder) -> None:
    together, alone = run(target, "dustin", rule(threshold=0.62)), run(target, "dustin", rule(threshold=0.62), rows=1)
    assert tokens(together) == tokens(alone)
    assert 0.05 < (together[1].full_share or 0) < 0.95
    assert together[1].full == alone[1].full
    less, more = (run(target, "dustin", rule(threshold=x))[1].kept for x in (0.5, 0.8))
    assert run(target, "dustin")[1].kept <= less < more < run(target, "vanilla")[1].kept


def test_every_third_step_of_a_row_is_full(target: Decoder) -> None:
    """Counted from the row's own first step, also where a row takes another prompt."""
    for rows in (1, 2, None):
        policy = replace(make_policy("dustin", SELECTION), rule=Rule(every=3))  # type: ignore[call-arg]
        stepper = Stepper(target, target.first_layers(3), policy, policy.selection, 3, 37)
        seen: dict[int, list[int]] = {}

        def note(result, whose, seen=seen) -> None:  # type: ignore[no-untyped-def]
            for row, one in enumerate(whose):
                if one:
                    seen.setdefault(one[0], []).append(int(result.packed[row, -1]))

        Engine(stepper, rows=rows).generate(PROMPTS, 30, on_step=note)
        assert sorted(seen) == list(range(len(PROMPTS)))
        for flags in seen.values():
            assert flags == [int(step % 3 == 2) for step in range(len(flags))]


def test_what_a_step_is_estimated_to_recover() -> None:
    generator = torch.Generator().manual_seed(0)
    history, lookahead = torch.rand(2, 3, 50, generator=generator)
    lengths = torch.tensor([50, 30, 8])
    kept = torch.full((2, 3, 1, 10), -1)
    for layer in range(2):
        for row, length in enumerate(lengths.tolist()):
            best = torch.randperm(length, generator=generator)[:10].sort().values
            kept[layer, row, 0, : len(best)] = best
    for each in (history, lookahead):
        for row, length in enumerate(lengths.tolist()):
            parts = [each[row, kept[layer, row, 0][kept[layer, row, 0] >= 0]].sum() for layer in range(2)]
            want = float(sum(parts)) / 2 / float(each[row, :length].sum())
            assert float(share_on(kept, each, on_prefix(each, lengths))[row]) == pytest.approx(want, abs=1e-6)
    cut = Cut(BUDGET, 4, ESTIMATE)
    kept, found = judge_reference(lookahead, history, lengths, [cut], sink=2, window=4)
    shares = (share_on(kept[None, :, None], each, on_prefix(each, lengths)) for each in (history, lookahead))
    torch.testing.assert_close(found[:2], (0.1 + sum(0.4 * share for share in shares))[:2])
    assert float(found[2]) == MOST < 1  # everything is kept
    high = cut._replace(by=Coefficients(5.0, 0, 0))
    full = Rule(threshold=1.0).full(judge_reference(lookahead, history, lengths, [high], sink=2, window=4)[1], None)
    assert full is not None and full.all()
    nan = rule(threshold=0.1).full(torch.tensor([float("nan"), 0.5]), None)
    assert nan is not None and nan.tolist() == [True, False]


def test_a_mixed_attention_is_dense_and_sparse_by_row() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, length, heads, 8, generator=generator) for length, heads in ((2, 6), (40, 2), (40, 2)))
    start, kept = torch.tensor([30, 38, 5]), torch.tensor([[[1, 4, 20]], [[0, 3, 37]], [[0, 4, -1]]])
    full = torch.tensor([True, False, True])
    attend = SparseAttention(kept.unsqueeze(0), full=full)
    found, dense, sparse = (
        attend(0, q, k, v, start),
        dense_reference(q, k, v, start),
        sparse_reference(q, k, v, start, kept),
    )
    assert torch.equal(found[full], dense[full]) and torch.equal(found[~full], sparse[~full])
    assert attend.tokens_read(start).tolist() == [30, 3, 5]


SIZES = (8, 14, 28)


@pytest.mark.parametrize("method", METHODS[:4])  # what stands in for the rest begins at the largest budget
def test_an_adaptive_budget_that_always_or_never_suffices_is_a_fixed_one(target: Decoder, method: str) -> None:
    for reached, size in ((1e-9, 8), (1.0, 28)):
        found = run(target, method, rule(SIZES, target_arr=reached))
        plain = run(target, method, budget=size)
        assert tokens(found) == tokens(plain)
        assert found[1].kept == pytest.approx(plain[1].kept)
        assert found[1].full_share is None


def test_an_adaptive_budget_takes_the_smallest_size_that_reaches_the_target() -> None:
    nan = float("nan")
    estimates = torch.tensor([[0.7, 0.5, 0.1, 0.6, nan], [0.5, 0.65, 0.2, 0.1, nan], [0.9, 0.7, 0.3, 0.1, nan]])
    assert smallest(estimates, 0.6).tolist() == [0, 1, 2, 0, 2]


def test_rows_with_budgets_of_their_own_do_not_disturb_each_other(target: Decoder) -> None:
    judge = rule(SIZES, target_arr=0.6, threshold=0.4)
    together, alone = run(target, "dustin", judge, budget=28), run(target, "dustin", judge, rows=1, budget=28)
    assert tokens(together) == tokens(alone)
    assert together[1].kept > 8
    assert together[1].kept == pytest.approx(alone[1].kept)


# --- asked for


def config(**fields: object) -> DustinConfig:
    model = ModelIdentity.of("m", SHAPE)
    pair = PairIdentity(target=model, draft=model, tokenizer="t", shared_vocab=37)
    return DustinConfig(pair=pair, depth=3, selection=SELECTION, **fields)  # type: ignore[arg-type]


FITTED = Guard(
    budget=BUDGET,
    estimate=Estimate(intercept=0.1, history=0.4, lookahead=0.4, rms=0.02, overestimate=0.03),
    sizes=(14, 28),
    across=Estimate(intercept=0.2, history=0.3, lookahead=0.3, rms=0.02, overestimate=0.03),
    documents=5,
    errors_of="held_out",
)


def test_a_config_keeps_its_guard_and_one_without_it_names_none(tmp_path: Path) -> None:
    adaptive = AdaptiveBudget(target_arr=0.9, sizes=(8, 28))
    fitted = FITTED.model_copy(update={"m": 4, "depth": 3})
    for served in (config(), config(guard=fitted), config(guard=fitted, adaptive_budget=adaptive)):
        save_config(served, tmp_path / "config.yaml")
        assert load_config(tmp_path) == served
        text = (tmp_path / "config.yaml").read_text()
        assert ("guard:" in text) == (served.guard is not None)
        assert ("adaptive_budget:" in text) == (served.adaptive_budget is not None)


def test_a_guard_is_made_of_what_is_asked_and_what_the_config_says() -> None:
    dustin, served = make_policy("dustin", SELECTION), config(guard=FITTED)
    assert guarded(dustin, served) is dustin and guarded(dustin, None, threshold=0.0) is dustin
    found = guarded(dustin, served, threshold=0.8, every=5)
    assert found.rule == Rule(0.8, 5, estimate=((BUDGET, ESTIMATE),))  # type: ignore[attr-defined]
    other = make_policy("dustin", SELECTION.model_copy(update={"budget": 28}))
    across = Coefficients(0.2, 0.3, 0.3)
    assert guarded(other, served, threshold=0.8).rule.estimate == ((28, across),)  # type: ignore[attr-defined]
    adaptive = config(guard=FITTED, adaptive_budget=AdaptiveBudget(target_arr=0.9, sizes=(8, 14, 28)))
    for reached, asked in ((0.9, None), (0.7, 0.7)):
        found = guarded(dustin, adaptive, target_arr=asked)
        assert found.selection is not None and found.selection.budget == 28
        assert found.rule.target_arr == reached and found.rule.sizes == (8, 14, 28)  # type: ignore[attr-defined]
        assert dict(found.rule.estimate) == {8: across, 14: ESTIMATE, 28: across}  # type: ignore[attr-defined]
    merged = make_policy("dustin-merged", SELECTION)
    assert guarded(merged, adaptive) is merged  # it has one budget
    full = guarded(dustin, config(), threshold=1.0)
    assert full.rule == Rule(every=1)  # type: ignore[attr-defined]


def warned(
    policy: Policy, served: DustinConfig, selection: Selection, depth: int = 3, windowed: bool = False
) -> list[str]:
    """What `warn_of_config` says."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_config(policy, served, selection, depth=depth, windowed=windowed)
    assert all(one.category is ConfigWarning for one in found)
    return [str(one.message) for one in found]


def test_a_guard_that_is_used_otherwise_than_it_was_fitted_is_said_by_the_field() -> None:
    served = config(guard=FITTED.model_copy(update={"m": 4, "depth": 3}))

    def said(selection: Selection = SELECTION, method: str = "dustin", threshold: float = 0.8, **how: int) -> list[str]:
        return warned(guarded(make_policy(method, selection), served, threshold=threshold), served, selection, **how)

    assert said() == said(changed(SELECTION, 28, None)) == []
    begins = "guard.{}: the estimate of ARR was fitted at {} and is used at {}, where it may be off: {}"
    deeper = begins.format("depth", 3, 5, "verify at --depth 3, or search with --depth 5")
    windowed = begins.format(
        "draft_cache", "full", "sink+window", "serve with draft_cache full, without --draft-budget"
    )
    assert said(depth=5) == [deeper]
    assert said(method="dustin-look", depth=2) == []  # as many passes of the draft as were traced
    looks = begins.format("depth", 3, "3 and a last look", "verify at --depth 2, or search with --depth 4")
    assert said(method="dustin-look", depth=3) == [looks]
    assert said(depth=5, windowed=True) == [deeper, windowed]
    more = changed(SELECTION, None, 6)
    assert said(more) == [begins.format("m", 4, 6, "give --m 4, or search again")]
    assert said(more, method="dustin-t") == []  # whose m is 0 in any case
    beyond = "give k among these, or search with --budget 40"
    assert said(changed(SELECTION, 40, None)) == [begins.format("sizes", "k = 14 to 28", "k = 40", beyond)]
    assert said(more, threshold=1.0, depth=5) == []  # all is verified in full, whatever is estimated
    every = guarded(make_policy("dustin", more), served, every=2)
    assert warned(every, served, more, depth=5) == []


def test_a_look_for_which_nothing_is_asked_is_said() -> None:
    nothing = changed(SELECTION, None, 0)
    (said,) = warned(make_policy("dustin-look", nothing), config(), nothing)
    assert said == "m is 0, so that dustin-look asks the draft nothing, and does not look once more either: give --m"
    assert warned(make_policy("dustin-look", SELECTION), config(), SELECTION) == []


def test_an_older_guard_was_fitted_at_what_stands_beside_it(tmp_path: Path) -> None:
    save_config(config(guard=FITTED), tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace("  draft_cache: full\n", ""))
    found = load_config(tmp_path).guard
    assert found == FITTED.model_copy(update={"m": 4, "depth": 3}) and found.draft_cache == "full"
    save_config(config(guard=found.model_copy(update={"m": 2, "depth": 5})), tmp_path / "config.yaml")
    kept = load_config(tmp_path).guard
    assert kept is not None and (kept.m, kept.depth) == (2, 5)


def test_a_method_that_reads_one_budget_says_so_of_a_config_with_several() -> None:
    served = config(guard=FITTED, adaptive_budget=AdaptiveBudget(target_arr=0.9, sizes=(14, 28)))
    for method in ("dustin-merged", "streaming"):
        (said,) = warned(make_policy(method, SELECTION), served, SELECTION)
        assert said == (
            f"adaptive_budget: {method} reads 14 tokens at every step here; a --method that chooses among 14, 28 is one"
            " of dustin, dustin-t, dustin-d, dustin-look, dustin-rest, dustin-rest-look"
        )
    adapts = guarded(make_policy("dustin", SELECTION), served)
    assert warned(adapts, served, SELECTION) == warned(make_policy("vanilla", None), served, SELECTION) == []
    fixed = served.model_copy(update={"adaptive_budget": None})
    assert warned(make_policy("streaming", SELECTION), fixed, SELECTION) == []


def test_what_no_guard_can_do_is_refused() -> None:
    dustin, vanilla = make_policy("dustin", SELECTION), make_policy("vanilla", None)
    with pytest.raises(ConfigError, match="--guard needs guard, which the config lacks: emit it anew"):
        guarded(dustin, config(), threshold=0.8)
    with pytest.raises(ConfigError, match="--target-arr needs guard"):
        guarded(dustin, config(), target_arr=0.8)
    with pytest.raises(UsageError, match=r"--guard: method vanilla cannot; give one of dustin, dustin-t"):
        guarded(vanilla, config(guard=FITTED), threshold=0.8)
    with pytest.raises(UsageError, match="--full-every: method vanilla cannot"):
        guarded(vanilla, None, every=3)
    with pytest.raises(UsageError, match=r"--target-arr: method dustin-merged has one budget; .* dustin-rest-look$"):
        guarded(make_policy("dustin-merged", SELECTION), config(guard=FITTED), target_arr=0.8)
    for threshold in (-0.1, 1.5, float("nan")):
        with pytest.raises(UsageError, match=f"--guard {threshold}: give 0, which is off, to 1"):
            guarded(dustin, config(guard=FITTED), threshold=threshold)
    with pytest.raises(UsageError, match="--full-every 0: give 1 or more"):
        guarded(dustin, config(guard=FITTED), every=0)
    with pytest.raises(UsageError, match="--target-arr 0"):
        guarded(dustin, config(guard=FITTED), target_arr=0)
    with pytest.raises(ValueError, match="ascending"):
        AdaptiveBudget(target_arr=0.9, sizes=(128, 64))
    with pytest.raises(ValueError, match="adaptive_budget needs guard"):
        config(adaptive_budget=AdaptiveBudget(target_arr=0.9))
    with pytest.raises(ValueError, match=r"adaptive_budget.sizes: "):
        config(guard=FITTED, adaptive_budget=AdaptiveBudget(target_arr=0.9, sizes=(5, 28)))
