"""Where a step's time goes, kernel by kernel: one replay of a captured step under torch's profiler.

    python tools/profile_step.py --pair qwen7b:0.5b --method dustin --batch 16 --context 32000 --windowed

Kernels of ours start before their predecessors end, so a duration says little: `advance` is how much later one ends
than all before it. Models and caches are noise; times are real.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from dustin_runtime.acceptance import rate_for
from dustin_runtime.bench.grid import new_tokens
from dustin_runtime.bench.noise import fill
from dustin_runtime.bench.subject import noise
from dustin_runtime.engine import Engine
from dustin_runtime.policies import make_policy
from dustin_runtime.step import Stepper

WARM_UPS = 3


class Kernel(NamedTuple):
    """Microseconds from the step's begin."""

    name: str
    start: float
    end: float
    advance: float


def main() -> None:
    """Profile what is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="qwen7b:0.5b")
    parser.add_argument("--method", default="dustin")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=32000)
    parser.add_argument("--windowed", action="store_true", help="the draft reads 512 first and last tokens")
    parser.add_argument("--tau", type=float, default=2.2)
    parser.add_argument("--timeline", type=Path, help="write every kernel of the step here")
    options = parser.parse_args()
    kernels = step_kernels(options)
    total: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for kernel in kernels:
        entry = total[kernel.name]
        entry[0] += 1
        entry[1] += kernel.end - kernel.start
        entry[2] += kernel.advance
    print(f"{options.method}, {options.batch} x {options.context}: {len(kernels)} kernels, {kernels[-1].end:.0f} us")
    print("  count   duration us    advance us  kernel")
    for name, (count, duration, advance) in sorted(total.items(), key=lambda item: -item[1][2])[:30]:
        print(f"{count:7.0f} {duration:13.1f} {advance:13.1f}  {name[:90]}")
    if options.timeline:
        lines = (f"{k.start:10.2f} {k.end - k.start:9.2f} {k.advance:9.2f}  {k.name[:120]}" for k in kernels)
        options.timeline.write_text("\n".join(["     start  duration   advance  kernel", *lines]) + "\n")


@torch.inference_mode()
def step_kernels(options: argparse.Namespace) -> list[Kernel]:
    """The kernels of one step, by when they start."""
    subject = noise(options.pair, None, torch.bfloat16, "cuda")
    policy = make_policy(options.method, subject.selection)
    stepper = Stepper(
        *subject.load(None),
        policy,
        policy.selection,
        subject.depth,
        subject.shared_vocab,
        draft_budget=512 if options.windowed or policy.partial_draft else None,
        forced_rate=rate_for(options.tau, subject.depth) if policy.drafts else None,
    )
    engine = Engine(stepper)
    state = engine.prepare(options.batch, options.context + new_tokens(8, stepper.depth))
    fill(stepper, state, options.context)
    for _ in range(WARM_UPS):
        engine.step(state)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        engine.step(state)
        torch.cuda.synchronize()
    events = (event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return ordered((event.name, event.time_range.start, event.time_range.end) for event in events)


def ordered(events: Iterable[tuple[str, float, float]]) -> list[Kernel]:
    """Name, start and end of kernels, with what each adds."""
    kernels: list[Kernel] = []
    latest = begin = 0.0
    for name, start, end in sorted(events, key=lambda event: event[1]):
        if not kernels:
            begin = latest = start
        kernels.append(Kernel(name, start - begin, end - begin, max(end - latest, 0.0)))
        latest = max(latest, end)
    return kernels


if __name__ == "__main__":
    main()
