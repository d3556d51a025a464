"""What a run allocates, and that the remedies of a refusal are true."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from dustin_runtime.cache import KVCache
from dustin_runtime.config import LayerHeads, Rest, Selection
from dustin_runtime.errors import CapacityError, UsageError
from dustin_runtime.guard import Rule
from dustin_runtime.judge import Coefficients
from dustin_runtime.memory_plan import (
    COLLECTIVES_BYTES,
    GIB,
    OVERHEAD_BYTES,
    MemoryPlan,
    largest_batch,
    largest_capacity,
    plan,
    require,
)
from dustin_runtime.models.decoder import Decoder, Weights
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.pairs import find_pair
from dustin_runtime.parallel.stages import Stage
from dustin_runtime.policies import POLICIES, make_policy
from dustin_runtime.pricing import held_weights, weights_bytes

PAIR = find_pair("qwen7b:0.5b")
TARGET, DRAFT = PAIR.target.shape, PAIR.draft.shape
SELECTION = Selection(
    budget=512,
    sink=4,
    window=16,
    m=200,
    history=LayerHeads(layer=20, heads=(0, 1, 2, 3)),
    lookahead=tuple(LayerHeads(layer=layer, heads=(0, 1, 2, 3)) for layer in (3, 5, 7)),
    retrieval_heads=((0, 1, 2, 3),) * TARGET.layers,
)
BATCH, CAPACITY = 32, 32800


def planned(batch: int = BATCH, capacity: int = CAPACITY, element_bytes: int = 2) -> MemoryPlan:
    return plan(
        TARGET, DRAFT, batch=batch, capacity=capacity, depth=4, selection=SELECTION, element_bytes=element_bytes
    )


def weightless(shape: ModelShape) -> Decoder:
    """A decoder of that shape, as far as buffers are made for it."""
    nothing = torch.empty(0, dtype=torch.bfloat16)
    return Decoder(shape, Weights(nothing, (), nothing, nothing))


def refusal(of: MemoryPlan, available: int) -> str:
    with pytest.raises(CapacityError) as raised:
        require(of, available)
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_components_add_up() -> None:
    found = planned()
    parts = found.parts
    assert found.total == sum(parts.values())
    assert parts["target weights"] == weights_bytes(TARGET, 2)
    assert parts["draft weights"] == weights_bytes(DRAFT, 2)
    assert parts["score scratch"] == 4 * BATCH * CAPACITY * (4 + 3 * 4 * 4 + 2)
    assert parts["logits"] == BATCH * 5 * TARGET.vocab * 2
    assert parts["overhead"] == OVERHEAD_BYTES
    assert parts["policy"] == 0
    lines = found.table()
    assert len(lines) == sum(map(bool, parts.values())) + 1
    assert lines[-1].split() == ["total", f"{found.total / GIB:.2f}", "GiB"]


def test_what_a_guard_and_audits_take_is_planned() -> None:
    sizes = {"batch": BATCH, "capacity": CAPACITY, "depth": 4}
    dustin = make_policy("dustin", SELECTION)
    judged = replace(dustin, rule=Rule(threshold=0.5, estimate=((512, Coefficients(0.1, 0.4, 0.4)),)))  # type: ignore
    plain, guarded = (plan(TARGET, DRAFT, policies=[one], **sizes) for one in (dustin, judged))  # type: ignore
    assert plain.parts["policy"] == 0 < 5 * BATCH * CAPACITY < guarded.parts["policy"] < 10 * BATCH * CAPACITY
    audited = plan(TARGET, DRAFT, audited=True, **sizes)  # type: ignore[arg-type]
    rows = BATCH * 5 * TARGET.vocab * 2
    assert 2 * rows < audited.parts["logits"] < 4.1 * rows
    assert plain.parts["logits"] == rows


def test_caches_are_what_the_runtime_allocates() -> None:
    small = plan(TARGET, DRAFT, batch=2, capacity=64)
    for shape, part in ((TARGET, "target KV cache"), (DRAFT, "draft KV cache")):
        cache = KVCache.allocate(shape, 2, 64, torch.bfloat16, "cpu")
        assert small.parts[part] == cache.keys.nbytes + cache.values.nbytes


def test_a_cache_of_8_bits_is_the_targets_alone() -> None:
    sizes = {"batch": 2, "capacity": 64, "depth": 4}
    wide, narrow = (plan(TARGET, DRAFT, **sizes, kv_bytes=kv_bytes).parts for kv_bytes in (None, 1))
    cache = KVCache.allocate(TARGET, 2, 64, torch.float8_e4m3fn, "cpu")
    assert cache.key_scales is not None and cache.value_scales is not None
    held = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    assert narrow["target KV cache"] == sum(x.nbytes for x in held)
    one_layer = 2 * 2 * TARGET.kv_heads * TARGET.head_size * 64  # in 16 bits, for prefill
    assert narrow["prefill activations"] - wide["prefill activations"] == one_layer
    assert all(narrow[part] == wide[part] for part in wide if part not in ("target KV cache", "prefill activations"))


def test_ranks_share_the_rows_of_a_draft_cache() -> None:
    sizes = {"batch": 5, "capacity": 64, "depth": 4, "selection": SELECTION}
    for window in (None, 24):
        split = plan(TARGET, DRAFT, **sizes, draft_budget=window, world=2).parts
        three, five = (
            plan(TARGET, DRAFT, **sizes | {"batch": rows}, draft_budget=window).parts["draft KV cache"]
            for rows in (3, 5)
        )
        assert split["draft KV cache"] == three < five
        assert split["target KV cache"] == 5 * TARGET.kv_bytes(64, 2) // 2


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.needs_selection])
def test_what_a_method_keeps_is_planned(name: str) -> None:
    policy = make_policy(name, SELECTION)
    rows, capacity = 3, 1500
    memory = policy.memory(weightless(TARGET), 4, rows, capacity)
    held = sum(x.nbytes for x in vars(memory).values() if isinstance(x, torch.Tensor)) if memory else 0
    found = plan(TARGET, DRAFT, batch=rows, capacity=capacity, depth=4, selection=SELECTION, policies=[policy])
    assert held <= found.parts["policy"] < held + 2**30
    without = replace(found, policies=())
    looks = policy.passes(4) - 4
    row = 4 * rows * capacity * sum(len(entry.heads) for entry in SELECTION.lookahead)  # of each pass
    assert found.total == without.total + found.parts["policy"] + looks * row
    several = replace(found, policies=(make_policy("sd", None), policy, make_policy("dustin", SELECTION)))
    assert several.total == found.total


def test_turns_of_the_rest_are_planned_as_a_stage_has_them() -> None:
    """As many in a step as the whole model has, but no more than there are layers: what a turn takes is the same."""

    def policy(period: int, world: int, pipeline: bool = True) -> int:
        chosen = SELECTION.model_copy(update={"rest": Rest(period=period)})
        sizes = {"batch": 3, "capacity": 8000, "depth": 4, "policies": [make_policy("dustin-rest", chosen)]}
        return plan(TARGET, DRAFT, **sizes, world=world, pipeline=pipeline and world > 1).parts["policy"]

    one = policy(14, 1) - policy(28, 1)  # of 28 layers
    assert one > 0
    assert [policy(period, 4) - policy(28, 4) for period in (14, 4, 1)] == [one, 6 * one, 6 * one]
    assert policy(1, 1) - policy(28, 1) == 27 * one
    assert policy(28, 4) < policy(28, 1)
    assert policy(28, 2, pipeline=False) < policy(28, 1)


def test_one_step_of_smallkv_holds_the_rows_of_all_heads_twice() -> None:
    """As `Signals.lookahead_rows` gives them and joined: [rows, heads, depth, positions] fp32 each."""
    policy = make_policy("smallkv", SELECTION)
    found = plan(
        TARGET, DRAFT, batch=BATCH, capacity=CAPACITY, depth=4, selection=policy.scored(DRAFT), policies=[policy]
    )
    rows = 4 * BATCH * DRAFT.layers * DRAFT.query_heads * 4 * CAPACITY
    assert found.parts["score scratch"] + found.parts["policy"] > 2 * rows


def test_what_a_method_does_not_use_costs_nothing() -> None:
    vanilla = plan(TARGET, batch=4, capacity=1000).parts
    assert vanilla["draft weights"] == vanilla["draft KV cache"] == vanilla["score scratch"] == 0
    assert vanilla["logits"] == 4 * TARGET.vocab * 2
    assert len(plan(TARGET, batch=4, capacity=1000).table()) == len(vanilla) - 4 + 1
    layers = plan(TARGET, DRAFT, batch=4, capacity=1000, depth=4, draft_stores="nothing").parts
    assert layers["draft weights"] == 0 < layers["draft KV cache"]
    body = plan(TARGET, DRAFT, batch=4, capacity=1000, depth=4, draft_stores="layers").parts["draft weights"]
    assert body == weights_bytes(DRAFT, 2) - 2 * DRAFT.vocab * DRAFT.hidden
    greedy, sampled = (plan(TARGET, batch=4, capacity=1000, sampled=sampled).total for sampled in (False, True))
    assert greedy < sampled


def test_what_fits_is_let_through() -> None:
    require(planned(), planned().total)
    refusal(planned(), planned().total - 1)


@pytest.mark.parametrize("available", [139, 60, 24])
def test_the_values_of_a_refusal_fit_and_one_more_does_not(available: int) -> None:
    text = refusal(planned(batch=64), available * GIB)
    assert f"64 rows of {CAPACITY} positions need {planned(batch=64).total / GIB:.1f} GiB" in text
    assert f"{available}.0 GiB are available" in text
    batch = re.search(r"lower the batch to (\d+)", text)
    context = re.search(r"lower the context to (\d+)", text)
    assert batch and context
    for knob, value, most in (("batch", int(batch[1]), 64), ("capacity", int(context[1]), CAPACITY)):
        assert 0 < value < most
        sizes = {"batch": 64, "capacity": CAPACITY}
        require(planned(**sizes | {knob: value}), available * GIB)
        refusal(planned(**sizes | {knob: value + 1}), available * GIB)
    assert largest_batch(planned(batch=64), available * GIB) == int(batch[1])
    assert largest_capacity(planned(batch=64), available * GIB) == int(context[1])


def test_where_no_batch_fits_one_row_is_offered_at_its_length() -> None:
    text = refusal(planned(), 18 * GIB)
    alone = re.search(r"run one row of (\d+) positions", text)
    assert alone and "lower the batch" not in text
    require(planned(1, int(alone[1])), 18 * GIB)
    refusal(planned(1, int(alone[1]) + 1), 18 * GIB)


def test_where_nothing_fits_dtype_or_model_is_to_blame() -> None:
    assert refusal(planned(), 10 * GIB).endswith(
        "not even one row of one position fits; use a smaller model, or more memory"
    )
    assert "use a 16-bit dtype, a smaller model" in refusal(planned(element_bytes=4), 10 * GIB)
    wide = refusal(planned(4, 1000, element_bytes=4), 20 * GIB)
    assert wide.endswith(": use a 16-bit dtype (bfloat16)")
    require(planned(4, 1000), 20 * GIB)


LARGE = find_pair("qwen72b:0.5b")


def over(world: int, **changes: object) -> MemoryPlan:
    return replace(
        plan(LARGE.target.shape, LARGE.draft.shape, batch=8, capacity=16500, depth=4), world=world, **changes
    )


def test_each_of_two_ranks_holds_half_a_target_and_a_whole_draft() -> None:
    target = LARGE.target.shape
    whole, rank = over(1).parts, over(2).parts
    table = target.vocab * target.hidden  # the embedding is whole on each rank, the head is not
    norms = (2 * target.layers + 1) * target.hidden
    assert rank["target weights"] == weights_bytes(target, 2) // 2 + table + norms
    assert 2 * rank["target KV cache"] == whole["target KV cache"]
    assert 2 * rank["logits"] == whole["logits"]
    assert rank["collectives"] == COLLECTIVES_BYTES and "collectives" not in whole
    assert 2 * rank["draft KV cache"] == whole["draft KV cache"]  # of half the rows
    for name in ("draft weights", "rotary tables", "overhead"):
        assert rank[name] == whole[name]
    assert over(2).total < 139 * GIB < over(1).total


def test_a_split_draft_and_a_borrowed_head() -> None:
    """Layers of the target are split with it; a draft that borrows the head has the parts of it put together."""
    target = LARGE.target.shape
    first = target.model_copy(update={"layers": 8})
    own, half = (over(world, draft=first, draft_stores="nothing").parts for world in (1, 2))
    assert half["draft weights"] == 0 and 2 * half["draft KV cache"] == own["draft KV cache"]
    head = target.vocab * target.hidden * 2
    one, two = (over(world, draft_stores="layers").parts["draft weights"] for world in (1, 2))
    assert two == one + head
    tied = target.model_copy(update={"tied": True})
    assert over(2, target=tied, draft_stores="layers").parts["draft weights"] == one


def test_a_stage_of_a_pipeline() -> None:
    """No rank needs more than the first stage's weights and cache and the last one's logits."""
    target = LARGE.target.shape
    whole, staged = over(1).parts, over(3, pipeline=True).parts
    stages = [Stage.of(target, rank, 3) for rank in range(3)]
    assert [len(stage.layers) for stage in stages] == [27, 27, 26]
    assert staged["target weights"] == 2 * max(map(held_weights, stages)) == 2 * held_weights(stages[0])
    assert staged["target KV cache"] * target.layers == whole["target KV cache"] * 27
    assert (
        staged["logits"] == whole["logits"] and over(3, pipeline=True, sampled=True).parts["logits"] > whole["logits"]
    )
    assert staged["draft KV cache"] * 8 == whole["draft KV cache"] * 3  # 3 of 8 rows
    assert staged["collectives"] == COLLECTIVES_BYTES
    own = over(3, pipeline=True, draft=target.model_copy(update={"layers": 30}), draft_stores="nothing").parts
    assert own["draft KV cache"] == own["target KV cache"] and own["draft weights"] == 0
    one, three = (over(world, pipeline=world > 1, draft_stores="layers").parts["draft weights"] for world in (1, 3))
    assert three == one + target.vocab * target.hidden * 2


def test_a_refusal_of_a_pipeline_says_how_many_stages_would_do() -> None:
    text = refusal(over(2, pipeline=True), 60 * GIB)
    more = int(text.removesuffix(" ranks").rsplit(" ", 1)[1])
    require(over(more, pipeline=True), 60 * GIB)
    refusal(over(more - 1, pipeline=True), 60 * GIB)


def test_logits_that_are_drawn_from_are_whole_on_each_rank() -> None:
    own, drawn = over(2).parts["logits"], over(2, sampled=True).parts["logits"]
    assert drawn > own + over(1).parts["logits"]


def test_a_refusal_over_ranks_says_so_and_how_many_would_do() -> None:
    available = 60 * GIB
    text = refusal(over(2), available)
    assert text.startswith("8 rows of 16500 positions need ") and "GiB on each of 2 ranks (target weights" in text
    assert text.endswith(": start 4 ranks")
    require(over(4), available)
    refusal(over(2, batch=1, capacity=1), available)
    wider = refusal(over(2), 90 * GIB)
    assert re.search(r"lower the batch to \d+ or lower the context to \d+ positions .* or start 4 ranks$", wider)
    with pytest.raises(UsageError, match="3 ranks cannot share"):
        refusal(over(3), available)
