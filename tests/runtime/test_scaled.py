"""A target's cache of 8 bits: what it rounds, what reads it, and that no method can tell it from its own values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import dustin_run
from test_engine import PROMPTS, SHAPE, selection
from tiny_pair import TinyPair

from dustin_runtime.attention.dense import dense_attention, dense_reference
from dustin_runtime.attention.scoring import ScoredHeads, last_rows, received_mass
from dustin_runtime.attention.sparse import sparse_reference, sparse_rows
from dustin_runtime.bench.noise import fill
from dustin_runtime.cache import KVCache
from dustin_runtime.config import LayerHeads
from dustin_runtime.engine import Engine
from dustin_runtime.errors import UsageError
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.policies import POLICIES, make_policy
from dustin_runtime.prefill import prefill
from dustin_runtime.prompt_store import PromptStore
from dustin_runtime.scaled import E4M3, HEADROOM, LARGEST, Scaled, narrowed, pick_kv_dtype, plain, scale_for, shown
from dustin_runtime.step import Stepper

LONG = [(7 * at * at) % 37 for at in range(120)]


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder(SHAPE, torch.float32, "cpu", seed=1)


def stepper(target: Decoder, method: str, budget: int = 24, **options: object) -> Stepper:
    policy = make_policy(method, selection(budget, (budget - 6) // 2))
    return Stepper(target, target.first_layers(3), policy, policy.selection, 3, 37, kv_dtype=E4M3, **options)


def held(*, batch: int = 2, slots: int = 50, seed: int = 0) -> Scaled:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, slots, 2, 16, generator=generator)
    return Scaled(narrowed(x, scale := scale_for(x.abs().amax(dim=(1, 3)))), scale)


def test_a_scale_is_a_power_of_two_that_leaves_room() -> None:
    largest = torch.tensor([1e-6, 0.3, 1.0, 7.0, 22.5, 900.0])
    scale = scale_for(largest)
    assert (torch.frexp(scale)[0] == 0.5).all()
    room = LARGEST * scale / largest
    assert (room >= HEADROOM).all() and (room <= 2 * HEADROOM).all()
    assert scale_for(torch.zeros(1)).item() == 1


def test_values_are_rounded_once_and_clamped() -> None:
    x = torch.randn(3, 40, 2, 16, generator=torch.Generator().manual_seed(0))
    scale = scale_for(x.abs().amax(dim=(1, 3)))
    once = plain(Scaled(narrowed(x, scale), scale), torch.float32)
    assert ((once - x).abs() <= x.abs() / 16 + x.abs().max() / 3500).all()
    assert torch.equal(plain(Scaled(narrowed(once, scale), scale), torch.float32), once)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):  # exact in any dtype
        assert torch.equal(plain(Scaled(narrowed(x, scale), scale), dtype).float(), once)
    assert narrowed(torch.full((1, 1, 1, 1), -1e9), torch.ones(1, 1)).item() == -LARGEST
    assert narrowed(torch.full((1, 1, 1, 1), float("nan")), torch.ones(1, 1)).isnan().all()


def test_references_equal_themselves_on_the_values() -> None:
    """Dense, sparse, rows, mass and scores over 8 bits are exactly those over what the bits stand for."""
    k, v = held(seed=1), held(seed=2)
    plain_k, plain_v = plain(k, torch.float32), plain(v, torch.float32)
    q = torch.randn(2, 3, 6, 16, generator=torch.Generator().manual_seed(3))
    start = torch.tensor([47, 20])
    kept = torch.arange(0, 20, 3).expand(2, 2, -1)
    assert torch.equal(dense_reference(q, k, v, start), dense_reference(q, plain_k, plain_v, start))
    assert torch.equal(sparse_reference(q, k, v, start, kept), sparse_reference(q, plain_k, plain_v, start, kept))
    assert torch.equal(sparse_rows(q, k, start, kept), sparse_rows(q, plain_k, start, kept))
    assert torch.equal(last_rows(q, k), last_rows(q, plain_k))
    assert torch.equal(received_mass(q, shown(k, 30)), received_mass(q, plain_k[:, :30]))
    heads = ScoredHeads([LayerHeads(layer=1, heads=(0, 4))], 6, 3, "cpu")
    layers = Scaled(torch.stack((v.stored, k.stored)), torch.stack((v.scale, k.scale)))
    asked, at = q[:, :1, :2], start.unsqueeze(1) - 1
    want = heads.scores(asked, torch.stack((plain_v, plain_k)), at, 40)
    assert torch.equal(heads.scores(asked, layers, at, 40), want)


@torch.inference_mode()
@pytest.mark.parametrize("chunk", [120, 50, 1])
def test_the_first_chunk_sets_scales_that_stay(target: Decoder, chunk: int) -> None:
    cache, whole = target.cache(1, 140, E4M3), target.cache(1, 140)
    prefill(target, whole, LONG[:chunk])
    prefill(target, cache, LONG[:chunk], chunk=chunk)
    layer = 0  # whose keys and values are the same in both
    scales = [scale[layer].clone() for scale in (cache.key_scales, cache.value_scales) if scale is not None]
    for scale, values in zip(scales, (whole.keys, whole.values), strict=True):
        assert torch.equal(scale, scale_for(values[layer].abs().amax(dim=(1, 3))))
    prefill(target, cache, LONG[chunk:] or [1], start=chunk)
    for scale, after in zip(scales, cache.scales(layer), strict=True):
        assert after is not None and torch.equal(scale, after)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "vanilla"])
def test_what_reads_everything_equals_vanilla_over_the_same_cache(target: Decoder, name: str) -> None:
    """Token for token; all methods serve an 8-bit cache."""
    found = Engine(stepper(target, name, budget=200)).generate(PROMPTS, 30)[0]
    want = Engine(stepper(target, "vanilla")).generate(PROMPTS, 30)[0]
    assert [one.tokens for one in found] == [one.tokens for one in want]


@pytest.mark.parametrize("name", ["dustin", "h2o", "quest", "quest-query-head", "smallkv", "snapkv", "specattn"])
def test_a_small_budget_chooses_as_over_the_values(target: Decoder, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache in the model's dtype that holds the rounded values gives the same text."""
    found = Engine(stepper(target, name)).generate([LONG], 30)[0][0]

    def layer(cache: KVCache, index: int, extent: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = of_layer(cache, index, extent)
        return plain(keys, torch.float32), plain(values, torch.float32)

    of_layer = KVCache.layer
    monkeypatch.setattr(KVCache, "layer", layer)
    all_keys = property(lambda cache: plain(Scaled(cache.keys, cache.key_scales), torch.float32))
    monkeypatch.setattr(KVCache, "all_keys", all_keys)
    want = Engine(stepper(target, name)).generate([LONG], 30)[0][0]
    assert found.tokens == want.tokens and found.read == want.read


def test_prompts_are_processed_once_for_several_methods(target: Decoder) -> None:
    store = PromptStore(last=8)
    for name in ("vanilla", "dustin"):
        own = Engine(stepper(target, name, budget=40)).generate(PROMPTS, 12)[0]
        shared = Engine(stepper(target, name, budget=40), prompts=store).generate(PROMPTS, 12)[0]
        assert [one.tokens for one in own] == [one.tokens for one in shared]


@torch.inference_mode()
@pytest.mark.parametrize("name", ["dustin", "snapkv"])
def test_noise_fills_it(target: Decoder, name: str) -> None:
    made = stepper(target, name)
    state = made.state(2, 80)
    fill(made, state, 60)
    state.recent.fill_(1)  # which is in this vocabulary
    values = plain(state.target_cache.all_keys, torch.float32)
    assert values.std().item() == pytest.approx(1, abs=0.02)
    assert state.draft_cache is not None and state.draft_cache.keys.dtype == torch.float32
    made(state)
    assert state.lengths.min() > 60


def test_it_takes_a_quarter_of_the_bytes_of_fp32() -> None:
    wide, narrow = (KVCache.allocate(SHAPE, 2, 30, dtype, "cpu") for dtype in (torch.float32, E4M3))
    assert 4 * narrow.keys.nbytes == wide.keys.nbytes
    assert wide.key_scales is None and narrow.key_scales is not None
    assert narrow.row(1).scales(2)[0].shape == (1, SHAPE.kv_heads)


def test_an_unknown_dtype_is_refused() -> None:
    assert pick_kv_dtype("auto", "cpu") is None
    with pytest.raises(UsageError, match="--kv-dtype int4: unknown"):
        pick_kv_dtype("int4", "cpu")


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UsageError, match=r"capability 8\.9 or more, this has 8\.0"):
        pick_kv_dtype("fp8", "cuda:1")


def test_commands_say_what_the_cache_holds(tiny_pair: TinyPair, tmp_path: Path) -> None:
    asked = ("generate", "Some text to go on with", *tiny_pair.options, "--max-new-tokens", 8, "--json")
    for given, name in (((), "float32"), (("--kv-dtype", "fp8"), "float8_e4m3fn")):
        found = dustin_run(*asked, "--compare", "vanilla", *given)
        assert found.code == 0, found.err
        assert json.loads(found.out)["kv_dtype"] == name
        assert json.loads(found.out)["compare"]["equal_rows"] == 1
    path = tmp_path / "bench.json"
    small = ("--batch", 2, "--context", 64, "--steps", 2, "--repeats", 1, "--budget", 40, "--synthetic-context")
    found = dustin_run("bench", *tiny_pair.options, *small, "--kv-dtype", "fp8", f"--json={path}")
    assert found.code == 0, found.err
    assert all("float8_e4m3fn" in line for line in found.out.splitlines()[1:])
    document = json.loads(path.read_text())
    assert {document["kv_dtype"], *(row["kv_dtype"] for row in document["rows"])} == {"float8_e4m3fn"}
    assert "float8_e4m3fn" in path.with_suffix(".md").read_text()
    assert dustin_run(*asked, "--kv-dtype", "fp4").code == 2


@torch.inference_mode()
def test_dense_attention_takes_it(target: Decoder) -> None:
    """Logits stay near those of the model's own cache."""
    found = []
    for dtype in (None, E4M3):
        cache = target.cache(1, 130, dtype)
        prefill(target, cache, LONG[:90])
        ids, start = torch.tensor([LONG[90:]]), torch.tensor([90])
        hidden = target.forward(ids, start, cache, dense_attention, 120)
        found.append(target.logits(hidden)[0].log_softmax(-1))
    kl = (found[0].exp() * (found[0] - found[1])).sum(-1)
    assert 0 < kl.mean() < 0.05
