"""`dustin-run bench`: batch x context x method, from real weights and text or from shapes alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dustin_runtime.errors import MissingError, UsageError
from dustin_runtime.recipe_files import complete_pair

if TYPE_CHECKING:
    import torch

    from dustin_runtime.bench.grid import Case, Setup
    from dustin_runtime.config import Selection
    from dustin_runtime.models.decoder import Decoder
    from dustin_runtime.models.shape import ModelShape


def grid(
    context: typer.Context,
    pair: Annotated[str | None, typer.Option(help="A known pair.", autocompletion=complete_pair)] = None,
    target: Annotated[str | None, typer.Option(help="Hub id, folder or .gguf file.")] = None,
    draft: Annotated[str | None, typer.Option(help="The same, or self:N.")] = None,
    config: Annotated[Path | None, typer.Option(help="Emitted YAML or run directory.")] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Noise in the shapes of --pair: nothing is loaded.")
    ] = False,
    force_acceptance: Annotated[
        float | None, typer.Option(help="Accept drafts at the rate that emits this many tokens per step.")
    ] = None,
    file: Annotated[
        list[Path] | None, typer.Option(help="Text to prefill; rows take different parts. Repeat for several.")
    ] = None,
    synthetic_context: Annotated[
        bool, typer.Option("--synthetic-context", help="Fill the caches with noise instead of a prefill.")
    ] = False,
    method: Annotated[list[str] | None, typer.Option(help="Repeat. Default: vanilla, sd, magicdec, dustin.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Repeat. Default: 16.")] = None,
    context_tokens: Annotated[
        list[int] | None, typer.Option("--context", min=32, help="Tokens before the first step. Repeat. Default: 8192.")
    ] = None,
    depth: Annotated[int | None, typer.Option(min=1, max=64, help="Draft tokens per step.")] = None,
    budget: Annotated[int | None, typer.Option(help="Prefix tokens that verification reads.")] = None,
    m: Annotated[int | None, typer.Option(help="How many of them lookahead chooses.")] = None,
    draft_cache: Annotated[
        list[str] | None, typer.Option(help="full or sink+window, of sparse methods. Repeat for both. Default: full.")
    ] = None,
    draft_budget: Annotated[int, typer.Option(min=8, help="Tokens that a windowed draft reads.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timings of each component.")] = 10,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    offline: Annotated[bool, typer.Option("--offline", help="Use only local files.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the document here, and as Markdown beside it.")
    ] = None,
) -> None:
    """Time decoding: tokens/s, tau, time and bandwidth of each part of a step, and the floor of the hardware.

    `bench attention` times attention alone.
    """
    if context.invoked_subcommand:
        return
    if offline:
        from dustin_runtime.cli.support import go_offline

        go_offline()
    from dustin_runtime.bench.grid import Setup, measure
    from dustin_runtime.bench.grid_report import document, line, save
    from dustin_runtime.loading import pick_device, pick_dtype
    from dustin_runtime.policies import POLICIES

    methods = method or ["vanilla", "sd", "magicdec", "dustin"]
    if unknown := [name for name in methods if name not in POLICIES]:
        raise UsageError(f"--method {unknown[0]}: unknown (known: {', '.join(POLICIES)})")
    draft_caches = draft_cache or ["full"]
    if wrong := [kind for kind in draft_caches if kind not in ("full", "sink+window")]:
        raise UsageError(f"--draft-cache {wrong[0]}: give full or sink+window")
    if not synthetic_context and not file:
        raise UsageError("what fills the context? give --file with text to prefill, or --synthetic-context")
    batches, contexts = batch or [16], context_tokens or [8192]
    kind = pick_device(device)
    models = _models(pair, target, draft, config, random_weights, offline, kind, pick_dtype(dtype, kind))
    setup = Setup(
        models.target,
        models.draft,
        _changed(models.selection, budget, m),
        depth or models.depth,
        models.shared_vocab,
        draft_budget,
        force_acceptance,
        None if synthetic_context else _prompts(models.tokenizer, file or [], max(batches), max(contexts)),
        random_weights,
        steps,
        repeats,
    )
    cases = list(_cases(methods, batches, contexts, draft_caches))
    _check(setup, cases)
    rows: list[dict[str, Any]] = []
    for case in cases:
        rows.append(measure(setup, case))
        base = next((r for r in rows if r["method"] == "vanilla" and _same(r, rows[-1])), None)
        rows[-1]["alpha"] = rows[-1]["tokens_per_s"] / base["tokens_per_s"] if base else None
        print(line(rows[-1], header=len(rows) == 1), flush=True)
        if json_file:
            save(document(setup, rows, models.name, sys.argv[1:]), json_file)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (one["batch"], one["context"]) == (other["batch"], other["context"])


def _cases(methods: list[str], batches: list[int], contexts: list[int], draft_caches: list[str]) -> Iterator[Case]:
    """Vanilla first, so that the others can be compared with it."""
    from dustin_runtime.bench.grid import Case
    from dustin_runtime.policies import POLICIES

    for tokens in contexts:
        for rows in batches:
            for name in sorted(methods, key=lambda name: name != "vanilla"):
                sparse = POLICIES[name].needs_selection
                for cache in draft_caches if sparse else ["full"]:
                    yield Case(name, rows, tokens, cache == "sink+window" or POLICIES[name].windowed_draft)


class _Models:
    """What is timed."""

    def __init__(
        self,
        name: str,
        target: Decoder,
        draft: Decoder,
        selection: Selection,
        depth: int,
        shared_vocab: int,
        tokenizer: Any = None,
    ) -> None:
        self.name = name
        self.target = target
        self.draft = draft
        self.selection = selection
        self.depth = depth
        self.shared_vocab = shared_vocab
        self.tokenizer = tokenizer


def _models(
    pair: str | None,
    target: str | None,
    draft: str | None,
    config: Path | None,
    random_weights: bool,
    offline: bool,
    device: str,
    dtype: torch.dtype,
) -> _Models:
    from dustin_runtime.config import load_config
    from dustin_runtime.models.weights import random_decoder
    from dustin_runtime.pairs import find_pair

    served = load_config(config) if config else None
    if random_weights:
        if not pair:
            raise UsageError("--random-weights needs --pair, whose shapes it takes")
        recipe = find_pair(pair)
        shapes = recipe.target.shape, recipe.draft.shape
        # Contexts beyond what the weights were trained for are fine for noise.
        longer = [shape.model_copy(update={"context": 1 << 20}) for shape in shapes]
        models = [random_decoder(shape, dtype, device, seed) for seed, shape in enumerate(longer)]
        vocab = recipe.target.tokenizer_vocab or min(shape.vocab for shape in shapes)
        chosen = served.selection if served else _spread(*shapes, recipe.budget)
        return _Models(recipe.name, models[0], models[1], chosen, recipe.depth, vocab)
    from dustin_runtime.cli.generate import open_models

    opened, depth = open_models(served, pair, target, draft, None, offline)
    decoder = opened.load_target(dtype, device)
    chosen = served.selection if served else _spread(opened.target_shape, opened.draft_shape, 512)
    name = pair or f"{opened.target_id} / {opened.draft_id}"
    return _Models(name, decoder, opened.load_draft(decoder), chosen, depth, opened.shared_vocab, opened.tokenizer)


def _spread(target: ModelShape, draft: ModelShape, budget: int) -> Selection:
    """Heads as a search might choose them, where no config says: four per layer, spread over the KV heads."""
    from dustin_runtime.config import LayerHeads, Selection

    def heads(shape: ModelShape) -> tuple[int, ...]:
        count = min(4, shape.query_heads)
        return tuple(index * shape.query_heads // count for index in range(count))

    layers = sorted({draft.layers * part // 4 for part in (1, 2, 3)})
    return Selection(
        budget=budget,
        sink=4,
        window=16,
        m=(budget - 20) // 3,
        history=LayerHeads(layer=target.layers // 2, heads=heads(target)),
        lookahead=tuple(LayerHeads(layer=layer, heads=heads(draft)) for layer in layers),
    )


def _changed(selection: Selection, budget: int | None, m: int | None) -> Selection:
    from pydantic import ValidationError

    from dustin_runtime.config import Selection
    from dustin_runtime.validation import one_line

    changes: dict[str, int] = {}
    if budget is not None:
        changes = {"budget": budget, "m": selection.m * budget // selection.budget}
    if m is not None:
        changes["m"] = m
    try:
        return Selection.model_validate(selection.model_dump() | changes)
    except ValidationError as error:
        raise UsageError(f"--budget, --m: {one_line(error)}") from None


def _prompts(tokenizer: Any, files: list[Path], rows: int, tokens: int) -> list[list[int]]:
    """Parts of the text, one per row, evenly spaced over it."""
    if tokenizer is None:
        raise UsageError("--random-weights cannot read --file; give --synthetic-context")
    from dustin_runtime.prompts import gather_prompts

    ids: list[int] = []
    for text in gather_prompts([], files, None, ""):
        ids += tokenizer.encode(text, add_special_tokens=False)
    if len(ids) < tokens:
        raise MissingError(f"{files[0]}: {len(ids)} tokens of text do not fill a context of {tokens}; give more --file")
    step = (len(ids) - tokens) // max(rows - 1, 1)
    return [ids[row * step : row * step + tokens] for row in range(rows)]


def _check(setup: Setup, cases: list[Case]) -> None:
    """Refuse before the first measurement what does not fit in memory or context."""
    import torch

    from dustin_runtime.acceptance import rate_for
    from dustin_runtime.memory_plan import plan, require
    from dustin_runtime.models.shape import check_context

    if setup.forced_tau is not None:
        rate_for(setup.forced_tau, setup.depth)
    new = (setup.steps + 8) * (setup.depth + 1)
    for case in cases:
        for model in (setup.target, setup.draft):
            check_context(model.shape, case.context + new, f"--context {case.context} with {setup.steps} steps")
        if setup.target.device.type == "cuda":
            need = plan(
                setup.target.shape,
                setup.draft.shape,
                batch=case.batch,
                capacity=case.context + new,
                depth=setup.depth,
                selection=setup.selection,
                element_bytes=setup.target.dtype.itemsize,
                own_draft_weights=setup.draft.weights.embedding is not setup.target.weights.embedding,
            )
            require(need, torch.cuda.get_device_properties(setup.target.device).total_memory)
