"""The floor of a step against sums made by hand."""

from __future__ import annotations

import pytest

from dustin_runtime.config import LayerHeads, Selection
from dustin_runtime.errors import UsageError
from dustin_runtime.guard import Rule
from dustin_runtime.judge import Coefficients
from dustin_runtime.links import LINKS, Link, step_sums_ms
from dustin_runtime.method_names import METHODS, QUEST, SPARSE
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.pairs import find_pair
from dustin_runtime.policies.dustin import DustinLook
from dustin_runtime.pricing import DEVICES, Device, body_weights
from dustin_runtime.roofline import NOTHING, Cost, StepCosts, step_costs

TARGET = ModelShape(
    family="llama", layers=2, hidden=8, ffn=16, query_heads=4, kv_heads=2, head_size=4, vocab=10, context=64
)
DRAFT = TARGET.model_copy(update={"layers": 1, "kv_heads": 1, "tied": True})
# Per layer: q 8x16, k and v 8x8 each, o 16x8, three of 8x16, two norms of 8; a last norm.
TARGET_BODY = 2 * (128 + 64 + 64 + 128 + 3 * 128 + 16) + 8
DRAFT_BODY = (128 + 32 + 32 + 128 + 3 * 128 + 16) + 8
HEAD = 10 * 8
SELECTION = Selection(
    budget=12,
    sink=2,
    window=4,
    m=3,
    history=LayerHeads(layer=1, heads=(0, 1, 2)),  # two KV heads
    lookahead=(LayerHeads(layer=0, heads=(1, 3)),),  # one KV head
)
LENGTHS = (20, 7)
DEPTH = 3


def costs(method: str, selection: Selection = SELECTION, draft_budget: int | None = None) -> StepCosts:
    return step_costs(
        method, TARGET, DRAFT, LENGTHS, depth=DEPTH, selection=selection, draft_budget=draft_budget, element_bytes=2
    )


def test_vanilla_reads_weights_and_the_whole_cache_and_drafts_nothing() -> None:
    found = costs("vanilla")
    assert found.target_linears == Cost(2 * (TARGET_BODY + HEAD + 2 * 8), 2.0 * 2 * (TARGET_BODY + HEAD))
    per_position = 2 * 2 * 2 * 4 * 2  # K and V, two layers, two KV heads of 4, bf16
    assert found.verify_attention == Cost((21 + 8) * per_position, 4.0 * 2 * 4 * 4 * (21 + 8))
    assert found.draft_linears == found.draft_attention == found.scores == NOTHING
    assert found.logits.bytes == 2 * 2 * 10 * 2
    assert found == step_costs("vanilla", TARGET, None, LENGTHS, depth=0)


def test_a_cache_of_8_bits_halves_what_is_read_of_the_targets_keys_and_values() -> None:
    for method in ("vanilla", "sd", "dustin-t", "streaming"):
        found = step_costs(method, TARGET, DRAFT, LENGTHS, depth=DEPTH, selection=SELECTION, kv_bytes=1)
        want = costs(method)
        assert 2 * found.verify_attention.bytes == want.verify_attention.bytes
        assert 2 * found.scores.bytes == want.scores.bytes
        assert (found.draft_attention, found.target_linears) == (want.draft_attention, want.target_linears)
    ahead = (
        step_costs("dustin-d", TARGET, DRAFT, LENGTHS, depth=DEPTH, selection=SELECTION, kv_bytes=1),
        costs("dustin-d"),
    )
    assert ahead[0].scores == ahead[1].scores  # the draft's


def test_drafting_counts_every_pass() -> None:
    found = costs("sd")
    assert found.target_linears.bytes == 2 * (TARGET_BODY + HEAD + 2 * 4 * 8)
    assert found.verify_attention.bytes == (24 + 11) * 2 * 2 * 2 * 4 * 2
    assert found.draft_linears.bytes == 3 * 2 * (DRAFT_BODY + HEAD)  # tied: the head reads all rows
    assert found.draft_linears.flops == 2.0 * (DRAFT_BODY * (4 + 2 + 2) + HEAD * 3 * 2)
    per_position = 2 * 4 * 2  # K and V, one layer, one KV head of 4, bf16
    assert found.draft_attention.bytes == (21 + 8 + 22 + 9 + 23 + 10) * per_position
    assert found.logits.bytes == 2 * 10 * 2 * (2 * 4 + 2 * 3)
    assert found.scores == NOTHING


def test_a_windowed_draft_reads_its_budget_and_the_new_tokens() -> None:
    found = costs("magicdec", draft_budget=10)
    # Before the tokens that are fed: 19 and 6, then 21 and 8, then 22 and 9.
    assert found.draft_attention.bytes == ((10 + 2) + (6 + 2) + (10 + 1) + (8 + 1) + (10 + 1) + (9 + 1)) * 2 * 4 * 2
    assert found.verify_attention == costs("sd").verify_attention
    assert costs("sd", draft_budget=10) == found


@pytest.mark.parametrize("method", SPARSE)
def test_sparse_verification_reads_the_budget_and_the_new_tokens(method: str) -> None:
    found = costs(method)
    if method in (*QUEST, "specattn"):  # both layers of this target are dense
        assert found.verify_attention == costs("sd").verify_attention
        deep = TARGET.model_copy(update={"layers": 6})
        paged = step_costs(method, deep, DRAFT, [640], depth=DEPTH, selection=SELECTION).verify_attention
        bounds = 640 / 16 if method in QUEST else 0
        assert paged.bytes == (round((2 * 640 + 4 * (12 + bounds)) / 6) + 4) * 6 * 2 * 2 * 4 * 2
        return
    assert found.verify_attention.bytes == ((12 + 4) + (7 + 4)) * 2 * 2 * 2 * 4 * 2
    history = (20 + 7) * 2 * 4 * 2  # two KV heads of 4, keys alone, one layer
    lookahead = (20 + 3 + 7 + 3) * 1 * 4 * 2
    everything = lookahead * DRAFT.layers * DRAFT.kv_heads
    both = history + lookahead
    wanted = {"dustin": both, "dustin-merged": both, "dustin-t": history, "dustin-d": lookahead}
    wanted |= dict.fromkeys(("specattn-all", "smallkv"), everything)
    rest = round((20 + 7) * 2 * 2 * 2 * 4 * 2 / 128)  # of all keys and values
    looked = history + (20 + 4 + 7 + 4) * 1 * 4 * 2  # one key more a row
    wanted |= {"dustin-rest": both + rest, "dustin-look": looked, "dustin-rest-look": looked + rest}
    assert found.scores.bytes == wanted.get(method, 0)


def test_the_last_look_is_a_pass_without_head_up_to_the_queries_of_the_last_scored_layer() -> None:
    deep = DRAFT.model_copy(update={"layers": 3})
    one = SELECTION.model_copy(update={"lookahead": (LayerHeads(layer=1, heads=(1, 3)),)})
    plain, looks = (
        step_costs(method, TARGET, deep, LENGTHS, depth=DEPTH, selection=one) for method in ("dustin", "dustin-look")
    )
    weights = round(body_weights(deep) / 3) + deep.hidden * (deep.query_heads + deep.kv_heads) * deep.head_size
    assert looks.draft_linears.bytes - plain.draft_linears.bytes == 2 * weights
    assert looks.draft_linears.flops - plain.draft_linears.flops == pytest.approx(2 * 2 * weights)
    assert looks.draft_attention.bytes - plain.draft_attention.bytes == (24 + 11) * (2 * 4 * 2)  # of the layer below
    assert looks.logits == plain.logits


def test_what_a_rule_asks_and_reads_is_counted() -> None:
    """A guard asks both scores, whatever m is, and what it verified in full was read."""
    nothing = SELECTION.model_copy(update={"m": 0})
    rule = Rule(threshold=0.5, estimate=((nothing.budget, Coefficients(0.1, 0.4, 0.4)),))
    ruled = {"policy": DustinLook(nothing, rule), "read": 17.0}
    plain = step_costs("dustin-look", TARGET, DRAFT, LENGTHS, depth=DEPTH, selection=nothing)
    found = step_costs("dustin-look", TARGET, DRAFT, LENGTHS, depth=DEPTH, selection=nothing, **ruled)  # type: ignore[arg-type]
    assert plain == costs("dustin-t", nothing)
    assert found.scores == costs("dustin-look").scores
    assert found.draft_linears == costs("dustin-look").draft_linears
    assert found.verify_attention.bytes == ((17 + 4) + (7 + 4)) * 2 * 2 * 2 * 4 * 2


def test_a_share_of_nothing_is_not_scored() -> None:
    assert costs("dustin", SELECTION.model_copy(update={"m": 0})).scores == costs("dustin-t").scores
    assert costs("dustin", SELECTION.model_copy(update={"m": 6})).scores == costs("dustin-d").scores


@pytest.mark.parametrize("method", ["vanilla", "sd", "dustin", "dustin-t", "dustin-d", "dustin-rest", "streaming"])
def test_one_rank_of_two(method: str) -> None:
    """Heads, MLP and head are halves; norms, the looked-up rows and the draft are whole, but it drafts one row of two.
    History is of the first KV head on the first rank, of the second on the other."""
    whole, longer = costs(method), of_the_longer_row(method)
    rank = step_costs(method, TARGET, DRAFT, LENGTHS, depth=DEPTH, selection=SELECTION, world=2)
    norms, looked_up = 2 * 2 * 8 + 8, 2 * (1 if method == "vanilla" else 4) * 8
    halved = (TARGET_BODY - norms + HEAD) // 2
    assert rank.target_linears.bytes == 2 * (halved + norms + looked_up)
    assert 2 * rank.verify_attention.bytes == whole.verify_attention.bytes
    assert 2 * rank.verify_attention.flops == whole.verify_attention.flops
    assert (rank.draft_linears, rank.draft_attention) == (longer.draft_linears, longer.draft_attention)
    drafted = 0 if method == "vanilla" else 2 * 10 * 2 * DEPTH
    assert 2 * (rank.logits.bytes - drafted) == whole.logits.bytes - 2 * drafted
    history = 27 * 4 * 2 if method in ("dustin", "dustin-t", "dustin-rest") else 0
    other = other_rows_lookahead() if method in ("dustin", "dustin-d", "dustin-rest") else 0
    rest = 27 * 2 * 2 * 2 * 4 * 2 / 128 if method == "dustin-rest" else 0
    assert rank.scores.bytes == whole.scores.bytes - history - other - round(rest) + round(rest / 2)


def of_the_longer_row(method: str) -> StepCosts:
    return step_costs(method, TARGET, DRAFT, [max(LENGTHS)], depth=DEPTH, selection=SELECTION)


def other_rows_lookahead() -> int:
    """Bytes, of the row that the other of two ranks drafts."""
    return costs("dustin-d").scores.bytes - of_the_longer_row("dustin-d").scores.bytes


@pytest.mark.parametrize("heads", [(0, 1), (3,)])
def test_a_step_waits_for_the_rank_that_scores_most(heads: tuple[int, ...]) -> None:
    one = SELECTION.model_copy(update={"history": LayerHeads(layer=1, heads=heads)})
    whole, rank = (
        step_costs("dustin", TARGET, DRAFT, LENGTHS, depth=DEPTH, selection=one, world=world) for world in (1, 2)
    )
    assert rank.scores.bytes == whole.scores.bytes - other_rows_lookahead()


def test_a_draft_of_the_targets_layers_is_split_too() -> None:
    draft = TARGET.model_copy(update={"layers": 1})
    one = SELECTION.model_copy(update={"lookahead": (LayerHeads(layer=0, heads=(0, 1, 3)),)})
    kinds = {"depth": DEPTH, "selection": one}
    whole = step_costs("dustin-d", TARGET, draft, LENGTHS, **kinds)
    rank = step_costs("dustin-d", TARGET, draft, LENGTHS, **kinds, world=2, draft_split=True)
    assert 2 * rank.draft_attention.bytes == whole.draft_attention.bytes
    assert whole.draft_linears.bytes / 2 < rank.draft_linears.bytes < 0.6 * whole.draft_linears.bytes
    assert 2 * rank.scores.bytes == whole.scores.bytes  # a KV head on each
    assert 2 * rank.logits.bytes == whole.logits.bytes


def test_a_target_of_72b_over_two_ranks() -> None:
    pair = find_pair("qwen72b:0.5b")
    whole, rank = (
        step_costs("sd", pair.target.shape, pair.draft.shape, [16384] * 8, depth=4, world=world) for world in (1, 2)
    )
    assert rank.target_linears.bytes == pytest.approx(whole.target_linears.bytes / 2, rel=1e-3)
    assert rank.target_linears.bytes == pytest.approx(71.5e9, rel=0.01)
    with pytest.raises(UsageError, match="3 ranks cannot share 64 query heads"):
        step_costs("sd", pair.target.shape, pair.draft.shape, [1], depth=4, world=3)


def test_all_reduces_of_a_step() -> None:
    link = Link("toy", bytes_per_s=1000.0, latency_s=0.25)
    assert link.all_reduce_ms(500, 1) == 0
    assert link.all_reduce_ms(500, 2) == pytest.approx(1e3 * (0.5 + 0.25))
    assert link.all_reduce_ms(500, 4) == pytest.approx(1e3 * (0.75 + 0.25))
    # Two layers of two sums, each of 2 rows x 4 tokens x 8 channels of 2 bytes.
    target = 4 * 1e3 * (2 * 4 * 8 * 2 / 1000 + 0.25)
    assert step_sums_ms(TARGET, None, 2, DEPTH, DEPTH, 2, 2, link) == pytest.approx(target)
    passes = [2 * 1e3 * (2 * fed * 8 * 2 / 1000 + 0.25) for fed in (2, 1, 1)]
    assert step_sums_ms(TARGET, DRAFT, 2, DEPTH, DEPTH, 2, 2, link) == pytest.approx(target + sum(passes))
    looks = step_sums_ms(TARGET, DRAFT, 2, DEPTH, DEPTH + 1, 2, 2, link)
    assert looks == pytest.approx(target + sum(passes) + passes[-1])
    assert step_sums_ms(TARGET, DRAFT, 2, DEPTH, DEPTH, 1, 2, link) == 0
    assert LINKS.keys() == DEVICES.keys()
    assert LINKS["h200"].bytes_per_s == 450e9


def test_milliseconds_are_the_longer_of_memory_and_arithmetic() -> None:
    device = Device("toy", flops_per_s=1000.0, bytes_per_s=100.0, memory_bytes=1)
    assert Cost(200, 100.0).milliseconds(device) == 2000
    assert Cost(200, 5000.0).milliseconds(device) == 5000
    found = costs("dustin")
    assert found.milliseconds(device) == pytest.approx(sum(cost.milliseconds(device) for cost in found))
    shown = found.as_dict(device)
    assert shown["step"]["bytes"] == found.total_bytes == sum(part["bytes"] for part in shown.values()) / 2
    assert list(shown) == [*StepCosts._fields, "step"]


def test_real_sizes() -> None:
    small = find_pair("qwen7b:0.5b").target.shape
    found = step_costs("vanilla", small, None, [32768] * 16, depth=0)
    assert found.target_linears.bytes == pytest.approx(14.1e9, rel=0.01)
    assert found.verify_attention.bytes == pytest.approx(30.06e9, rel=0.001)
    assert found.milliseconds() == pytest.approx(11.05, rel=0.01)
    pair = find_pair("qwen72b:0.5b")
    verified = step_costs("sd", pair.target.shape, pair.draft.shape, [16384] * 8, depth=4)
    assert verified.target_linears.milliseconds() == pytest.approx(
        1e3 * verified.target_linears.bytes / DEVICES["h200"].bytes_per_s
    )
    # A chunk of a prompt is bound by arithmetic.
    crowded = step_costs("sd", pair.target.shape, pair.draft.shape, [100] * 1024, depth=4)
    assert crowded.target_linears.milliseconds() > 1e3 * crowded.target_linears.bytes / DEVICES["h200"].bytes_per_s


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="unknown"):
        costs("eagle")
    with pytest.raises(ValueError, match="draft budget"):
        costs("magicdec")
    for method in METHODS[1:]:
        with pytest.raises(ValueError, match="needs a draft"):
            step_costs(method, TARGET, None, LENGTHS, depth=DEPTH, selection=SELECTION, draft_budget=8)
    for method in SPARSE:
        with pytest.raises(ValueError, match="needs a selection"):
            step_costs(method, TARGET, DRAFT, LENGTHS, depth=DEPTH)
