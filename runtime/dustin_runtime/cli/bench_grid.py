"""`dustin-run bench`: batch x context x method, from real weights and text or from shapes alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dustin_runtime.cli.support import go_offline, one_process, require_one_budget
from dustin_runtime.errors import UsageError
from dustin_runtime.method_names import METHODS
from dustin_runtime.parallel.environment import world_size
from dustin_runtime.recipe_files import complete_pair

if TYPE_CHECKING:
    import torch

    from dustin_runtime.bench.grid import Case
    from dustin_runtime.bench.subject import Subject
    from dustin_runtime.config import DustinConfig, Selection
    from dustin_runtime.models.decoder import Decoder
    from dustin_runtime.parallel.ranks import Ranks
    from dustin_runtime.policies import Asked, Policy


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
    method: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join(METHODS)}; repeat. Default: vanilla, sd, magicdec, dustin."),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Repeat. Default: 16.")] = None,
    context_tokens: Annotated[
        list[int] | None, typer.Option("--context", min=32, help="Tokens before the first step. Repeat. Default: 8192.")
    ] = None,
    depth: Annotated[int | None, typer.Option(min=1, max=64, help="Draft tokens per step.")] = None,
    budget: Annotated[int | None, typer.Option(help="Prefix tokens that verification reads.")] = None,
    m: Annotated[int | None, typer.Option(help="How many of them lookahead chooses.")] = None,
    draft_cache: Annotated[
        list[str] | None,
        typer.Option(help="full or sink+window, of sparse methods. Repeat for both. Default: the config's, else full."),
    ] = None,
    draft_budget: Annotated[
        int | None, typer.Option(min=8, help="Tokens that a windowed draft reads. Default: the config's, else 512.")
    ] = None,
    guard: Annotated[
        float | None,
        typer.Option(help="Dustin's methods verify a row in full whose estimated ARR is below this; 1: always."),
    ] = None,
    full_every: Annotated[
        int | None, typer.Option(min=1, help="Dustin's methods verify every Nth step of a row in full.")
    ] = None,
    target_arr: Annotated[
        float | None,
        typer.Option(help="dustin reads the smallest of several budgets whose estimated ARR reaches this."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timings of each component.")] = 10,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_dtype: Annotated[
        str, typer.Option(help="Of the target's KV cache: auto, which is the model's, or fp8.")
    ] = "auto",
    offline: Annotated[bool, typer.Option("--offline", help="Use only local files.")] = False,
    all_reduce: Annotated[
        str | None,
        typer.Option(help="Under torchrun on GPUs, how ranks sum: nccl (default), one-shot, two-shot; auto times all."),
    ] = None,
    rank_timeout: Annotated[
        int, typer.Option(min=1, help="Under torchrun, seconds that a process waits for another within a step.")
    ] = 60,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the document here, and as Markdown beside it.")
    ] = None,
) -> None:
    """Time decoding: tokens/s, tau, time and bandwidth of each part of a step, and the floor of the hardware.

    `bench attention` times attention alone. Under torchrun the target is split over the processes.
    """
    given = dict(locals())
    if context.invoked_subcommand:
        if world_size() > 1:
            raise one_process(f"bench {context.invoked_subcommand}")
        return
    if offline:
        go_offline()
    import torch

    from dustin_runtime.acceptance import rate_for
    from dustin_runtime.bench.grid import Setup, made, measure
    from dustin_runtime.bench.grid_report import document, line, save
    from dustin_runtime.bench.subject import parts_of_text
    from dustin_runtime.bench.sums import choose_sums
    from dustin_runtime.cli.facts import facts
    from dustin_runtime.config import changed, load_config
    from dustin_runtime.files import require_writable
    from dustin_runtime.loading import pick_device, pick_dtype
    from dustin_runtime.misfits import warn_of_config
    from dustin_runtime.parallel.ranks import joined
    from dustin_runtime.parallel.reduce import AUTO, DEFAULT, require_symmetric, require_way
    from dustin_runtime.parallel.watch import LONG
    from dustin_runtime.policies import POLICIES, Asked
    from dustin_runtime.scaled import pick_kv_dtype

    with joined(rank_timeout) as ranks:
        with ranks.alike():
            methods = list(dict.fromkeys(method or ["vanilla", "sd", "magicdec", "dustin"]))
            if unknown := [name for name in methods if name not in POLICIES]:
                raise UsageError(f"--method {unknown[0]}: unknown (known: {', '.join(POLICIES)})")
            served = load_config(config) if config else None
            draft_caches = list(dict.fromkeys(draft_cache or [served.draft_cache if served else "full"]))
            if wrong := [kind for kind in draft_caches if kind not in ("full", "sink+window")]:
                raise UsageError(f"--draft-cache {wrong[0]}: give full or sink+window")
            if synthetic_context == bool(file):
                raise UsageError(
                    "what fills the context? give either --file with text to prefill or --synthetic-context"
                )
            if random_weights and file:
                raise UsageError("--random-weights cannot read --file; give --synthetic-context")
            if json_file:
                if json_file.suffix == ".md":
                    raise UsageError(f"--json {json_file}: the Markdown would replace it; give another ending")
                if ranks.rank == 0:
                    require_writable(json_file, "--json")
            batches, contexts = list(dict.fromkeys(batch or [16])), list(dict.fromkeys(context_tokens or [8192]))
            kind = pick_device(ranks.device(device))
            element, cached = pick_dtype(dtype, kind), pick_kv_dtype(kv_dtype, kind)
            require_way(all_reduce or AUTO, ranks.world, kind)
            subject = _subject(pair, target, draft, served, random_weights, offline, kind, element)
            selection, gamma = changed(subject.selection, budget, m), depth or subject.depth
            if force_acceptance is not None:
                rate_for(force_acceptance, gamma)
            require_one_budget(budget, target_arr)
            asked = Asked(guard, full_every, target_arr)
            if served and budget is not None:
                served = served.model_copy(update={"adaptive_budget": None})
            if any(x is not None for x in asked):
                _check_guard(methods, selection, served, asked)
            cases = list(_cases(methods, batches, contexts, draft_caches))
            draft_budget = draft_budget or (served and served.draft_budget) or 512
            sizes = (element.itemsize, cached.itemsize if cached else None)
            make = partial(made, selection=selection, config=served, asked=asked)
            if served:
                for case in cases:
                    warn_of_config(make(case.method), served, selection, depth=gamma, windowed=case.windowed)
            _check(subject, make, selection, gamma, steps, cases, draft_budget, kind, *sizes, ranks.world)
            prompts = None
            if not synthetic_context:
                prompts = parts_of_text(subject.tokenizer, file or [], max(batches), max(contexts))
        if not ranks.alone:
            ranks.agree(facts(_options(given), prompts, served, subject.origins(), kind))
        if talk := ranks.collectives(kind):
            require_symmetric(all_reduce or AUTO, talk, torch.device(kind), element)
        with ranks.alike(loading=True):
            decoders = subject.load(talk)
        if random_weights and not ranks.alone:
            _agree_on_noise(ranks, decoders)
        sums = choose_sums(decoders[0], all_reduce or DEFAULT, _summed(cases, gamma, decoders, prompts))
        setup = Setup(
            *decoders,
            selection,
            gamma,
            subject.shared_vocab,
            draft_budget,
            force_acceptance,
            prompts,
            random_weights,
            steps,
            repeats,
            ranks,
            sums,
            cached,
            make,
        )
        if ranks.rank == 0:
            for size in sums:
                print(size)
        rows: list[dict[str, Any]] = []
        for case in cases:
            with decoders[0].watched(LONG):
                rows.append(measure(setup, case))
            base = next((r for r in rows if r["method"] == "vanilla" and _same(r, rows[-1])), None)
            rows[-1]["alpha"] = rows[-1]["tokens_per_s"] / base["tokens_per_s"] if base else None
            with ranks.alike():
                if ranks.rank == 0:
                    print(line(rows[-1], len(rows) == 1, ranks.world), flush=True)
                    if json_file:
                        save(document(setup, rows, subject.name, sys.argv[1:]), json_file)


def _options(given: dict[str, object]) -> dict[str, object]:
    """What was asked for, by the names of the command line."""
    named = {"context_tokens": "context", "json_file": "json"}
    return {named.get(name, name): value for name, value in given.items() if name != "context"}


def _agree_on_noise(ranks: Ranks, decoders: tuple[Decoder, Decoder]) -> None:
    """Refuse to measure if what is whole on every rank was not drawn alike.

    Raises:
        ConflictError: it was not.
    """
    from dustin_runtime.bench.noise import fingerprint

    sides = zip(("target", "draft"), decoders, strict=True)
    ranks.agree({f"the {side}'s random weights": fingerprint(model) for side, model in sides})


def _summed(
    cases: list[Case], depth: int, decoders: tuple[Decoder, Decoder], prompts: list[list[int]] | None
) -> set[int]:
    """Tokens of the sums over ranks that cases have."""
    from dustin_runtime.parallel.sums import prefill_tokens, step_tokens
    from dustin_runtime.policies import POLICIES

    target, draft = decoders
    found = prefill_tokens(target, max(case.context for case in cases)) if prompts else set()
    for case in cases:
        found |= step_tokens(case.batch, depth if POLICIES[case.method].drafts else 0, draft.split is not None)
    return found


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
                    yield Case(name, rows, tokens, cache == "sink+window" or POLICIES[name].partial_draft)


def _subject(
    pair: str | None,
    target: str | None,
    draft: str | None,
    served: DustinConfig | None,
    random_weights: bool,
    offline: bool,
    device: str,
    dtype: torch.dtype,
) -> Subject:
    from dustin_runtime.bench.subject import noise, real

    if random_weights:
        if not pair or target or draft:
            raise UsageError("--random-weights needs --pair, whose shapes it takes, and no --target or --draft")
        return noise(pair, served, dtype, device)
    from dustin_runtime.cli.generation_checks import open_models

    opened, depth = open_models(served, pair, target, draft, None, offline)
    return real(opened, pair or f"{opened.target_id} / {opened.draft_id}", served, depth, dtype, device)


def _check_guard(methods: list[str], selection: Selection, served: DustinConfig | None, asked: Asked) -> None:
    """Refuse what no method of the run can do, and what the configuration does not suffice for."""
    from dustin_runtime.bench.grid import made
    from dustin_runtime.policies import guarded, judged, make_policy

    able = [name for name in methods if judged(make_policy(name, selection))]
    if not able:  # names the option
        guarded(make_policy(methods[0], selection), served, **asked._asdict())
    for name in able:
        made(name, selection, served, asked)


def _check(
    subject: Subject,
    make: Callable[[str], Policy],
    selection: Selection,
    depth: int,
    steps: int,
    cases: list[Case],
    draft_budget: int,
    device: str,
    element_bytes: int,
    kv_bytes: int | None,
    world: int,
) -> None:
    """Refuse before anything is loaded what cannot be shared by so many ranks, or does not fit in memory or context."""
    from dustin_runtime.bench.grid import new_tokens
    from dustin_runtime.budget import check_reach
    from dustin_runtime.memory_plan import free_bytes, plan, require
    from dustin_runtime.models.shape import check_context
    from dustin_runtime.parallel.shards import Share
    from dustin_runtime.policies import require_over_ranks

    if world > 1:
        for name in dict.fromkeys(case.method for case in cases):
            require_over_ranks(make(name), world)
        Share.of(subject.target, 0, world)
    free = free_bytes(device)
    windowed = any(case.windowed for case in cases)
    check_reach(selection, draft_budget if windowed else None, subject.target, subject.draft)
    for case in cases:
        capacity = case.context + new_tokens(steps, depth)
        for shape in (subject.target, subject.draft):
            check_context(shape, capacity, f"--context {case.context} with {steps} steps")
        if free is not None:
            policy = make(case.method)
            scores = policy.uses_history or policy.uses_lookahead
            need = plan(
                subject.target,
                subject.draft if policy.drafts else None,
                batch=case.batch,
                capacity=capacity,
                depth=depth,
                selection=policy.scored(subject.draft) if scores else None,
                element_bytes=element_bytes,
                draft_stores=subject.draft_stores,
                draft_budget=policy.draft_keeps(draft_budget) if case.windowed else None,
                policies=[policy],
                world=world,
                kv_bytes=kv_bytes,
            )
            require(need, free)
