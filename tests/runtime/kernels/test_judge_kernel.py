"""The kernels that judge lists keep what the reference keeps, and estimate what it estimates."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_selection_kernel import KINDS, LENGTHS, ON_GPU, scores

from dustin_runtime.judge import Coefficients, Cut, judge_reference

BY = Coefficients(0.2, 0.5, 0.3)
CUTS = {
    "one": (Cut(48, 12, BY),),
    "history alone": (Cut(48, 0, BY),),
    "lookahead alone": (Cut(48, 36, BY),),
    "several": (Cut(30, 4, BY), Cut(48, 12, BY), Cut(300, 100, Coefficients(0.1, 0.5, 0.4))),
    "a share of some alone": (Cut(13, 0, BY), Cut(48, 36, BY), Cut(100, 40, BY)),
}


@pytest.mark.parametrize(
    ("kind", "cuts", "target"),
    [
        (kind, cuts, target)
        for kind, cuts, target in itertools.product(KINDS, CUTS, (0.0, 0.3, 1.0))
        if ON_GPU or (kind == "ties" and (target == 0.3 or (target == 1.0 and cuts == "several")))
    ],
)
def test_judged_lists_equal_the_reference(kind: str, cuts: str, target: float, generator: torch.Generator) -> None:
    from dustin_runtime.kernels.judge import judge

    lengths = torch.tensor(LENGTHS, device=generator.device)
    lookahead, history = (scores(kind, len(lengths), 5000, generator) for _ in range(2))
    lookahead[:, 5:40] *= 1 + torch.arange(len(lengths), device=lengths.device)[:, None]  # rows reach different targets
    asked = {"sink": 4, "window": 8, "target_arr": target}
    kept, estimate = judge(lookahead, history, lengths, CUTS[cuts], **asked)
    want_kept, want = judge_reference(lookahead, history, lengths, CUTS[cuts], **asked)
    assert torch.equal(kept, want_kept)
    torch.testing.assert_close(estimate, want, rtol=0, atol=1e-12)


def test_scores_that_are_not_numbers_are_judged_as_such(generator: torch.Generator) -> None:
    """No cut reaches its target with them, and no threshold is reached either."""
    from dustin_runtime.kernels.judge import judge

    lookahead, history = torch.rand(2, 3, 300, generator=generator, device=generator.device)
    history[1, 7] = float("nan")
    lengths = torch.tensor([300, 300, 20], device=generator.device)
    kept, estimate = judge(lookahead, history, lengths, CUTS["several"][:2], sink=4, window=8, target_arr=1e-6)
    assert (kept >= 0).sum(dim=1).tolist() == [30, 48, 20]
    assert estimate.isfinite().tolist() == [True, False, True]
    for cut, unlisted in ((Cut(40, 0, BY), 0), (Cut(48, 36, BY), 1)):  # which no list of this cut ranks by
        both = torch.rand(2, 1, 300, generator=generator, device=generator.device)
        both[unlisted, 0, 150] = float("nan")
        both[1 - unlisted, 0, 20:120] = 2.0
        kept, estimate = judge(*both, lengths[:1], (cut,), sink=4, window=8)
        assert 150 not in kept and estimate.isnan().all()


def test_the_kernel_serves_where_it_can_and_the_reference_elsewhere(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dustin_runtime import judge as chooser
    from dustin_runtime.kernels import judge as kernels

    monkeypatch.setattr(chooser, "usable", lambda _: True)
    served: list[int] = []

    def kernel(*given: Any, **named: Any) -> Any:
        served.append(given[3][-1].budget)
        return inner(*given, **named)

    inner = kernels.judge
    monkeypatch.setattr(kernels, "judge", kernel)
    lengths = torch.tensor([300, 30], device=generator.device)
    both = torch.rand(2, 2, 300, generator=generator, device=generator.device)
    for cuts in (CUTS["several"][:2], (Cut(9000, 40, BY),)):  # more than a list of the kernel holds
        kept, estimate = chooser.judge(*both, lengths, cuts, sink=4, window=8)
        want = judge_reference(*both, lengths, cuts, sink=4, window=8)
        assert torch.equal(kept, want[0])
        torch.testing.assert_close(estimate, want[1], rtol=0, atol=1e-12)
    assert served == [48]
