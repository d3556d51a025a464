"""The attention that positions receive: the kernel against the plain reference."""

from __future__ import annotations

import cases
import pytest
import torch

from dustin_runtime.attention.scoring import received_mass_reference

SHAPES = [(64, 3, 70, 70), (128, 1, 5, 200), (64, 7, 67, 150), (128, 2, 64, 64), (64, 1, 1, 1)]
if cases.ON_GPU:
    SHAPES += [(64, 7, 130, 333), (128, 6, 2048, 16256), (64, 7, 1920, 16256), (128, 6, 2048, 2048)]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("size", "group", "tokens", "keys"), SHAPES)
def test_equals_the_reference(
    size: int, group: int, tokens: int, keys: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Behind a row's last key lies NaN, as in a cache that was used before."""
    from dustin_runtime.kernels.mass import received_mass

    k = cases.cache([keys - tokens], tokens, size, dtype, generator)[0][:, :keys]
    q = cases.queries(1, tokens, group, size, dtype, generator)
    found, want = received_mass(q, k), received_mass_reference(q.float(), k.float())
    assert found.shape == want.shape == (1, cases.KV_HEADS, group, keys) and found.dtype == torch.float32
    assert cases.error(found, want) < 1e-5  # fp32 scores from exact products of rounded inputs
    assert found.sum(dim=3).flatten().tolist() == pytest.approx([tokens] * (cases.KV_HEADS * group), rel=1e-4)


def test_a_position_receives_nothing_from_what_stands_before_it(generator: torch.Generator) -> None:
    from dustin_runtime.kernels.mass import received_mass

    k = cases.cache([0], 150, 64, torch.float32, generator)[0][:, :150]
    q = cases.queries(1, 150, 2, 64, torch.float32, generator)
    apart = torch.cat([received_mass(q[:, at : at + 1], k[:, : at + 1]).sum(dim=3) for at in (0, 70, 149)])
    torch.testing.assert_close(apart, torch.ones_like(apart), atol=1e-5, rtol=0)
    whole, half = received_mass(q, k), received_mass(q[:, :75], k[:, :75])
    later = received_mass(q[:, 75:], k)
    torch.testing.assert_close(whole[..., :75], half + later[..., :75], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole[..., 75:], later[..., 75:], atol=1e-6, rtol=1e-6)
