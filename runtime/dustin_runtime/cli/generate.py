"""`dustin-run generate`: text from prompts, with the figures of the method that made it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dustin_runtime.errors import InterruptedRunError, UsageError
from dustin_runtime.method_names import METHODS
from dustin_runtime.recipe_files import complete_pair

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from dustin_runtime.audit import Audits
    from dustin_runtime.config import DustinConfig
    from dustin_runtime.engine import Draw, Engine, Generation
    from dustin_runtime.loading import Pair
    from dustin_runtime.parallel.sums import SizeClass
    from dustin_runtime.policies import Policy
    from dustin_runtime.statistics import Statistics


def generate(
    prompt: Annotated[list[str] | None, typer.Argument(help="Prompts as text.", show_default=False)] = None,
    file: Annotated[list[Path] | None, typer.Option(help="A text file that is one prompt; repeat for several.")] = None,
    jsonl: Annotated[Path | None, typer.Option(help="One prompt per row.")] = None,
    field: Annotated[str, typer.Option(help="The row's field that holds the prompt.")] = "prompt",
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Keep only the first N tokens of prompts.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Render prompts with the chat template.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="Emitted YAML or run directory.", rich_help_panel="Method")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(METHODS)}. Default: dustin if --config, else sd.",
            autocompletion=lambda: list(METHODS),
            rich_help_panel="Method",
        ),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Run this --method too and report agreement.", rich_help_panel="Method")
    ] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, max=64, help="Draft tokens per step.", rich_help_panel="Method")
    ] = None,
    budget: Annotated[
        int | None, typer.Option(help="Replace the config's k; m keeps its share.", rich_help_panel="Method")
    ] = None,
    m: Annotated[int | None, typer.Option(help="Replace the config's m.", rich_help_panel="Method")] = None,
    draft_budget: Annotated[
        int | None,
        typer.Option(
            min=8,
            help="The draft reads this many first and last tokens of its cache (triforce: retrieved ones). "
            "Default: all; 512 for magicdec and triforce.",
            rich_help_panel="Method",
        ),
    ] = None,
    guard: Annotated[
        float | None,
        typer.Option(
            help="Verify a row in full in steps whose estimated attention recovery (ARR) is below this; 1: always.",
            rich_help_panel="Method",
        ),
    ] = None,
    full_every: Annotated[
        int | None, typer.Option(min=1, help="Verify every Nth step of a row in full.", rich_help_panel="Method")
    ] = None,
    target_arr: Annotated[
        float | None,
        typer.Option(
            help="In each step and row, the smallest of several budgets whose estimated ARR reaches this.",
            rich_help_panel="Method",
        ),
    ] = None,
    max_divergence: Annotated[
        float | None,
        typer.Option(
            help="Warn if the mean KL of full from this method's verification, audited while serving, is above this.",
            rich_help_panel="Method",
        ),
    ] = None,
    audit_share: Annotated[
        float | None,
        typer.Option(
            help="Share of steps that are verified in full too, and measured; the text stays the same. "
            "Default: 0.02 with --max-divergence, else 0.",
            rich_help_panel="Method",
        ),
    ] = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="On a GPU, launch kernels one by one, no graph.", rich_help_panel="Method")
    ] = False,
    pair: Annotated[
        str | None,
        typer.Option(help="A known pair.", autocompletion=complete_pair, rich_help_panel="Models"),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Hub id (with @revision if wanted), folder or .gguf file.", rich_help_panel="Models"),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="The same, or self:N.", rich_help_panel="Models")] = None,
    rope: Annotated[
        str | None, typer.Option(help="default, linear:FACTOR or yarn:FACTOR.", rich_help_panel="Models")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel="Models")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16, float16 or float64.", rich_help_panel="Models")
    ] = "auto",
    kv_dtype: Annotated[
        str,
        typer.Option(
            help="Of the target's KV cache: auto, which is the model's, or fp8 (half the bytes of 16 bits).",
            rich_help_panel="Models",
        ),
    ] = "auto",
    offline: Annotated[bool, typer.Option("--offline", help="Use only local files.", rich_help_panel="Models")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt.")] = 128,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Prompts that are served at once; the others wait. Default: all.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the smallest set of tokens with this mass.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Prompt i draws with seed + i.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End a row at this text; repeat for several.")] = None,
    pipeline: Annotated[
        bool,
        typer.Option(
            "--pipeline",
            help="Under torchrun, each process takes whole layers of the target, as many as there are processes: "
            "slower than a part of each layer, but for any heads. No CUDA graph.",
        ),
    ] = False,
    all_reduce: Annotated[
        str | None,
        typer.Option(help="Under torchrun on GPUs, how ranks sum: nccl (default), one-shot, two-shot; auto times all."),
    ] = None,
    rank_timeout: Annotated[
        int, typer.Option(min=1, help="Under torchrun, seconds that a process waits for another within a step.")
    ] = 60,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate on after end-of-text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Generate text for prompts, greedily or by lossless rejection sampling."""
    given = dict(locals())
    if offline:
        from dustin_runtime.cli.support import go_offline

        go_offline()
    import torch

    from dustin_runtime.bench.sums import choose_sums
    from dustin_runtime.budget import check_reach
    from dustin_runtime.cli.facts import facts
    from dustin_runtime.cli.support import require_one_budget
    from dustin_runtime.config import load_config
    from dustin_runtime.engine import Draw, Engine, capacity_beyond, check_prompts
    from dustin_runtime.loading import pick_device, pick_dtype
    from dustin_runtime.memory_plan import free_bytes
    from dustin_runtime.misfits import warn_of_config
    from dustin_runtime.parallel.ranks import joined
    from dustin_runtime.parallel.reduce import AUTO, DEFAULT, require_symmetric, require_way
    from dustin_runtime.parallel.sums import prefill_tokens, step_tokens
    from dustin_runtime.policies import draft_window, guarded, make_policy, require_over_ranks, rule_of
    from dustin_runtime.prompts import encode, gather_prompts
    from dustin_runtime.scaled import dtype_name, pick_kv_dtype
    from dustin_runtime.step import Stepper

    with joined(rank_timeout) as ranks:
        with ranks.alike():
            if pipeline and ranks.alone:
                raise UsageError(
                    "--pipeline: this is one process; start as many as there are to be stages with "
                    "torchrun --nproc-per-node N -m dustin_runtime generate"
                )
            _check_draws(temperature, top_p, stop or [])
            texts = gather_prompts(prompt or [], file or [], jsonl, field)
            served = load_config(config) if config else None
            require_one_budget(budget, target_arr)
            served = _adjusted(served, budget, m)
            names = [method or ("dustin" if served else "sd"), *([compare] if compare else [])]
            policies = [
                make_policy(name, served.selection if served else None, option)
                for name, option in zip(names, ("--method", "--compare"), strict=False)
            ]
            policies[0] = guarded(policies[0], served, threshold=guard, every=full_every, target_arr=target_arr)
            for policy in policies:
                if served:
                    windowed = draft_window(policy, draft_budget, served) is not None
                    warn_of_config(policy, served, served.selection, depth=depth or served.depth, windowed=windowed)
            audits = _audits(max_divergence, audit_share, policies[0], seed, ranks.world)
            for policy in policies:
                require_over_ranks(policy, ranks.world)
            kind = pick_device(ranks.device(device))
            require_way(all_reduce or AUTO, ranks.world, kind, pipeline)
            cached = pick_kv_dtype(kv_dtype, kind)
            opened, gamma = open_models(served, pair, target, draft, rope, offline)
            ranks.share(opened.target_shape, pipeline)
            ids = [encode(opened.tokenizer, text, chat, prompt_tokens) for text in texts]
            drafted = any(policy.drafts for policy in policies)
            for policy in policies:
                check_reach(
                    policy.selection,
                    draft_window(policy, draft_budget, served),
                    opened.target_shape,
                    opened.draft_shape,
                )
            check_prompts(ids, max_new_tokens, [opened.target_shape, *([opened.draft_shape] if drafted else [])])
            element = pick_dtype(dtype, kind)
            if (free := free_bytes(kind)) is not None:
                deepest = depth or gamma if drafted else 0
                longest = max(map(len, ids)) + capacity_beyond(max_new_tokens, deepest)
                drafting = [policy for policy in policies if policy.drafts]
                windows = [
                    policy.draft_keeps(draft_window(policy, draft_budget, served)) or longest for policy in drafting
                ]
                narrow = max(windows, default=longest)
                _require_memory(
                    opened,
                    policies,
                    min(batch or len(ids), len(ids)),
                    longest,
                    deepest,
                    narrow if narrow < longest else None,
                    element,
                    cached,
                    free,
                    temperature,
                    ranks.world,
                    pipeline,
                    audits is not None,
                )
        if not ranks.alone:
            ranks.agree(facts(given, ids, served, opened.provenance(), kind))
        if talk := ranks.collectives(kind):
            require_symmetric(all_reduce or AUTO, talk, torch.device(kind), element)
        with ranks.alike(loading=True):
            model = opened.load_target(element, kind, talk, pipeline=pipeline)
        with ranks.alike(loading=True):  # a draft may borrow what others hold, who have to have loaded it
            drafter = opened.load_draft(model) if drafted else None
        rows, split_draft = min(batch or len(ids), len(ids)), drafter is not None and drafter.split is not None
        summed = prefill_tokens(model, max(map(len, ids)))
        for policy in policies:
            summed |= step_tokens(rows, depth or gamma if policy.drafts else 0, split_draft)
        sums = choose_sums(model, all_reduce or DEFAULT, summed)
        ends: frozenset[int] = frozenset() if ignore_eos else opened.stop_ids()
        draws = [Draw(temperature, top_p, seed + index) for index in range(len(ids))]
        runs = []
        for name, policy in zip(names, policies, strict=True):
            window = draft_window(policy, draft_budget, served)
            stepper = Stepper(
                model,
                drafter,
                policy,
                policy.selection,
                depth or gamma,
                opened.shared_vocab,
                draft_budget=window,
                sampled=temperature > 0,
                nucleus=temperature > 0 and top_p < 1,
                kv_dtype=cached,
            )
            audited = audits if policy is policies[0] else None
            engine = Engine(stepper, ends, rows=batch, graph=False if eager else None, audits=audited)
            shown = not as_json and policy is policies[0] and ranks.rank == 0
            runs.append(_run(opened.tokenizer, engine, ids, draws, max_new_tokens, stop or [], shown))
            if runs[-1][1].interrupted:
                break
            generations, statistics, _ = runs[-1]
            ranks.agree(
                {
                    f"what {name} generated": [generation.tokens for generation in generations],
                    f"how many drafts {name} accepted": statistics.accepted_at,
                }
            )
            del engine, stepper  # their buffers, before the next method's
        if ranks.rank == 0:
            _report(names, runs, as_json, served, sums, dtype_name(cached, element), rule_of(policies[0]))
            if max_divergence is not None:
                _warn_of_divergence(runs[0][1], max_divergence)
        if runs[-1][1].interrupted:
            complete = sum(generation.finished is not None for generation in runs[-1][0])
            interrupted = InterruptedRunError(f"interrupted; {complete} of {len(ids)} texts are complete")
            interrupted.quiet = ranks.rank > 0  # all of them were
            raise interrupted


def _check_draws(temperature: float, top_p: float, stop: list[str]) -> None:
    if not 0 <= temperature <= 1e9:  # which NaN fails too
        raise UsageError(f"--temperature {temperature}: give 0, which is greedy, or more, up to 1e9")
    if not 0 < top_p <= 1:
        raise UsageError(f"--top-p {top_p}: give more than 0 and at most 1")
    if top_p < 1 and not temperature:
        raise UsageError(f"--top-p {top_p}: greedy decoding draws nothing; give a --temperature above 0")
    if "" in stop:
        raise UsageError("--stop: is empty; give the text to end at")


def _audits(most: float | None, share: float | None, policy: Policy, seed: int, world: int) -> Audits | None:
    """Which steps are audited; None for none."""
    from dustin_runtime.audit import SHARE, Audits

    if most is not None and not 0 <= most < float("inf"):
        raise UsageError(f"--max-divergence {most}: give 0 nats or more")
    if share is not None and not 0 <= share <= 1:
        raise UsageError(f"--audit-share {share}: give 0 to 1")
    if most is not None and share == 0:
        raise UsageError("--max-divergence needs audited steps: give an --audit-share above 0, or leave it out")
    if not (share or (share is None and most is not None)):
        return None
    flag = "--audit-share" if most is None else "--max-divergence"
    if world > 1:
        raise UsageError(f"{flag}: audits verify in full in one process; this is one of {world}")
    if not policy.needs_selection:
        raise UsageError(f"{flag}: method {policy.name} verifies in full, so there is nothing to audit")
    return Audits(SHARE if share is None else share, seed)


def _warn_of_divergence(statistics: Statistics, most: float) -> None:
    """Say that what was served is further from full verification than it may be, if that is sure."""
    from dustin_runtime.audit import summary

    found = summary(statistics.audits)
    if found is None or found.low is None:
        print("dustin-run: too few steps were audited to judge --max-divergence: raise --audit-share", file=sys.stderr)
    elif found.low > most:
        print(
            f"dustin-run: KL of full from served verification is {found.mean:.4f} [{found.low:.4f}, {found.high:.4f}], "
            f"above --max-divergence {most:g}: give --guard, or raise it, or a larger --budget",
            file=sys.stderr,
        )


def _require_memory(
    opened: Pair,
    policies: Sequence[Policy],
    rows: int,
    capacity: int,
    depth: int,
    draft_budget: int | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    available_bytes: int,
    temperature: float,
    world: int,
    pipeline: bool,
    audited: bool,
) -> None:
    """Refuse a run that does not fit on the GPU, before its weights are read."""
    from dustin_runtime.memory_plan import plan, require

    need = plan(
        opened.target_shape,
        opened.draft_shape if depth else None,
        batch=rows,
        capacity=capacity,
        depth=depth,
        selection=max(
            (scored for policy in policies if (scored := policy.scored(opened.draft_shape))),
            key=lambda scored: sum(len(entry.heads) for entry in scored.lookahead),
            default=None,
        ),
        element_bytes=dtype.itemsize,
        sampled=temperature > 0,
        draft_stores=opened.draft_stores,
        draft_budget=draft_budget,
        policies=policies,
        world=world,
        pipeline=pipeline,
        kv_bytes=kv_dtype.itemsize if kv_dtype else None,
        audited=audited,
    )
    require(need, available_bytes)


def _adjusted(served: DustinConfig | None, budget: int | None, m: int | None) -> DustinConfig | None:
    """The config with another budget or split, checked like one that was emitted."""
    if budget is None and m is None:
        return served
    if served is None:
        raise UsageError("--budget and --m change a config; give one with --config")
    from dustin_runtime.config import changed

    update: dict[str, Any] = {"selection": changed(served.selection, budget, m)}
    if budget is not None:
        update["adaptive_budget"] = None
    return served.model_copy(update=update)


def open_models(
    served: DustinConfig | None,
    pair: str | None,
    target: str | None,
    draft: str | None,
    rope: str | None,
    offline: bool,
) -> tuple[Pair, int]:
    """The pair, and the depth of the config or the recipe."""
    from dustin_runtime.loading import open_configured, open_pair

    depth = 4
    if pair:
        if target or draft:
            raise UsageError("give --pair, or --target and --draft, not both")
        from dustin_runtime.pairs import find_pair

        recipe = find_pair(pair)
        target, draft, depth = recipe.target_id, recipe.draft_id, recipe.depth
    if served:
        return open_configured(served, target, draft, rope=rope, offline=offline), served.depth
    if not (target and draft):
        raise UsageError("which models? give --config, --pair, or both --target and --draft")
    return open_pair(target, draft, rope=rope, offline=offline), depth


def _run(
    tokenizer: PreTrainedTokenizerFast,
    engine: Engine,
    prompts: list[list[int]],
    draws: list[Draw],
    max_new_tokens: int,
    stop: list[str],
    shown: bool,
) -> tuple[list[Generation], Statistics, list[str]]:
    """Generate with one method; if `shown`, stream one text to stdout, or print each of several when it ends."""
    from dustin_runtime.streaming_text import TextStream

    single = shown and len(prompts) == 1
    several = shown and not single

    def write(row: int, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    printed: set[int] = set()

    def end(row: int, generation: Generation) -> None:
        if several:
            text = stream.finish(row)
            printed.add(row)
            sys.stdout.write(f"[{row}] {text}\n")  # at once: Ctrl-C may come between two writes of `print`
            sys.stdout.flush()

    stream = TextStream(tokenizer, len(prompts), stop, write if single else None)
    generations, statistics = engine.generate(prompts, max_new_tokens, on_tokens=stream.feed, draws=draws, on_end=end)
    texts = [stream.finish(row) for row in range(len(prompts))]
    if single:
        print()
    for row, text in enumerate(texts if several else []):
        if row not in printed and text:  # interrupted
            print(f"[{row}] {text}" if generations[row].finished else f"[{row}, unfinished] {text}")
    return generations, statistics, texts


def _report(
    names: list[str],
    runs: list[tuple[list[Generation], Statistics, list[str]]],
    as_json: bool,
    served: DustinConfig | None,
    sums: Sequence[SizeClass],
    kv_dtype: str,
    rule: dict[str, str],
) -> None:
    from dustin_runtime.audit import summary
    from dustin_runtime.policies import POLICIES

    generations, statistics, texts = runs[0]
    document: dict[str, Any] = {
        "kind": "dustin-generation",
        "method": names[0],
        "kv_dtype": kv_dtype,
        **rule,
        "rows": [
            {"text": text, "tokens": g.tokens, "finished": g.finished, "prompt_tokens": len(g.prompt)}
            for text, g in zip(texts, generations, strict=True)
        ],
        "statistics": statistics.as_dict(),
    }
    if served and POLICIES[names[0]].needs_selection:
        document["budget"] = served.selection.budget
    if sums:
        document["all_reduce"] = [size.as_dict() for size in sums]
    if len(runs) > 1:
        other, other_statistics, _ = runs[1]
        document["compare"] = {"method": names[1], "statistics": other_statistics.as_dict()}
        document["compare"] |= agreement([g.tokens for g in generations], [g.tokens for g in other])
    if as_json:
        print(json.dumps(document))
        return
    sys.stdout.flush()  # where both go to one place, the text comes first
    for name, (_, figures, _) in zip(names, runs, strict=False):
        accepted = " ".join(f"{share:.2f}" for share in figures.acceptance)
        say = f"{name}: {figures.tokens_per_second:.1f} tokens/s, tau {figures.tau:.2f}, "
        say += f"accepted per position {accepted}, " if accepted else ""
        say += f"{figures.kept:.0f} prefix tokens read per step"
        if figures.full_share is not None:
            say += f", {figures.full_share:.1%} of steps verified in full"
        if found := summary(figures.audits):
            between = "" if found.low is None else f" [{found.low:.4f}, {found.high:.4f}]"
            say += f", KL {found.mean:.4f}{between} nats from full verification ({found.tokens} tokens audited)"
        print(say, file=sys.stderr)
    if compared := document.get("compare"):
        print(
            f"agreement with {compared['method']}: {compared['equal_rows']} of {compared['rows']} rows equal, "
            f"{compared['common_prefix']:.1%} of tokens before the first difference, "
            f"{compared['equal_tokens']:.1%} of tokens equal",
            file=sys.stderr,
        )


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, float]:
    """How far two methods' texts agree, over all tokens of the longer text of each row."""
    common = equal = total = 0
    for left, right in zip(ours, theirs, strict=True):
        same = [a == b for a, b in zip(left, right, strict=False)]
        common += same.index(False) if False in same else len(same)
        equal += sum(same)
        total += max(len(left), len(right))
    return {
        "rows": len(ours),
        "equal_rows": sum(a == b for a, b in zip(ours, theirs, strict=True)),
        "common_prefix": common / total,
        "equal_tokens": equal / total,
    }
