"""Seconds and memory of a document in `dustin-profile eval fidelity`, every policy at every budget, by context.

python tools/bench_fidelity.py CONFIG --target T --draft D --data BOOKS --context 4096 --context 16384
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from dustin_profile.cli.given_texts import open_texts
from dustin_profile.evaluation.fidelity_stage import cells, run
from dustin_profile.settings import ModelSettings
from dustin_runtime.config import load_config


def peak(device: torch.device) -> int:
    """Bytes: of the GPU since the last reset, or of this process ever."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    for name in ("pair", "target", "draft"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", default="topics")
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--budget", type=int, action="append")
    arguments = parser.parse_args()
    served = load_config(arguments.config)
    models = ModelSettings(
        pair=arguments.pair, target=arguments.target, draft=arguments.draft, device=arguments.device, offline=True
    )
    wanted = cells(None, arguments.budget or [512, 256, 128], served)
    lengths = arguments.context or [4096, 8192, 16384]
    loaded = None
    print(f"{len(wanted)} policies and budgets, {arguments.tokens} tokens of text, {served.depth + 1} at a time")
    print("context  seconds  ms per policy  peak MB  beyond the loaded models MB")
    for context in [lengths[0], *lengths]:  # the first compiles kernels
        texts = open_texts(served, models, arguments.data, context, 1, arguments.tokens)
        loaded = loaded or texts.load()
        held = loaded
        device = loaded[0].device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else peak(device)
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            run(Path(folder), replace(texts, load=lambda held=held: held), wanted)
            seconds = time.perf_counter() - began
        print(
            f"{context:7}  {seconds:7.1f}  {1e3 * seconds / len(wanted):13.0f}  {peak(device) / 1e6:7.0f}"
            f"  {(peak(device) - before) / 1e6:27.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
