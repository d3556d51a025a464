"""Everything that a run of the profiler can be asked: the one place where options, defaults and help texts stand.

The command line is made from these classes (`cli.options`), so this module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dustin_profile.choices import (
    Credit,
    DraftCaches,
    Evaluation,
    Heuristic,
    Lookahead,
    Mode,
    Objective,
    Rule,
    Sampler,
    Template,
)
from dustin_runtime.errors import UsageError


def option(default: Any, help: str, flag: str | None = None) -> Any:
    """A field that is also an option; `flag` where its name is not the field's."""
    return field(default=default, metadata={"help": help, "flag": flag})


GPU_ROWS = 8
"""Prompts that a GPU continues together: one token of all costs little more than of one, for the weights are read."""


def default_rows(device: str) -> int:
    """Of `HeadSettings.rows`, by a device's name."""
    return 1 if device.endswith("cpu") else GPU_ROWS


@dataclass(frozen=True)
class ModelSettings:
    """Which pair, and how it is run."""

    pair: str | None = option(None, "A known pair, such as qwen72b:0.5b; `dustin-profile pairs` lists them.")
    target: str | None = option(
        None, "Target: hub id (with @revision if wanted), folder or .gguf file. With --draft, instead of --pair."
    )
    draft: str | None = option(None, "Draft: like --target, or self:N for the target's first N layers.")
    rope: str | None = option(None, "Replace the RoPE scaling: default, linear:FACTOR or yarn:FACTOR.")
    device: str = option("auto", "auto, cpu, cuda or cuda:N.")
    dtype: str = option("auto", "auto (float32 on a CPU, bfloat16 on a GPU), float32, bfloat16, float16, float64.")
    offline: bool = option(False, "Use only what is on this machine.")


@dataclass(frozen=True)
class HeadSettings:
    """Needle prompts (CompressKV, arXiv 2508.02401): every needle at every length and depth."""

    lengths: tuple[int, ...] = option((1024, 2048, 4096), "Prompt length in tokens; repeat for several.", "length")
    depths: tuple[float, ...] = option(
        (0.0, 0.25, 0.5, 0.75, 1.0), "Where the needle is put, 0 to 1; repeat for several.", "depth-at"
    )
    needles: Path | None = option(None, "YAML file of needles instead of the built-in ones.")
    needle_count: int | None = option(None, "Use only the first N needles.")
    haystack: Path | None = option(None, "Text file, folder or JSONL to hide needles in; default: Python's own topics.")
    mode: Mode = option("generate", "Target: let it answer, or force the answer.")
    draft_mode: Mode = option("forced", "The same for the draft.")
    credit: Credit = option("span", "Count an answer step once, or as often as the answer holds its token.")
    steps: int = option(32, "Tokens that an answer may take in mode generate.", "answer-tokens")
    rows: int | None = option(
        None, "Prompts that are continued together, needles' and documents'; default: 8 on a GPU, 1 on a CPU."
    )
    tensor_parallel: int = option(
        1, "Processes of torchrun that split one target: each team of so many neighbours is dealt work as one."
    )
    stop_when_stable: bool = option(
        False, "Stop at fewer prompts once halves of the needles rank the same heads first."
    )
    stable_overlap: float = option(
        0.8, "With --stop-when-stable: share of a layer's top four that halves have in common, lower bound of 95 %."
    )
    least_prompts: int = option(60, "With --stop-when-stable: measure at least so many prompts.")


@dataclass(frozen=True)
class DataSettings:
    """Calibration documents and the windows laid over them."""

    data: str = option("topics", "JSONL, parquet, text file or folder, hub data set, or topics (offline default).")
    context: int = option(4096, "Tokens of every calibration prompt.")
    documents: int = option(16, "Calibration prompts.")
    stop_when_decided: bool = option(
        False, "Stop at fewer documents once no other choice of layers or m could gain much; see --decided-within."
    )
    decided_within: float = option(
        0.005,
        "With --stop-when-decided: ARR that another choice may at most gain, and half-width of hybrid minus history"
        " alone; both by paired 95 % intervals.",
    )
    least_documents: int = option(12, "With --stop-when-decided: trace at least so many documents.")
    continuation: int = option(128, "Tokens that the target generates after each prompt.")
    windows: int = option(16, "Verification windows per document.")
    width: int | None = option(None, "Target queries per window (the paper's w); default: the depth.")
    lookahead: Lookahead = option("trajectory", "What the draft reads: the trajectory, or its own proposals.")
    evaluation: Evaluation = option("srh", "Truth: retrieval heads of all target layers, or all heads.")
    template: Template = option("auto", "Chat template for documents that carry a query.")


@dataclass(frozen=True)
class SearchSettings:
    """What is searched, and how."""

    budget: int | None = option(None, "k: tokens that verification reads; default: the recipe's.")
    sink: int = option(4, "First tokens that are always kept; counted in the budget.")
    window: int = option(16, "Last tokens that are always kept; counted in the budget.", "recent")
    draft_layers: int = option(3, "Draft layers to choose.")
    stop_when_flat: bool = option(False, "Stop adding draft layers once none raises ARR.")
    heuristic: Heuristic = option("m", "What the trial budgets of the draft phase count: the draft's share m, or k.")
    sampler: Sampler = option("exact", "How m is searched.")
    trials: int = option(100, "Trials of the samplers tpe, gp and brute.")
    held_out: float = option(0.3, "Share of the documents that only the report sees.")
    seed: int = option(0, "Seed of samplers and intervals.")
    fit_split: bool = option(False, "Fit the weight of lookahead in dustin-merged, too.")


@dataclass(frozen=True)
class ObjectiveSettings:
    """What the search is for. The defaults are the paper's search."""

    objective: Objective = option(
        "arr", "Maximise ARR at one budget and depth, or predicted tokens/s over several; see --choose."
    )
    choose: Rule = option(
        "within-1se",
        "With --objective throughput: take the fastest whose ARR on the search documents is within one standard error"
        " of the best, or at least --least-arr.",
    )
    least_arr: float = option(0.9, "With --choose least-arr: the ARR to keep.")
    draft_cache: DraftCaches = option(
        "full",
        "With --objective throughput: the draft's cache, or both to choose from. Acceptance of sink+window is measured;"
        " its ARR is assumed to be that of the full one.",
    )


@dataclass(frozen=True)
class StepSettings:
    """Which steps are timed, and may be chosen for throughput."""

    batch: int = option(1, "Rows that are decoded together.")
    budgets: tuple[int, ...] = option(
        (), "k that may be chosen; repeat. Default: --budget, else 128, 256, 512 and 1024 as far as below the context."
    )
    draft_tokens: tuple[int, ...] = option(
        (),
        "Draft tokens per step that may be chosen, --depth at most; repeat. Default: 2 to 8 as far as traced.",
        "depths",
    )


_BUDGETS, _DEPTHS = (128, 256, 512, 1024), range(2, 9)
_LEAST_BUDGET = 8
"""Fewest tokens that a draft with a window can read."""


@dataclass(frozen=True)
class Settings:
    """One run."""

    run_dir: Path
    depth: int | None = None
    """Draft tokens per step; None is the recipe's."""
    models: ModelSettings = ModelSettings()
    heads: HeadSettings = HeadSettings()
    data: DataSettings = DataSettings()
    search: SearchSettings = SearchSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    steps: StepSettings = StepSettings()
    overwrite: bool = False


@dataclass(frozen=True)
class PairChoice:
    """The pair that the settings name: where its models are, and the recipe's depth and budget where there is one."""

    name: str
    target: str
    draft: str
    depth: int
    budget: int


def choose_pair(models: ModelSettings, depth: int | None = None, budget: int | None = None) -> PairChoice:
    """Resolve `--pair`, or `--target` with `--draft`, without touching any model.

    Raises:
        UsageError: neither or both are given, or the alias is unknown.
    """
    if models.pair and not (models.target or models.draft):
        from dustin_runtime.pairs import find_pair

        recipe = find_pair(models.pair)
        return PairChoice(
            recipe.name, recipe.target_id, recipe.draft_id, _given(depth, recipe.depth), _given(budget, recipe.budget)
        )
    if models.target and models.draft and not models.pair:
        name = pair_name(models.target, models.draft)
        return PairChoice(name, models.target, models.draft, _given(depth, 4), _given(budget, 512))
    raise UsageError("give --pair ALIAS (`dustin-profile pairs` lists them), or both --target and --draft")


def pair_name(target: str, draft: str) -> str:
    """A name that can be a folder's, for a pair without one."""
    return f"{Path(target).name}--{Path(draft).name}".replace(":", "_").replace("@", "_")


def check_settings(settings: Settings, choice: PairChoice, given: Collection[str] = ()) -> None:
    """Refuse what can be refused before a model is looked at.

    Args:
        given: names of fields that the user has set, be it to their default.

    Raises:
        UsageError: naming the option.
    """
    from dustin_runtime.budget import budget_fault
    from dustin_runtime.config import MAX_DEPTH

    data, heads, search = settings.data, settings.heads, settings.search
    width = _given(data.width, choice.depth)
    least_one = {
        "--depth": choice.depth,
        "--length": min(heads.lengths),
        "--needle-count": _given(heads.needle_count, 1),
        "--answer-tokens": heads.steps,
        "--least-prompts": heads.least_prompts,
        "--context": data.context,
        "--documents": data.documents,
        "--least-documents": data.least_documents,
        "--continuation": data.continuation,
        "--rows": _given(heads.rows, 1),
        "--tensor-parallel": heads.tensor_parallel,
        "--windows": data.windows,
        "--width": width,
        "--draft-layers": search.draft_layers,
        "--trials": search.trials,
    }
    least_zero = {"--sink": search.sink, "--recent": search.window, "--seed": search.seed}
    for least, numbers in ((1, least_one), (0, least_zero)):
        for flag, value in numbers.items():
            if value < least:
                raise UsageError(f"{flag} {value}: must be at least {least}")
    if choice.depth > MAX_DEPTH:
        raise UsageError(f"--depth {choice.depth}: must be at most {MAX_DEPTH}")
    if data.continuation < max(choice.depth, width):
        raise UsageError(f"--continuation {data.continuation}: a window needs {max(choice.depth, width)} tokens")
    if outside := [depth for depth in heads.depths if not 0 <= depth <= 1]:
        raise UsageError(f"--depth-at {outside[0]}: must lie between 0 and 1")
    if not 0 < heads.stable_overlap <= 1:
        raise UsageError(f"--stable-overlap {heads.stable_overlap}: give a share above 0 and at most 1")
    if not 0 < data.decided_within < 1:
        raise UsageError(f"--decided-within {data.decided_within}: give an ARR between 0 and 1")
    if not 0 < search.held_out < 1:
        raise UsageError(f"--held-out {search.held_out}: give a share between 0 and 1")
    if fault := budget_fault(choice.budget, 0, search.sink, search.window):
        raise UsageError(f"--{fault}")
    _check_objective(settings, choice, given)


def _check_objective(settings: Settings, choice: PairChoice, given: Collection[str]) -> None:
    """The part of `check_settings` about the objective. Raises UsageError."""
    objective, steps = settings.objective, settings.steps
    if objective.objective == "arr":
        for group in (objective, steps):
            for own in fields(group):
                if own.name != "objective" and (own.name in given or getattr(group, own.name) != own.default):
                    flag = own.metadata["flag"] or own.name.replace("_", "-")
                    raise UsageError(f"--{flag}: says nothing about --objective arr; add --objective throughput")
        return
    if settings.search.sampler != "exact":
        raise UsageError(f"--sampler {settings.search.sampler}: --objective throughput enumerates; leave it out")
    if not 0 < objective.least_arr <= 1:
        raise UsageError(f"--least-arr {objective.least_arr}: give an ARR above 0 and at most 1")
    if objective.choose != "least-arr" and (
        "least_arr" in given or objective.least_arr != ObjectiveSettings().least_arr
    ):
        raise UsageError(f"--least-arr {objective.least_arr}: add --choose least-arr")
    steps_to_time(settings, choice)


class StepsToTime(NamedTuple):
    """What the steps of a run range over."""

    budgets: tuple[int, ...]
    depths: tuple[int, ...]


def steps_to_time(settings: Settings, choice: PairChoice) -> StepsToTime:
    """Budgets and depths that may be chosen, ascending, once each.

    Raises:
        UsageError: one of them cannot be served or is not traced; names the option.
    """
    steps, search, context = settings.steps, settings.search, settings.data.context
    if steps.batch < 1:
        raise UsageError(f"--batch {steps.batch}: must be at least 1")
    least = max(search.sink + search.window + 2, _LEAST_BUDGET)  # one token for each side to choose
    if steps.budgets and search.budget is not None:
        raise UsageError(f"--budget {search.budget}: give it or --budgets, not both")
    budgets = steps.budgets or ((search.budget,) if search.budget is not None else ())
    for k in budgets:
        if not least <= k < context:
            raise UsageError(f"--budgets {k}: give {least} to {context - 1}, less than --context {context}")
    budgets = budgets or tuple(k for k in _BUDGETS if least <= k < context)
    if not budgets:
        raise UsageError(f"--context {context}: none of k = {', '.join(map(str, _BUDGETS))} fits; give --budgets")
    for depth in steps.draft_tokens:
        if not 1 <= depth <= choice.depth:
            raise UsageError(
                f"--depths {depth}: give 1 to {choice.depth}, the depth that is traced; for more, raise --depth"
            )
    depths = steps.draft_tokens or tuple(depth for depth in _DEPTHS if depth <= choice.depth) or (choice.depth,)
    return StepsToTime(tuple(sorted(set(budgets))), tuple(sorted(set(depths))))


def require_teams(size: int, processes: int) -> None:
    """Refuse teams of a size that the processes of the run do not divide into.

    Raises:
        UsageError: naming the option.
    """
    if processes % size:
        started = "this is one process" if processes == 1 else f"{processes} processes do not divide into teams of it"
        raise UsageError(
            f"--tensor-parallel {size}: {started}; start a multiple of {size} with "
            "torchrun --nproc-per-node N -m dustin_profile"
        )


def by_flag(settings: Settings) -> dict[str, object]:
    """Every value by the name of its option."""
    found: dict[str, object] = {}
    for own in fields(settings):
        value = getattr(settings, own.name)
        if is_dataclass(value):
            for inner in fields(value):
                found["--" + (inner.metadata["flag"] or inner.name.replace("_", "-"))] = getattr(value, inner.name)
        else:
            found[f"--{own.name.replace('_', '-')}"] = value
    return found


def _given(value: int | None, default: int) -> int:
    return default if value is None else value
