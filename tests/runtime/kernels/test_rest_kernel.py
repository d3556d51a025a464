"""Tokens that stand in for what is not read: making them and attending to them, against the plain references."""

from __future__ import annotations

import cases
import pytest
import torch

from dustin_runtime.attention.rest import RestTokens, save_queries, update_rest_reference
from dustin_runtime.attention.sparse import sparse_reference
from dustin_runtime.scaled import Held, Scaled, narrowed, plain

LAYERS, TURNS = 3, 2
SHAPES = [(64, 3, 4), (128, 8, 3), (64, 7, 1)]
if cases.ON_GPU:
    SHAPES += [(128, 6, 4), (128, 7, 4), (128, 4, 8), (128, 7, 8), (64, 5, 16), (128, 8, 16), (64, 2, 2)]


class Case:
    """Two turns over a cache of three layers; the second turn is nobody's in some sequences."""

    def __init__(self, size: int, group: int, queries: int, dtype: torch.dtype, generator: torch.Generator,
                 lengths: list[int] = cases.LENGTHS) -> None:  # fmt: skip
        device, batch = generator.device, len(lengths)
        pairs = [cases.cache(lengths, 0, size, dtype, generator) for _ in range(LAYERS)]
        self.k, self.v = (torch.stack([pair[side] for pair in pairs]) for side in (0, 1))
        self.q = cases.queries(TURNS * batch, queries, group, size, dtype, generator).unflatten(0, (TURNS, batch))
        row = torch.arange(batch, device=device)
        self.layer = torch.stack((2 * row % LAYERS, torch.where(row % 2 == 0, (2 * row + 1) % LAYERS, -1)))
        ends = torch.tensor(lengths, device=device).unsqueeze(1)
        self.position = (ends + torch.arange(-queries, 0, device=device)).clamp(min=0)
        columns = torch.arange(self.k.shape[2], device=device)
        chance = torch.rand(batch, len(columns), generator=generator, device=device)
        self.unread = (chance < 0.8) & (columns >= 2) & (columns < ends - 5)
        size_of = (LAYERS, batch, group * cases.KV_HEADS)
        self.shape = (*size_of, size)

    def empty(self, dtype: torch.dtype) -> RestTokens:
        device = self.q.device
        keys, values = (torch.full(self.shape, 7.0, dtype=dtype, device=device) for _ in range(2))
        return RestTokens(keys, values, torch.full(self.shape[:3], 7.0, device=device))

    def found(self, k: Held, v: Held, **options: int) -> RestTokens:
        from dustin_runtime.kernels.rest import update_rest

        out = self.empty(self.q.dtype)
        update_rest(out, self.q, k, v, self.layer, self.position, self.unread, 0.25, **options)
        return out

    def wanted(self, k: torch.Tensor, v: torch.Tensor) -> RestTokens:
        out = self.empty(torch.float64)
        update_rest_reference(out, self.q.double(), k, v, self.layer, self.position, self.unread, 0.25)
        return out

    def check(self, found: RestTokens, want: RestTokens) -> None:
        """`bias` is the mass minus what the key gives: what counts, and is compared, is their sum at the queries."""
        tolerance = cases.tolerance(self.q.dtype)
        for side in range(2):
            assert cases.error(found[side], want[side]) < 2 * tolerance
        assert torch.equal(found.bias.isfinite(), want.bias.isfinite())
        for turn, row in self.layer.ge(0).nonzero().tolist():
            at = int(self.layer[turn, row]), row
            q = self.q[turn, row].double().mean(dim=0)
            there = want.bias[at].isfinite()
            masses = [(q * x.keys[at].double()).sum(1) * q.shape[1] ** -0.5 + x.bias[at] for x in (found, want)]
            torch.testing.assert_close(masses[0][there], masses[1][there], rtol=2 * tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("size", "group", "queries"), SHAPES)
def test_tokens_of_layers_that_take_turns(
    size: int, group: int, queries: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    case = Case(size, group, queries, dtype, generator)
    found = case.found(case.k, case.v)
    case.check(found, case.wanted(case.k.double(), case.v.double()))
    for one, same in zip(found, case.found(case.k, case.v, programs=3), strict=True):
        assert torch.equal(one, same)


@pytest.mark.parametrize("dtype", cases.DTYPES[1:])
def test_keys_of_several_pieces(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Prefixes end within, at and behind the border of a piece; how much is shown of the cache changes no bit."""
    from dustin_runtime.kernels.rest import SHARE, update_rest

    case = Case(64, 4, 2, dtype, generator, [2 * SHARE + 70, SHARE, SHARE + 1, SHARE + 8, 5])
    found = case.found(case.k, case.v)
    case.check(found, case.wanted(case.k.double(), case.v.double()))
    row, columns = slice(3, 4), SHARE + 8
    alone = RestTokens(*(torch.full_like(x[:, row], 7.0) for x in found))
    update_rest(
        alone, case.q[:, row], case.k[:, row, :columns], case.v[:, row, :columns], case.layer[:, row],
        case.position[row], case.unread[row, :columns].contiguous(), 0.25,
    )  # fmt: skip
    for one, same in zip(alone, found, strict=True):
        assert torch.equal(one, same[:, row])


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_tokens_of_an_8_bit_cache(dtype: torch.dtype, generator: torch.Generator) -> None:
    if cases.ON_GPU and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    case = Case(64, 3, 4, dtype, generator)
    held = []
    for whole in (case.k.float(), case.v.float()):
        powers = torch.randint(-7, 1, whole.shape[:2] + whole.shape[3:4], generator=generator, device=whole.device)
        scale = torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers)
        held.append(Scaled(torch.stack([narrowed(x, y) for x, y in zip(whole, scale, strict=True)]), scale))
    exact = [torch.stack([plain(Scaled(*one), torch.float64) for one in zip(x.stored, x.scale, strict=True)])
             for x in held]  # fmt: skip
    case.check(case.found(*held), case.wanted(*exact))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("size", "group", "tokens"), cases.SHAPES[:: 9 if cases.ON_GPU else 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_attention_to_a_list_and_the_rest(
    size: int, group: int, tokens: int, scaled: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    from dustin_runtime.kernels.sparse import sparse_attention, tiling

    if scaled and cases.ON_GPU and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    k, v = cases.cache(cases.LENGTHS, tokens, size, dtype, generator)
    q = cases.queries(len(k), tokens, group, size, dtype, generator)
    start = torch.tensor(cases.LENGTHS, device=k.device)
    kept = torch.stack([
        torch.nn.functional.pad(torch.randperm(n, generator=generator, device=k.device)[:40].sort()[0],
                                (0, 40 - min(n, 40)), value=-1)
        for n in cases.LENGTHS
    ]).unsqueeze(1)  # fmt: skip
    made = torch.randn(2, len(k), group * cases.KV_HEADS, size, generator=generator, device=k.device).to(dtype)
    bias = 8 * torch.randn(len(k), group * cases.KV_HEADS, generator=generator, device=k.device)
    bias[1] = float("-inf")
    rest = RestTokens(made[0], made[1], bias)
    held: list[Held] = [k, v]
    if scaled:
        powers = torch.randint(-7, 1, (2, len(k), cases.KV_HEADS), generator=generator, device=k.device)
        scales = torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers)
        held = [Scaled(narrowed(x, scale), scale) for x, scale in zip((k, v), scales, strict=True)]
    exact = [plain(x, torch.float64).double() for x in held]
    want = sparse_reference(q.double(), *exact, start, kept, rest=RestTokens(*(x.double() for x in rest)))
    base = tiling(len(k), cases.KV_HEADS, tokens * group, size, q.itemsize, 40, 132)
    saved = torch.full((len(k), tokens + 2, *q.shape[2:]), 7.0, dtype=dtype, device=q.device)
    full = torch.arange(len(k), device=q.device) == 1
    for splits, rows in ((1, None), (3, full)):
        kept_queries = saved.clone()
        found = sparse_attention(
            q, *held, start, kept, base._replace(splits=splits), full=rows, rest=rest, saved=kept_queries
        )
        attended = torch.ones_like(full) if rows is None else ~rows
        assert cases.error(found[attended], want[attended]) < cases.tolerance(dtype)
        save_queries(expected := saved.clone(), q, start)
        assert torch.equal(kept_queries, expected)  # of rows that another kernel attends for, too
    nothing = rest._replace(bias=torch.full_like(bias, float("-inf")))
    found = sparse_attention(q, *held, start, kept, base, rest=nothing)
    assert cases.error(found, sparse_attention(q, *held, start, kept, base).double()) < cases.tolerance(dtype)
