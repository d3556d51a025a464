"""`dustin-run generate`: text from prompts, with the figures of the method that made it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dustin_runtime.errors import InterruptedRunError, UsageError
from dustin_runtime.method_names import METHODS
from dustin_runtime.recipe_files import complete_pair

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from dustin_runtime.engine import Engine
    from dustin_runtime.generation import Draw, Generation
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
    from dustin_runtime.cli.generation_checks import adjusted, audits_of, check_draws, open_models, require_memory
    from dustin_runtime.cli.generation_report import show, warn_of_divergence
    from dustin_runtime.cli.support import require_one_budget
    from dustin_runtime.config import load_config
    from dustin_runtime.engine import Engine
    from dustin_runtime.generation import Draw, capacity_beyond, check_prompts
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
            check_draws(temperature, top_p, stop or [])
            texts = gather_prompts(prompt or [], file or [], jsonl, field)
            served = load_config(config) if config else None
            require_one_budget(budget, target_arr)
            served = adjusted(served, budget, m)
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
            audits = audits_of(max_divergence, audit_share, policies[0], seed, ranks.world)
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
                require_memory(
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
            show(names, runs, as_json, served, sums, dtype_name(cached, element), rule_of(policies[0]))
            if max_divergence is not None:
                warn_of_divergence(runs[0][1], max_divergence)
        if runs[-1][1].interrupted:
            complete = sum(generation.finished is not None for generation in runs[-1][0])
            interrupted = InterruptedRunError(f"interrupted; {complete} of {len(ids)} texts are complete")
            interrupted.quiet = ranks.rank > 0  # all of them were
            raise interrupted


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
