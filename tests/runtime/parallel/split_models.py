"""Tiny random models of every family, and what a rank does with them: run in this process for one rank, in a pool's for
several. Everything here is deterministic, so that texts can be compared token for token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rank_pool import RankPool
from safetensors.torch import save_file

from dustin_runtime.config import LayerHeads, Rest, Selection
from dustin_runtime.engine import Engine
from dustin_runtime.generation import Draw
from dustin_runtime.guard import Rule
from dustin_runtime.judge import Coefficients
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import load_decoder, load_headless, random_decoder, safetensors_in
from dustin_runtime.parallel.ranks import Ranks, joined
from dustin_runtime.policies import POLICIES
from dustin_runtime.policies.dustin_rest import RestMemory
from dustin_runtime.step import Stepper

SIZES: dict[str, Any] = {
    "layers": 3,
    "hidden": 48,
    "ffn": 64,
    "query_heads": 6,
    "kv_heads": 2,
    "head_size": 8,
    "vocab": 40,
    "context": 256,
}
SHAPES = {
    "llama": ModelShape(family="llama", tied=True, **SIZES | {"vocab": 41}),
    "llama-one-kv-head": ModelShape(family="llama", **SIZES | {"kv_heads": 1, "vocab": 43}),
    "mistral": ModelShape(family="mistral", **SIZES | {"kv_heads": 6, "head_size": 4}),
    "qwen2": ModelShape(family="qwen2", qkv_bias=True, **SIZES),
    "qwen3": ModelShape(family="qwen3", qk_norm=True, tied=True, **SIZES | {"vocab": 39}),
}
NINE_HEADS = ModelShape(family="llama", tied=True, **SIZES | {"query_heads": 9, "kv_heads": 3, "ffn": 48, "vocab": 41})
"""The heads of SmolLM2-135M, which three ranks can share."""
PROMPTS = [[1, 5, 9, 30, 2], [7], [3, 3, 8] * 13]
VOCAB = 37
DEPTH = 3
SPLIT = (
    *("vanilla", "sd", "magicdec", "streaming"),
    *("dustin", "dustin-t", "dustin-d", "dustin-look", "dustin-rest", "dustin-rest-look", "dustin-merged"),
)
"""Methods that can be split."""


LONG_PROMPTS = [[(step * at) % VOCAB for at in range(length)] for step, length in ((5, 64), (7, 33), (3, 90), (11, 50))]
"""Of which a short list leaves most unread."""


def selection(budget: int, m: int, heads: tuple[int, ...] = (1, 5), rest: Rest | None = None) -> Selection:
    lookahead = (LayerHeads(layer=1, heads=(0, 4)), LayerHeads(layer=0, heads=(2,)))
    return Selection(
        budget=budget, sink=2, window=4, m=m, history=LayerHeads(layer=2, heads=heads), lookahead=lookahead, rest=rest
    )


def write_weights(folder: Path, shape: ModelShape, seed: int = 0) -> Path:
    """Random weights as a model's folder holds them."""
    random = torch.Generator().manual_seed(seed)
    query, kv = shape.query_heads * shape.head_size, shape.kv_heads * shape.head_size
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    if not shape.tied:
        sizes["lm_head.weight"] = (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        sizes |= {
            f"{at}.input_layernorm.weight": (shape.hidden,),
            f"{at}.self_attn.q_proj.weight": (query, shape.hidden),
            f"{at}.self_attn.k_proj.weight": (kv, shape.hidden),
            f"{at}.self_attn.v_proj.weight": (kv, shape.hidden),
            f"{at}.self_attn.o_proj.weight": (shape.hidden, query),
            f"{at}.post_attention_layernorm.weight": (shape.hidden,),
            f"{at}.mlp.gate_proj.weight": (shape.ffn, shape.hidden),
            f"{at}.mlp.up_proj.weight": (shape.ffn, shape.hidden),
            f"{at}.mlp.down_proj.weight": (shape.hidden, shape.ffn),
        }
        if shape.qkv_bias:
            sizes |= {f"{at}.self_attn.{x}_proj.bias": (query if x == "q" else kv,) for x in "qkv"}
        if shape.qk_norm:
            sizes |= {f"{at}.self_attn.{x}_norm.weight": (shape.head_size,) for x in "qk"}
    tensors = {name: torch.randn(size, generator=random) * shape.hidden**-0.5 * 1.5 for name, size in sizes.items()}
    for name in tensors:
        if "norm" in name:
            tensors[name] = 1 + tensors[name]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_headless(folder: Path, target: Path) -> Path:
    """The first two layers and the norm of a model, as a draft that borrows the rest."""
    kept = ("model.layers.0.", "model.layers.1.", "model.norm.")
    folder.mkdir()
    save_file({n: x for n, x in safetensors_in(target) if n.startswith(kept)}, folder / "model.safetensors")
    return folder


class Case(NamedTuple):
    """One run."""

    folder: Path
    shape: ModelShape
    method: str = "vanilla"
    selection: Selection | None = None
    dtype: torch.dtype = torch.float64
    own_layers: int | None = 2
    """Layers of a draft that is made of the target's; None for another model, whole on every rank."""
    whole_layers: int | None = None
    """The same, but whole on every rank, which then drafts its own rows."""
    headless: Path | None = None
    """A draft of two layers that borrows its target's embedding and head, whole on every rank."""
    draft_budget: int | None = None
    temperature: float = 0.0
    """Of the first prompt; others are hotter."""
    prompts: Sequence[Sequence[int]] = PROMPTS
    rows: int | None = None
    pipeline: bool = False
    """Ranks have whole layers."""
    rule: Rule | None = None
    kv_dtype: torch.dtype | None = None
    new: int = 9
    """Tokens of each prompt."""


def rested(folder: Path, shape: ModelShape, period: int = 2, **options: Any) -> Case:
    """A run of dustin-rest, with turns in it and fewer rows than prompts."""
    chosen = selection(14, 4, rest=Rest(queries=3, period=period))
    given = {"dtype": torch.float32, "prompts": LONG_PROMPTS, "rows": 3, "new": 24} | options
    return Case(folder, shape, "dustin-rest", chosen, **given)


RULES = {
    "every": Rule(every=3),
    "guard": Rule(threshold=0.5, estimate=((14, Coefficients(0.1, 0.6, 0.4)),)),
    "sizes": Rule(sizes=(10, 14), target_arr=0.5, estimate=tuple((k, Coefficients(0.1, 0.6, 0.4)) for k in (10, 14))),
}
"""Which verify some rows in full, or choose among budgets."""


class Run(NamedTuple):
    """What a run left."""

    tokens: list[list[int]]
    lists: list[torch.Tensor]
    """What verification read in every step."""
    scores: list[torch.Tensor]
    """What that was chosen from."""
    kept: float
    logits: torch.Tensor
    """Of the first step, as far as a rank has them."""
    accepted: list[int]
    """Drafts, by position."""
    passes: list[tuple[int, int]]
    """Of the draft: rows and tokens."""
    draft_keys: torch.Tensor | None
    """Its cache at the end."""
    rest: torch.Tensor | None
    """[layers, rows, query_heads, head_size] of a rank, what stands in for values that are not read at the end."""
    full: int | None
    """Steps that were verified in full."""


def models(case: Case, ranks: Ranks) -> tuple[Decoder, Decoder]:
    over = ranks.collectives("cpu")
    target = load_decoder(case.folder, case.shape, case.dtype, "cpu", over, pipeline=case.pipeline and over is not None)
    if case.headless:
        return target, load_headless(case.headless, case.shape.model_copy(update={"layers": 2}), target)
    if case.whole_layers is not None:
        return target, load_decoder(case.folder, case.shape, case.dtype, "cpu").first_layers(case.whole_layers)
    if case.own_layers is not None:
        return target, target.first_layers(case.own_layers)
    shape = SHAPES["llama"].model_copy(update={"layers": 2, "vocab": 40})
    return target, random_decoder(shape, case.dtype, "cpu", seed=3)


def generate(case: Case, ranks: Ranks) -> Run:
    target, draft = models(case, ranks)
    passes: list[tuple[int, int]] = []
    forward = draft.forward

    def counted(ids: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        passes.append((ids.shape[0], ids.shape[1]))
        return forward(ids, *rest, **named)

    draft.forward = counted  # type: ignore[method-assign]
    policy, lists, scores = POLICIES[case.method](case.selection), [], []

    class Seen(type(policy)):  # type: ignore[misc]
        def select(self, signals):
            kept = super().select(signals)
            lists.append(kept if kept is None else kept.clone())
            scores.extend(signals.history().clone() for _ in range(self.uses_history))
            scores.extend(signals.lookahead().clone() for _ in range(self.uses_lookahead))
            return kept

    policy = Seen(case.selection)
    stepper = Stepper(
        target,
        draft,
        replace(policy, rule=case.rule) if case.rule else policy,
        case.selection,
        DEPTH,
        VOCAB,
        draft_budget=case.draft_budget,
        sampled=case.temperature > 0,
        nucleus=case.temperature > 0,
        kv_dtype=case.kv_dtype,
    )
    draws = [
        Draw(case.temperature * (1 + seed / 4), 0.9 - seed / 20 if case.temperature else 1.0, seed)
        for seed in range(len(case.prompts))
    ]
    logits: list[torch.Tensor] = []
    engine = Engine(stepper, rows=case.rows)
    found, statistics = engine.generate(
        case.prompts, case.new, draws=draws, on_step=lambda result, whose: logits.append(result.logits)
    )
    kept = [x for x in lists if x is not None]
    tokens = [g.tokens for g in found]
    cache = engine._state.draft_cache if engine._state else None
    held = cache.keys.clone() if cache else None
    memory = engine._state.memory if engine._state else None
    rest = memory.tokens.values.clone() if isinstance(memory, RestMemory) else None
    accepted, full = statistics.accepted_at, statistics.full
    return Run(tokens, kept, scores, statistics.kept, logits[0].clone(), accepted, passes, held, rest, full)


def alone(case: Case) -> Run:
    """In this process."""
    return generate(case, Ranks(0, 1, 0))


def together(cases: Sequence[Case]) -> list[Run]:
    """On a rank of a pool."""
    with joined(20) as ranks:
        return [generate(case, ranks) for case in cases]


def compare(pool: RankPool, cases: list[Case]) -> None:
    """On several ranks and on one: the same texts from the same lists, to the bit on every rank, and the same rest."""
    for one, *runs in zip(cases, *pool(together, cases), strict=True):
        whole = alone(one)
        for run in runs:
            assert run.tokens == whole.tokens, one
            assert run.kept == whole.kept
            assert run.accepted == whole.accepted
            assert run.full == whole.full
            assert len(run.lists) == len(whole.lists)
            assert all(torch.equal(ours, wanted) for ours, wanted in zip(run.lists, whole.lists, strict=True))
            for ours, theirs in zip(run.scores, runs[0].scores, strict=True):
                assert torch.equal(ours, theirs)  # not by luck: what lists are chosen from is the same too
        if whole.rest is not None:
            rest = torch.cat([run.rest for run in runs], dim=0 if one.pipeline else 2)
            torch.testing.assert_close(rest, whole.rest, rtol=1e-4, atol=1e-4)
