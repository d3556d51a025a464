"""Prices against hand-made sums, a brute-force count and the paper's clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dustin_runtime.errors import UsageError
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.pairs import find_pair
from dustin_runtime.pricing import (
    ANSWER_TOKENS,
    DEVICES,
    StagePrice,
    decode_seconds,
    devices_needed,
    prefill_flops,
    prefill_seconds,
    price_profile,
    search_seconds,
    trace_bytes,
    weights_bytes,
)

TINY = ModelShape(
    family="llama",
    layers=2,
    hidden=8,
    ffn=16,
    query_heads=2,
    kv_heads=1,
    head_size=4,
    vocab=10,
    context=64,
    tied=True,
)
# Per layer: q 8x8, k and v 8x4 each, o 8x8, three of 8x16, two norms of 8; a last norm; the embedding apart.
TINY_BODY = 2 * (64 + 32 + 32 + 64 + 3 * 128 + 16) + 8


def profile(alias: str, device: str = "h100", **changes: int) -> dict[str, StagePrice]:
    pair = find_pair(alias)
    sizes = {
        "context": 13500,
        "continuation": 512,
        "documents": 50,
        "windows": 16,
        "needle_samples": 600,
        "needle_mean_length": 8500,
        "element_bytes": 2,
        **changes,
    }
    rows = price_profile(pair.target.shape, pair.draft.shape, device=DEVICES[device], **sizes)
    return {row.stage: row for row in rows}


def test_prompts_continued_together_share_the_weights_and_need_a_cache_each() -> None:
    alone, together = profile("qwen7b:0.5b"), profile("qwen7b:0.5b", rows=8)
    target = find_pair("qwen7b:0.5b").target.shape
    caches = 7 * target.kv_bytes(13500 + 512, 2)
    assert together["trace"].gpu_bytes - alone["trace"].gpu_bytes == caches
    device = DEVICES["h100"]
    saved = decode_seconds(target, 0, device, 2) * (1 - 1 / 8)  # of every token
    assert alone["trace"].seconds - together["trace"].seconds == pytest.approx(50 * 512 * saved)


def test_weights_bytes_of_a_72b_model() -> None:
    assert weights_bytes(find_pair("qwen72b:0.5b").target.shape, 2) == pytest.approx(145.4e9, rel=0.01)


def test_trace_bytes_by_hand() -> None:
    target, draft = find_pair("qwen72b:0.5b").target.shape, find_pair("qwen72b:0.5b").draft.shape
    assert trace_bytes(target, draft, prefix=13500, windows=3) == 3 * (13500 * 4 + 80 * 13500 * 2 + 24 * 13500 * 2)


def test_prefill_flops_by_hand() -> None:
    assert prefill_flops(TINY, 10) == 2 * TINY_BODY * 10 + 4 * 2 * 2 * 4 * 10 * 10 / 2


@given(st.integers(1, 500), st.integers(0, 500))
def test_prefill_in_two_chunks_costs_as_much_as_in_one(first: int, second: int) -> None:
    whole = prefill_flops(TINY, first + second)
    assert prefill_flops(TINY, first) + prefill_flops(TINY, second, cached=first) == pytest.approx(whole)


def test_decode_reads_weights_head_and_cache_once() -> None:
    device = DEVICES["h200"]._replace(bytes_per_s=1.0)
    cache = 2 * 2 * 1 * 4 * 7  # keys and values, layers, KV heads, head size, tokens
    assert decode_seconds(TINY, 7, device, 2) == 2 * (TINY_BODY + 10 * 8 + cache)
    assert decode_seconds(TINY, 7, device, 2, kv_bytes=1) == 2 * (TINY_BODY + 10 * 8) + cache
    untied = TINY.model_copy(update={"tied": False})  # the embedding is looked up, not read
    assert decode_seconds(untied, 7, device, 2) == decode_seconds(TINY, 7, device, 2)


def test_devices_keep_a_tenth_free() -> None:
    device = DEVICES["h200"]._replace(memory_bytes=100)
    assert [devices_needed(size, device) for size in (0, 90, 91, 180, 181)] == [0, 1, 2, 2, 3]


@pytest.mark.parametrize(("length", "minutes"), [(16384, 13), (32768, 19), (50000, 27)])
def test_head_identification_against_table_12(length: int, minutes: float) -> None:
    shape, device = find_pair("llama8b:1b").target.shape, DEVICES["a100"]
    mean = length // 2
    seconds = prefill_seconds(shape, mean, device) + ANSWER_TOKENS * decode_seconds(shape, mean, device, 2)
    assert 0.5 < 600 * seconds / 60 / minutes <= 1


@pytest.mark.parametrize(
    ("alias", "minutes", "devices"),
    [
        ("llama8b:1b", 7.5, 1),
        ("qwen7b:0.5b", 6.6, 1),
        ("qwen14b:0.5b", 10.6, 1),
        ("qwen32b:0.5b", 15.8, 1),
        ("qwen72b:0.5b", 26.6, 2),
    ],
)
def test_collection_against_table_13(alias: str, minutes: float, devices: int) -> None:
    trace = profile(alias)["trace"]
    assert 1 / 3 < trace.seconds / 60 / minutes <= 1
    assert trace.devices == devices


def test_exact_search_undercuts_the_papers() -> None:
    assert 0 < profile("qwen72b:0.5b")["search"].seconds < 60 * 8.8


def test_search_of_the_embedded_pairs_size_takes_seconds() -> None:
    pair = find_pair("smollm2")
    draft = pair.target.shape.model_copy(update={"layers": 24})
    assert 0.1 < search_seconds(pair.target.shape, draft, prefix=4096, windows=64) < 10


def test_stages_and_what_each_occupies() -> None:
    rows = profile("qwen7b:0.5b")
    pair = find_pair("qwen7b:0.5b")
    both = weights_bytes(pair.target.shape, 2) + weights_bytes(pair.draft.shape, 2)
    assert list(rows) == ["srh", "trace", "search"]
    assert weights_bytes(pair.target.shape, 2) < rows["srh"].gpu_bytes < both < rows["trace"].gpu_bytes
    assert rows["search"][2:] == (0, 0, 0, 0)
    stored = trace_bytes(pair.target.shape, pair.draft.shape, prefix=13500 + 256, windows=16)
    assert rows["trace"].disk_bytes == 50 * stored


@pytest.mark.parametrize(
    ("size", "stage"), [("needle_samples", "srh"), ("documents", "trace"), ("documents", "search")]
)
def test_stages_grow_with_the_samples(size: str, stage: str) -> None:
    once, twice = (profile("qwen7b:0.5b", "h100", **{size: count})[stage] for count in (40, 80))
    assert twice.seconds == pytest.approx(2 * once.seconds)
    assert twice.gpu_bytes == once.gpu_bytes


def test_slower_devices_take_longer() -> None:
    for stage in ("srh", "trace"):
        seconds = [profile("smollm2", name)[stage].seconds for name in ("h200", "h100", "a100", "cpu")]
        assert seconds == sorted(seconds)
        assert len(set(seconds)) == 4


def test_a_team_shares_the_target_and_each_device_has_the_draft() -> None:
    pair = find_pair("qwen72b:0.5b")
    one, four = profile("qwen72b:0.5b"), profile("qwen72b:0.5b", tensor_parallel=4)
    devices = [(one[stage].devices, four[stage].devices) for stage in ("srh", "trace", "search")]
    assert devices == [(2, 4), (2, 4), (0, 0)]
    # Every device has the whole embedding of the target, and the draft with its cache beside it.
    tokens = 13500 + 512
    more = 3 * 2 * (pair.target.shape.vocab * pair.target.shape.hidden + pair.draft.shape.parameters)
    more += 3 * pair.draft.shape.kv_bytes(tokens, 2)
    assert four["trace"].gpu_bytes - one["trace"].gpu_bytes == pytest.approx(more, rel=0.01)
    assert one["trace"].device_bytes == one["trace"].gpu_bytes and one["search"].device_bytes == 0
    assert 4 * four["srh"].device_bytes == four["srh"].gpu_bytes
    assert four["trace"].gpu_bytes / 4 < four["trace"].device_bytes < 0.3 * four["trace"].gpu_bytes  # one keeps windows
    assert 0.24 < four["trace"].seconds / one["trace"].seconds < 0.35
    assert four["srh"].seconds / one["srh"].seconds == pytest.approx(0.25, rel=0.1)
    assert four["trace"].disk_bytes == one["trace"].disk_bytes
    with pytest.raises(UsageError, match="3 ranks cannot share 64 query heads"):
        profile("qwen72b:0.5b", tensor_parallel=3)


def test_a_team_that_is_too_small_is_priced_at_the_devices_that_suffice() -> None:
    assert profile("qwen72b:0.5b", "a100", tensor_parallel=2)["trace"].devices > 2
