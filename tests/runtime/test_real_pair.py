"""Qwen2.5-Coder 1.5B and 0.5B on a GPU: full verification is exact in fp32, and within a near tie of it in bf16."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dustin_profile.texts import topics
from dustin_runtime.config import load_config
from dustin_runtime.engine import Engine
from dustin_runtime.loading import Pair, open_pair
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.policies import make_policy
from dustin_runtime.prefill import prefill
from dustin_runtime.step import Stepper

pytestmark = [pytest.mark.gpu, pytest.mark.qwen]

CONFIG = Path(__file__).parents[2] / "results" / "arr-qwen-coder1.5b_0.5b.yaml"
LENGTHS = [4096, 3000, 2048, 700]
NEW = 64
NEAR = 0.5
"""Logits that bf16 may order either way: its step is 0.125 between 16 and 32, where the largest lie."""


@pytest.fixture(scope="module")
def pair() -> Pair:
    folder = Path(os.environ["DUSTIN_QWEN_PAIR"])
    target, draft = (next(folder.glob(f"*{size}*.gguf")) for size in ("1.5B", "0.5B"))
    return open_pair(str(target), str(draft), offline=True)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def models(request: pytest.FixtureRequest, pair: Pair) -> Iterator[tuple[Decoder, Decoder]]:
    target = pair.load_target(request.param, "cuda")
    yield target, pair.load_draft(target)
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def prompts(pair: Pair) -> list[list[int]]:
    ids = pair.tokenizer.encode(topics()[:200_000], add_special_tokens=False)
    return [ids[5000 * row : 5000 * row + length] for row, length in enumerate(LENGTHS)]


def generate(
    models: tuple[Decoder, Decoder], pair: Pair, prompts: list[list[int]], method: str, budget: int, graph: bool = True
) -> list[list[int]]:
    selection = load_config(CONFIG).selection
    selection = selection.model_copy(update={"budget": budget, "m": selection.m * budget // selection.budget})
    policy = make_policy(method, selection)
    window = 256 if policy.partial_draft else None
    stepper = Stepper(*models, policy, policy.selection, 4, pair.shared_vocab, draft_budget=window)
    return [g.tokens for g in Engine(stepper, graph=graph).generate(prompts, NEW)[0]]


@pytest.mark.parametrize(("method", "budget"), [("sd", 256), ("magicdec", 256), ("triforce", 256), ("dustin", 8192)])
def test_full_verification_is_vanilla(
    models: tuple[Decoder, Decoder], pair: Pair, prompts: list[list[int]], method: str, budget: int
) -> None:
    """fp32: token for token. bf16: up to the first place where the target was undecided between the two."""
    vanilla = generate(models, pair, prompts, "vanilla", 256)
    found = generate(models, pair, prompts, method, budget)
    if models[0].dtype == torch.float32:
        assert found == vanilla
        return
    for prompt, one, other in zip(prompts, vanilla, found, strict=True):
        place = next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        if place is not None:
            logits = full_logits(models[0], [*prompt, *one[:place]])[: pair.shared_vocab]
            best = float(logits.max())
            assert best - float(logits[one[place]]) < NEAR
            assert best - float(logits[other[place]]) < NEAR


@torch.inference_mode()
def full_logits(model: Decoder, ids: list[int]) -> torch.Tensor:
    """Of full verification, behind the last token: [vocab] fp32."""
    hidden = prefill(model, model.cache(1, len(ids)), ids)
    return model.logits(hidden).float().cpu()


@pytest.mark.parametrize("method", ["vanilla", "dustin"])
def test_graph_and_eager_give_equal_tokens(
    models: tuple[Decoder, Decoder], pair: Pair, prompts: list[list[int]], method: str
) -> None:
    assert generate(models, pair, prompts, method, 256) == generate(models, pair, prompts, method, 256, graph=False)
