"""The attention that queries pay in layers of their own choice: the kernel against the plain reference."""

from __future__ import annotations

import cases
import pytest
import torch

from dustin_runtime.attention.scoring import layer_mass_reference
from dustin_runtime.scaled import Held, Scaled, narrowed, plain

LAYERS = 3
SHAPES = [(64, 3, 8), (128, 8, 3), (64, 7, 19), (128, 1, 1)]
if cases.ON_GPU:
    SHAPES += [(128, 6, 8), (128, 6, 32), (128, 7, 8), (128, 7, 32), (128, 8, 32), (128, 8, 64), (64, 5, 64)]
CASES = [(*shape, dtype) for shape in SHAPES for dtype in cases.DTYPES]
if not cases.ON_GPU:  # queries of two parts, which are smaller with four bytes
    CASES[CASES.index((64, 7, 19, torch.float32))] = (64, 7, 10, torch.float32)
NARROW = [torch.float16, torch.bfloat16] if cases.ON_GPU else [torch.float16]


def keys(size: int, dtype: torch.dtype, generator: torch.Generator, lengths: list[int]) -> torch.Tensor:
    """[LAYERS, batch, columns, kv_heads, size], NaN where no token lies."""
    caches = [cases.cache(lengths, 0, size, dtype, generator)[0] for _ in range(LAYERS)]
    return torch.stack([cache.transpose(1, 2) for cache in caches]).transpose(2, 3)[:, :, : max(lengths) + 2]


def asked(
    size: int, group: int, queries: int, dtype: torch.dtype, generator: torch.Generator, lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of two turns, the layers that they are of, and where they stand: at the end of each prefix."""
    batch = len(lengths)
    q = cases.queries(2 * batch, queries, group, size, dtype, generator).unflatten(0, (2, batch))
    turns = torch.arange(2, device=q.device).unsqueeze(1)
    layer = (turns + 2 * torch.arange(batch, device=q.device)) % LAYERS
    last = torch.tensor(lengths, device=q.device).unsqueeze(1) + torch.arange(-queries, 0, device=q.device)
    return q, layer, last.clamp(min=0)


@pytest.mark.parametrize(("size", "group", "queries", "dtype"), CASES)
def test_every_sequence_may_ask_other_layers(
    size: int, group: int, queries: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    from dustin_runtime.kernels.layer_mass import layer_mass

    held = keys(size, dtype, generator, cases.LENGTHS)
    q, layer, position = asked(size, group, queries, dtype, generator, cases.LENGTHS)
    found = layer_mass(q, held, layer, position)
    want = layer_mass_reference(q.double(), held.double().nan_to_num(), layer, position)
    assert found.shape == (2, len(cases.LENGTHS), cases.KV_HEADS, held.shape[2]) and found.dtype == torch.float32
    assert cases.error(found, want) < 1e-5  # fp32 logits from exact products of rounded inputs
    for row, length in enumerate(cases.LENGTHS):
        assert not found[:, row, :, length:].any()
        assert found[:, row].sum(2).flatten().tolist() == pytest.approx([group * queries] * 4, rel=1e-4)
    assert torch.equal(layer_mass(q[1], held, layer[1], position), found[1])
    assert torch.equal(layer_mass(q, held, layer, position, programs=3), found)


@pytest.mark.parametrize("dtype", NARROW)
def test_keys_of_several_pieces(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Rows end within, at and behind the border of a piece; how much is shown of the cache changes no bit."""
    from dustin_runtime.kernels.layer_mass import SHARE, layer_mass

    lengths = [2 * SHARE + 70, SHARE, SHARE + 1, SHARE + 3, 5]
    held = keys(64, dtype, generator, lengths)
    q, layer, position = asked(64, 4, 6, dtype, generator, lengths)
    found = layer_mass(q, held, layer, position)
    want = layer_mass_reference(q.double(), held.double().nan_to_num(), layer, position)
    assert cases.error(found, want) < 1e-5
    for row in range(1, 5):
        one, length = slice(row, row + 1), lengths[row]
        shown = held[:, one, :length]
        alone = layer_mass(q[:, one], shown, layer[:, one], position[one], programs=2)
        assert torch.equal(alone, found[:, one, :, :length])


@pytest.mark.parametrize(("size", "group", "queries", "dtype"), CASES[: 3 * len(cases.DTYPES)])
def test_over_an_8_bit_cache(
    size: int, group: int, queries: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    from dustin_runtime.kernels.layer_mass import layer_mass

    if cases.ON_GPU and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    q, layer, position = asked(size, group, queries, dtype, generator, cases.LENGTHS)
    layers = []
    for one in keys(size, torch.float32, generator, cases.LENGTHS):
        powers = torch.randint(-7, 1, one.shape[::2], generator=generator, device=one.device)
        scale = torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers)
        layers.append(Scaled(narrowed(one, scale).transpose(1, 2).contiguous().transpose(1, 2), scale))
    held: Held = Scaled(torch.stack([x.stored for x in layers]), torch.stack([x.scale for x in layers]))
    exact = torch.stack([plain(x, torch.float64).nan_to_num() for x in layers])
    assert (
        cases.error(layer_mass(q, held, layer, position), layer_mass_reference(q.double(), exact, layer, position))
        < 1e-5
    )
