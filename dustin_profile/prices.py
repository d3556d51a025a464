"""What a run would cost, before anything is loaded: from recipes or config files alone."""

from __future__ import annotations

import time
from statistics import mean
from typing import Any

from dustin_profile.settings import PairChoice, Settings, default_rows, steps_to_time
from dustin_runtime.models.shape import ModelShape, check_context
from dustin_runtime.pricing import DEVICES, Device, StagePrice, devices_needed, price_profile, weights_bytes

NEEDLES = 10
"""Needles in the built-in file; a dry run does not read one."""


def price(settings: Settings, choice: PairChoice, stages: tuple[str, ...]) -> dict[str, Any]:
    """Price `stages` on this machine's processor and on the GPUs that the table of devices has.

    Returns:
        JSON: the shapes priced, and per device and stage seconds, memory and disk bytes.

    Raises:
        MissingError: the pair is not a known one, and its configs cannot be read.
        CapacityError: prompts exceed a model's context.
        UsageError: the target cannot be split as asked.
    """
    target, draft = pair_shapes(settings, choice)
    data, heads = settings.data, settings.heads
    for shape in (target, draft):
        if "srh" in stages:
            check_context(shape, max(heads.lengths) + heads.steps, f"--length {max(heads.lengths)}")
        if "trace" in stages:
            check_context(shape, data.context + data.continuation, "--context with --continuation")
    needles = min(heads.needle_count or NEEDLES, NEEDLES)
    rows: list[dict[str, Any]] = []
    for device, element_bytes in _devices(settings):
        priced = price_profile(
            target,
            draft,
            context=data.context,
            continuation=data.continuation,
            documents=data.documents,
            windows=data.windows,
            needle_samples=needles * len(heads.lengths) * len(heads.depths),
            needle_mean_length=round(mean(heads.lengths)),
            device=device,
            element_bytes=element_bytes,
            tensor_parallel=heads.tensor_parallel,
            rows=heads.rows or default_rows(device.name),
        )
        if "latency" in stages:
            priced[2:] = _timed(settings, choice, target, draft, priced[2], device, element_bytes)
        shared = {"device": device.name, "element_bytes": element_bytes}
        rows += [shared | stage._asdict() for stage in priced if stage.stage in stages]
    return {
        "kind": "dustin-price",
        "pair": choice.name,
        "target": {"id": choice.target, "parameters": target.parameters, "layers": target.layers},
        "draft": {"id": choice.draft, "parameters": draft.parameters, "layers": draft.layers},
        "tensor_parallel": heads.tensor_parallel,
        "stages": rows,
    }


def _timed(
    settings: Settings,
    choice: PairChoice,
    target: ModelShape,
    draft: ModelShape,
    search: StagePrice,
    device: Device,
    element_bytes: int,
) -> list[StagePrice]:
    """The steps that are timed for a search for throughput, each at its floor, and that search, over every budget."""
    from dustin_profile.latency.measure import seconds_for, selection_for
    from dustin_profile.latency.model import Range, steps_left_out, steps_to_fit
    from dustin_runtime.roofline import step_costs

    steps, rows, context = steps_to_time(settings, choice), settings.steps.batch, settings.data.context
    among, layers = Range(*steps), min(settings.search.draft_layers, draft.layers)
    seconds = 0.0
    for step in (*steps_to_fit(among, layers), *steps_left_out(among, layers)):
        costs = step_costs(
            "dustin",
            target,
            draft,
            [context] * rows,
            depth=step.depth,
            selection=selection_for(step, target, draft),
            draft_budget=step.budget if step.windowed else None,
            element_bytes=element_bytes,
        )
        seconds += seconds_for(costs.milliseconds(device) / 1e3, on_gpu=device.name != "this cpu")
    held = sum(
        weights_bytes(shape, element_bytes) + rows * shape.kv_bytes(context, element_bytes) for shape in (target, draft)
    )
    timed = StagePrice("latency", seconds, held, 0, devices_needed(held, device), held)
    return [timed, search._replace(seconds=search.seconds * len(steps.budgets))]


def pair_shapes(settings: Settings, choice: PairChoice) -> tuple[ModelShape, ModelShape]:
    """Shapes of target and draft: a recipe's, or those of the models' own configs."""
    from dustin_runtime.loading import SELF, parse_rope, self_layers
    from dustin_runtime.pairs import find_model, find_pair

    models = settings.models
    if models.pair:
        recipe = find_pair(models.pair)
        target, draft = recipe.target.shape, recipe.draft.shape
    else:

        def shape(name: str) -> ModelShape:
            if known := find_model(name.partition("@")[0]):
                return known.shape
            from dustin_runtime.models.source import resolve

            return resolve(name, offline=models.offline).shape()

        target = shape(choice.target)
        if choice.draft.startswith(SELF):
            draft = target.model_copy(update={"layers": self_layers(choice.draft, target)})
        else:
            draft = shape(choice.draft)
    if models.rope:
        scaling = parse_rope(models.rope, target)
        target, draft = target.with_rope(scaling), draft.with_rope(scaling)
    return target, draft


def _devices(settings: Settings) -> list[tuple[Device, int]]:
    """This processor, as measured now, in float32, of which each process of a team has its share; and every GPU of the
    table in bfloat16."""
    wide = 2 if settings.models.dtype in ("bfloat16", "float16") else 4
    gpus = [
        (device, 4 if settings.models.dtype == "float32" else 2) for name, device in DEVICES.items() if name != "cpu"
    ]
    cpu, team = measure_cpu(), settings.heads.tensor_parallel
    share = cpu._replace(
        flops_per_s=cpu.flops_per_s / team,
        bytes_per_s=cpu.bytes_per_s / team,
        memory_bytes=cpu.memory_bytes // team,
    )
    here = [(share, wide)]
    return here if settings.models.device == "cpu" else here + gpus


def measure_cpu() -> Device:
    """This machine's processor: a matrix product and a copy, 0.2 s together."""
    import os

    import numpy as np

    matrix = np.ones((1024, 1024), dtype=np.float32)
    large = np.ones(16_000_000, dtype=np.float32)

    def best(work: Any, repeats: int = 4) -> float:
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    flops = 2 * 1024**3 / best(lambda: matrix @ matrix)
    bandwidth = 2 * large.nbytes / best(large.copy)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("this cpu", flops, bandwidth, memory)
