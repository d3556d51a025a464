"""Fused small operations against plain torch."""

from __future__ import annotations

import cases
import pytest
import torch
import torch.nn.functional as F

from dustin_runtime.cache import WHOLE, Append, KVCache, Ring
from dustin_runtime.models import ops
from dustin_runtime.models.rope import Rope
from dustin_runtime.models.shape import ModelShape


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("width", [48, 576, 3584])
def test_add_rms_norm(width: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    from dustin_runtime.kernels.pointwise import add_rms_norm

    x, delta = torch.randn(2, 3, 5, width, generator=generator, device=generator.device).to(dtype)
    weight = torch.rand(width, generator=generator, device=generator.device).to(dtype)
    for change in (None, delta):
        found = add_rms_norm(x, change, weight, 1e-6)
        want = ops.add_rms_norm_reference(x, change, weight, 1e-6)
        assert torch.equal(found[0], want[0])
        assert cases.error(found[1], want[1]) < cases.tolerance(dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("ffn", [64, 1536, 4864])
def test_silu_mul(ffn: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    from dustin_runtime.kernels.pointwise import silu_mul

    x = torch.randn(3, 2, 2 * ffn, generator=generator, device=generator.device).to(dtype)
    gate, up = x.chunk(2, dim=-1)
    assert cases.error(silu_mul(x), F.silu(gate) * up) < cases.tolerance(dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("size", [64, 128])
def test_rope_append(size: int, qk_norm: bool, dtype: torch.dtype, generator: torch.Generator) -> None:
    from dustin_runtime.kernels.pointwise import rope_append

    device = generator.device
    shape = ModelShape(
        family="llama", layers=2, hidden=32, ffn=32, query_heads=6, kv_heads=2, head_size=size, vocab=8, context=512
    )
    rope = Rope(shape, 512, device)
    qkv = torch.randn(3, 4, 10, size, generator=generator, device=device).to(dtype)
    norms = torch.rand(2, size, generator=generator, device=device).to(dtype) if qk_norm else (None, None)
    start = torch.tensor([0, 17, 400], device=device)
    found, want = (KVCache.allocate(shape, 3, 450, dtype, device) for _ in range(2))

    def to(cache: KVCache, ring: Ring = WHOLE) -> Append:
        return Append(rope.cos, rope.sin, start, cache.keys[1], cache.values[1], ring, cache.scored_keys(1))

    q = rope_append(qkv, *norms, 1e-6, 6, to(found))
    expected = ops.rope_append_reference(qkv, *norms, 1e-6, 6, to(want))
    assert cases.error(q, expected) < cases.tolerance(dtype)
    assert cases.error(found.keys, want.keys) < cases.tolerance(dtype)
    assert torch.equal(found.values, want.values)
    assert torch.equal(found.keys == 0, want.keys == 0)

    ring = Ring(4, 20)
    found, want = (KVCache.windowed(shape, 3, 450, ring, [1], dtype, device) for _ in range(2))
    for cache, append in ((found, rope_append), (want, ops.rope_append_reference)):
        append(qkv, *norms, 1e-6, 6, to(cache, ring))
    assert found.keys.shape[2] == 24
    for name in ("keys", "values", "scored"):
        one, other = getattr(found, name), getattr(want, name)
        assert cases.error(one, other) < cases.tolerance(dtype)
        assert torch.equal(one == 0, other == 0)
        assert one.any()


@pytest.mark.parametrize("dtype", cases.DTYPES[1:])
@pytest.mark.parametrize(
    ("head_size", "tokens", "bias"), [(32, 5, False), (64, 1, True), (64, 2, False), (128, 5, True)]
)
def test_a_projection_is_rotated_and_appended(
    head_size: int, tokens: int, bias: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    from dustin_runtime.kernels.linear import linear_rope_append

    batch, query_heads, kv_heads, hidden, device = 3, 6, 2, 200, generator.device

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    outputs = (query_heads + 2 * kv_heads) * head_size
    x, weight = random(batch, tokens, hidden), random(outputs, hidden) * hidden**-0.5
    offset = random(outputs) if bias else None
    squares = x.float().square().reshape(batch * tokens, 2, hidden // 2).sum(2).T.contiguous()
    start = torch.tensor([0, 37, 400], device=device)
    normed = x.float() * (x.float().square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt()
    qkv = F.linear(normed, weight.float(), None if offset is None else offset.float()).to(dtype)
    shape = ModelShape(
        family="llama",
        layers=2,
        hidden=hidden,
        ffn=8,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocab=8,
        context=512,
    )
    rope = Rope(shape, 512, device)
    for ring in (WHOLE, Ring(4, 20)):
        found, want = (
            KVCache.windowed(shape, batch, 450, ring, [1], dtype, device)
            if ring is not WHOLE
            else KVCache.allocate(shape, batch, 450, dtype, device)
            for _ in range(2)
        )
        to, reference = (
            Append(rope.cos, rope.sin, start, cache.keys[1], cache.values[1], ring, cache.scored_keys(1))
            for cache in (found, want)
        )
        q = linear_rope_append(x, weight, offset, squares, 1e-5, query_heads, to)
        heads = qkv.view(batch, tokens, -1, head_size)
        expected = ops.rope_append_reference(heads, None, None, 1e-5, query_heads, reference)
        assert cases.error(q, expected) < cases.tolerance(dtype)
        for name in ("keys", "values", "scored"):
            one, other = getattr(found, name), getattr(want, name)
            if one is not None:
                assert cases.error(one, other) < cases.tolerance(dtype)
                assert torch.equal(one == 0, other == 0)
                assert one.any()


@pytest.mark.parametrize(
    ("rows", "columns", "vocab"), [(3, 100, 97), (2, 5000, 4999), (64 if cases.ON_GPU else 5, 9000, 9000)]
)
def test_argmax_finite(rows: int, columns: int, vocab: int, generator: torch.Generator) -> None:
    from dustin_runtime.kernels.argmax import argmax_finite

    logits = torch.randn(rows, columns, generator=generator, device=generator.device).half().float()
    logits[:, vocab:] = 100
    logits[1, 7] = logits[1, :vocab].max()  # a tie: the smaller id wins
    ids, finite = argmax_finite(logits, vocab)
    best = logits[:, :vocab].max(dim=1, keepdim=True).values
    assert torch.equal(ids, (logits[:, :vocab] == best).int().argmax(dim=1))
    assert finite.all()
    for bad in (float("nan"), float("inf"), float("-inf")):
        broken = logits.clone()
        broken[0, vocab - 1] = bad
        _, finite = argmax_finite(broken, vocab)
        assert finite.tolist() == [False] + [True] * (rows - 1)


@pytest.mark.parametrize("dtype", cases.DTYPES[1:])
@pytest.mark.parametrize("rows", [1, 16, 33, 64])
@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(96, 200, False), (130, 1500, False), (48, 1100, True)])
def test_linear(
    rows: int, outputs: int, inputs: int, gated: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    from dustin_runtime.kernels.linear import linear

    x = torch.randn(rows, inputs, generator=generator, device=generator.device).to(dtype)
    weight = torch.randn(outputs * (1 + gated), inputs, generator=generator, device=generator.device).to(dtype)
    bias = None if gated else torch.randn(outputs, generator=generator, device=generator.device).to(dtype)
    weight = weight * inputs**-0.5
    found = linear(x, weight, bias, gated=gated)
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if gated:
        gate, up = want.to(dtype).double().chunk(2, dim=-1)
        want = F.silu(gate) * up
    assert cases.error(found, want) < cases.tolerance(dtype)
    assert torch.equal(linear(x, weight, bias, gated=gated), found)
    out = torch.empty_like(found)
    assert linear(x, weight, bias, gated=gated, out=out) is out and torch.equal(out, found)


@pytest.mark.parametrize("dtype", cases.DTYPES[1:])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [
        *((rows, 96, 200) for rows in (1, 16, 33, 64)),
        *((rows, 130, 1500) for rows in ((1, 16, 33, 64) if cases.ON_GPU else (1, 33))),
    ],
)
def test_a_product_and_the_norm_after_it(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """The division that `add_linear` leaves out is made up for by the next product."""
    from dustin_runtime.kernels.linear import Tiling, add_linear, linear

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=generator.device).to(dtype)

    x, residual, gain = random(rows, inputs), random(rows, outputs), random(outputs).abs()
    weight, after, bias = random(outputs, inputs) * inputs**-0.5, random(2 * 48, outputs) * outputs**-0.5, random(96)
    want, normed = ops.add_rms_norm_reference(residual, F.linear(x, weight), gain, 1e-5)
    total, gained, squares = add_linear(residual, x, weight, gain)
    assert cases.error(total, want) < cases.tolerance(dtype)
    found = linear(gained, after, bias, squares=squares, eps=1e-5)
    assert cases.error(found, F.linear(normed.double(), after.double(), bias.double())) < 2 * cases.tolerance(dtype)
    gate, up = F.linear(normed.double(), after.double()).chunk(2, dim=-1)
    found = linear(gained, after, gated=True, squares=squares, eps=1e-5)
    assert cases.error(found, F.silu(gate) * up) < 3 * cases.tolerance(dtype)
    assert all(map(torch.equal, add_linear(residual, x, weight, gain), (total, gained, squares)))
    for cut in (Tiling(16, 64, 4, 4, 3), Tiling(32, 64, 1, 4, 2)):
        other = add_linear(residual, x, weight, gain, cut)
        assert cases.error(other[0], want) < cases.tolerance(dtype)
        assert cases.error(other[2].sum(dim=0), want.float().square().sum(dim=1)) < cases.tolerance(dtype)


@pytest.mark.parametrize("how", ["greedy", "forced", "decided"])
@pytest.mark.parametrize("size", [0, 64])
@pytest.mark.parametrize("depth", [0, 3, 4])
def test_advance(size: int, how: str, depth: int, generator: torch.Generator) -> None:
    from dustin_runtime.advance import advance_reference
    from dustin_runtime.kernels.advance import advance

    device, rows = generator.device, 9

    def numbers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, device=device)

    ids, tokens = numbers(150_000, rows, depth + 1), numbers(150_000, rows, depth + 1)
    agree = numbers(3, rows, depth) > 0
    ids[:, 1:] = torch.where(agree, tokens[:, :-1], ids[:, 1:])
    accepted = numbers(depth + 1, rows) if how == "decided" else None
    forced = numbers(3, rows, 40) > 0 if how == "forced" else None
    finite, read = numbers(5, rows, depth + 1) > 0, numbers(600, rows).float() / 7
    queries = torch.randn(rows, depth + 1, 5, size, generator=generator, device=device).half() if size else None
    heads = torch.tensor([1, 2, 4], device=device) if size else None
    states = []
    for function in (advance, advance_reference):
        active = torch.arange(rows, device=device) % 3 > 0
        lengths, recent = torch.arange(rows, device=device) + 5, torch.zeros(rows, 2, dtype=torch.int64, device=device)
        history = torch.zeros(rows, 1, 3, size, device=device).half() if size else None
        fields = (active, lengths, recent, history)
        packed = function(ids, tokens, accepted, forced, finite, read, queries, heads, *fields)
        states.append((packed, *fields))
    for found, want in zip(*states, strict=True):
        assert (found is None and want is None) or torch.equal(found, want)
    assert how != "greedy" or not depth or 0 < (states[0][0][:, -3] > 1).sum() < rows
