"""The self-attention of one verification step: the full cache, or sparse attention with its estimation.

Arrangement of arXiv 2606.24957, Figures 7, 8 and 10. Caches are random, so this measures time and says nothing about
which tokens matter; lists are random as well, which scatters their reads more than real ones do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dustin_runtime.attention.sparse import SparseAttention
from dustin_runtime.bench.checks import check_against, check_estimation, check_full, check_sparse
from dustin_runtime.bench.document import environment, roofline_device
from dustin_runtime.bench.full_kernels import OURS, UNPACKED, Call, FullKernel, full_kernels
from dustin_runtime.bench.synthetic import Synthetic, cache_bytes, caches_that_fit
from dustin_runtime.bench.timing import Timing, how, measure_ms
from dustin_runtime.bench.workload import PAPER_SPEEDUPS, SINK, WINDOW, Sizes, Workload
from dustin_runtime.errors import UsageError
from dustin_runtime.pricing import Device
from dustin_runtime.roofline import Cost, attention_cost, history_cost, lookahead_cost

KIND = "dustin-bench-attention"
NOTES = (
    "KV caches, queries and lists are synthetic (random normal): times are real, kept tokens mean nothing.",
    "A time is of a whole step: all layers of attention, or the one estimation that serves them all. On a GPU every"
    " layer reads another cache in turn, so that nothing but queries and lists is found in the L2.",
    "A packed kernel lets the query heads of a KV head share a tile and reads each key once. torch flash and"
    " flash-attn 2 do so only without the causal mask among the new tokens (not causal); their queries are packed"
    " outside the timed work.",
    "Speed-up: full cache / (sparse + estimation), against the fastest full-cache kernel of the run. The unpacked"
    " figure, one tile per query head, stands beside it and is no baseline.",
    "The paper's estimation takes 7.5 to 14.9 % of its sparse step and 0.46 to 0.75 % of its full-cache time.",
)


def require_room(sizes: Sizes, workloads: Sequence[Workload], dtype: torch.dtype, device: torch.device) -> None:
    """Refuse before the first measurement what would fail in the last.

    Raises:
        CapacityError: a workload does not fit.
    """
    for workload in workloads:
        caches_that_fit(sizes, workload, dtype, device)


@torch.inference_mode()
def measure(
    sizes: Sizes,
    workloads: Sequence[Workload],
    *,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    command: str,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure all workloads.

    Args:
        command: how to repeat it, for the document.
        progress: called with a line per workload.

    Returns:
        The document: plain values for JSON, as `bench.report` renders them.

    Raises:
        CapacityError: a workload does not fit.
        NothingMeasuredError: a kernel is wrong.
        UsageError: our kernels do not serve this dtype or head size on a GPU.
    """
    kernels, missing = full_kernels(device, dtype, sizes.head_size)
    if device.type == "cuda" and kernels[0].name != OURS:
        raise UsageError(
            f"--head-size {sizes.head_size} with {dtype}: the kernels serve powers of two from 16 on and float32,"
            " bfloat16 or float16"
        )
    require_room(sizes, workloads, dtype, device)
    name, roof = roofline_device(device)
    rows = []
    for workload in workloads:
        progress(f"{workload}: {sizes.layers} layers, synthetic caches, {how(device)}")
        rows.append(_row(Synthetic(sizes, workload, dtype, device), kernels, missing, repeats, roof))
    return {
        "kind": KIND,
        **environment(device),
        "command": command,
        "data": "synthetic",
        "timing": how(device),
        "roofline": {"device": name, "bytes_per_s": roof.bytes_per_s, "flops_per_s": roof.flops_per_s},
        "settings": {
            **{key: getattr(sizes, key) for key in ("layers", "query_heads", "kv_heads", "head_size")},
            "dtype": str(dtype).removeprefix("torch."),
            "depth": sizes.depth,
            "budget": sizes.budget,
            "sink": SINK,
            "window": WINDOW,
        },
        "missing_kernels": missing,
        "notes": list(NOTES),
        "rows": rows,
    }


def _row(
    data: Synthetic, kernels: list[FullKernel], missing: dict[str, str], repeats: int, roof: Device
) -> dict[str, Any]:
    """Check and time one workload."""
    sizes, (context, batch) = data.sizes, data.workload
    dtype, device = data.q.dtype, data.q.device
    target, draft = sizes.target, sizes.draft
    tokens, size = sizes.depth + 1, dtype.itemsize
    errors = {"sparse": check_sparse(data), "scores": check_estimation(data)}

    def timed(work: Callable[[], object], cost: Cost, units: int = 1) -> dict[str, Any]:
        return _figures(measure_ms(work, device, repeats, units=units), cost, roof)

    full: list[dict[str, Any]] = []
    cost = attention_cost(target, [context + tokens] * batch, tokens, size)
    for kernel, call in _checked(data, kernels, missing, errors):
        work = partial(_all_layers, data, call)
        try:
            figures = timed(work, cost)
        except Exception as error:
            _left_out(kernel, data, error, missing)
            continue
        full.append({"kernel": kernel.name, "packed": kernel.packed, "causal": kernel.causal, **figures})

    attend = SparseAttention(data.kept(data.start))
    sparse = timed(
        lambda: _all_layers(data, lambda k, v: attend(0, data.q, k, v, data.start)),
        attention_cost(target, [min(context, sizes.budget) + tokens] * batch, tokens, size),
    )
    scorings = range(len(data.history))
    lengths = [context] * batch
    history = timed(
        lambda: [data.history_scores(index) for index in scorings],
        history_cost(target, data.selection.history, lengths, size),
        len(scorings),
    )
    lookahead = timed(
        lambda: [data.lookahead_scores(index) for index in scorings],
        lookahead_cost(draft, data.selection.lookahead, lengths, sizes.depth, size),
        len(scorings),
    )
    ahead, back = data.lookahead_scores(0), data.history_scores(0)
    selection = timed(  # its floor: both score vectors are read once; they lie in the L2, as after scoring
        lambda: [data.choose(ahead, back, data.start) for _ in scorings],
        Cost(2 * batch * context * 4, 0.0),
        len(scorings),
    )
    return {
        "data": "synthetic",
        "workload": str(data.workload),
        "context": context,
        "batch": batch,
        "caches": data.cache.keys.shape[0],
        "cache_bytes": cache_bytes(sizes, data.workload, dtype),
        "errors": errors,
        "full": full,
        "sparse": sparse,
        "history": history,
        "lookahead": lookahead,
        "selection": selection,
        **_summary(full, sparse, (history, lookahead, selection)),
        "paper_speedup": PAPER_SPEEDUPS.get(data.workload) if sizes.papers else None,
    }


def _checked(
    data: Synthetic, kernels: list[FullKernel], missing: dict[str, str], errors: dict[str, float]
) -> list[tuple[FullKernel, Call]]:
    """The kernels that compute the right thing, bound to the workload; ours is the first."""
    k, v = data.cache.keys[0], data.cache.values[0]
    ours: torch.Tensor | None = None
    found: list[tuple[FullKernel, Call]] = []
    for kernel in kernels:
        try:
            errors[kernel.name] = check_full(kernel, data)
            call = kernel.bind(data.q, k, data.start)
            if ours is None:
                ours = kernel.restore(call(k, v), data.q)
            else:
                errors[f"{kernel.name}, whole workload"] = check_against(ours, kernel, call, data)
        except Exception as error:
            _left_out(kernel, data, error, missing)
            continue
        found.append((kernel, call))
    return found


def _left_out(kernel: FullKernel, data: Synthetic, error: Exception, missing: dict[str, str]) -> None:
    """Note that another project's kernel fails here; a fault of what must run is raised again."""
    if kernel.required:
        raise error
    missing[f"{kernel.name} at {data.workload}"] = " ".join(str(error).split())


def _all_layers(data: Synthetic, call: Call) -> None:
    """One attention per layer, each over the next cache."""
    keys, values = data.cache.keys, data.cache.values
    for layer in range(data.sizes.layers):
        index = layer % len(keys)
        call(keys[index], values[index])


def _figures(timing: Timing, cost: Cost, roof: Device) -> dict[str, Any]:
    """A time beside its floor."""
    return {
        **timing.as_dict(),
        "bytes": cost.bytes,
        "gb_per_s": cost.bytes / timing.ms / 1e6,
        "roofline_ms": cost.milliseconds(roof),
    }


def _summary(
    full: list[dict[str, Any]], sparse: dict[str, Any], estimation: tuple[dict[str, Any], ...]
) -> dict[str, Any]:
    """What the paper's figures show."""
    best = min(full, key=lambda figures: float(figures["ms"]))
    unpacked = next((figures["ms"] for figures in full if figures["kernel"] == UNPACKED), None)
    estimate = sum(part["ms"] for part in estimation)
    step = sparse["ms"] + estimate
    return {
        "best_full": best["kernel"],
        "best_full_ms": best["ms"],
        "unpacked_ms": unpacked,
        "estimation_ms": estimate,
        "sparse_step_ms": step,
        "speedup": best["ms"] / step,
        "speedup_without_estimation": best["ms"] / sparse["ms"],
        "speedup_of_unpacked": unpacked / step if unpacked else None,
        "roofline_speedup": best["roofline_ms"] / sum(part["roofline_ms"] for part in (sparse, *estimation)),
        "estimation_of_step": estimate / step,
        "estimation_of_full": estimate / best["ms"],
    }
