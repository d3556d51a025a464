"""What a policy does beside the drafting comes at the place that needs no wait on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dustin_runtime.config import LayerHeads, Selection
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.policies.base import Signals
from dustin_runtime.policies.dustin import Dustin
from dustin_runtime.step import Stepper

SHAPE = ModelShape(
    family="llama", layers=4, hidden=48, ffn=64, query_heads=6, kv_heads=2, head_size=8, vocab=40, context=512
)
SELECTION = Selection(
    budget=20,
    sink=2,
    window=4,
    m=7,
    history=LayerHeads(layer=2, heads=(1, 5)),
    lookahead=(LayerHeads(layer=1, heads=(0, 4)),),
)


def test_a_policy_begins_before_the_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no draft."""
    order: list[str] = []

    @dataclass(frozen=True)
    class Noted(Dustin):
        works_beside: ClassVar[bool] = True

        def begin(self, signals: Signals, share: float | None) -> None:
            assert signals.prefix_keys().shape[:2] == (SHAPE.layers, 2) and share is None
            order.append("begin")

        def select(self, signals: Signals) -> Tensor:
            order.append("select")
            return super().select(signals)

    def noted(name: str, of_target: str, of_draft: str) -> None:
        inner = getattr(Decoder, name)

        def call(self: Decoder, *given: Any, **named: Any) -> Any:
            order.append(of_target if self is target else of_draft)
            return inner(self, *given, **named)

        monkeypatch.setattr(Decoder, name, call)

    target = random_decoder(SHAPE, torch.float32, "cpu", seed=1)
    stepper = Stepper(target, target.first_layers(2), Noted(SELECTION), SELECTION, 3, 37)
    state = stepper.state(2, 200)
    noted("forward", "target", "draft")
    noted("own_logits", "logits", "")
    monkeypatch.setattr("dustin_runtime.step.advance", lambda *_: order.append("advance") or torch.zeros(2, 7))
    stepper(state)
    assert [word for word in order if word] == [
        *("begin", "draft", "draft", "draft", "select", "target", "logits", "advance"),
    ]  # fmt: skip
