"""Memory and bytes of trace collection by context length, each length in a process of its own.

python tools/bench_traces.py --pair smollm2 --context 2048 --context 4096 --context 8000
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time


def measure(pair_name: str, context: int, continuation: int, windows: int) -> dict[str, float]:
    import torch

    from dustin_profile.settings import DataSettings, ModelSettings, choose_pair
    from dustin_profile.traces.collect import Collector, TraceSettings
    from dustin_profile.traces.stage import calibration
    from dustin_runtime.loading import open_pair
    from dustin_runtime.pricing import trace_bytes, weights_bytes

    choice = choose_pair(ModelSettings(pair=pair_name))
    pair = open_pair(choice.target, choice.draft, offline=True)
    settings = DataSettings(context=context, documents=1, continuation=continuation, windows=windows)
    (prompt,) = calibration(pair, settings, offline=True).prompts
    target = pair.load_target(torch.float32, "cpu")
    draft = pair.load_draft(target)
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    every = {layer: [0, 1, 2, 3] for layer in range(pair.target_shape.layers)}
    collector = Collector(
        target,
        draft,
        history=every,
        evaluation=every,
        lookahead={layer: [0, 1, 2, 3] for layer in range(pair.draft_shape.layers)},
        settings=TraceSettings(continuation, windows, choice.depth, choice.depth),
        shared_vocab=pair.shared_vocab,
        stop_ids=frozenset(),
        capacity=context + continuation,
    )
    began = time.perf_counter()
    traced = collector.trace(prompt.id, prompt.ids)
    seconds = time.perf_counter() - began
    shapes = pair.target_shape, pair.draft_shape
    longest = int(traced.prefix.max())
    return {
        "context": context,
        "seconds": seconds,
        "weights": weights_bytes(shapes[0], 4),
        "kv": sum(shape.kv_bytes(context + continuation + choice.depth, 4) for shape in shapes),
        "peak_after_loading": loaded,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "trace": sum(x.nbytes for x in (traced.truth, traced.history, traced.lookahead)) / len(traced.prefix),
        "trace_predicted": trace_bytes(*shapes, prefix=longest, windows=1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--continuation", type=int, default=64)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.pair, arguments.one, arguments.continuation, arguments.windows)))
        return
    print("context  seconds  peak MB  weights + KV MB  beyond them MB  trace bytes per window  predicted")
    for context in arguments.context or [2048, 4096, 8000]:
        command = [sys.executable, __file__, "--pair", arguments.pair, "--one", str(context)]
        command += ["--continuation", str(arguments.continuation), "--windows", str(arguments.windows)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        held = row["weights"] + row["kv"]
        print(
            f"{context:7}  {row['seconds']:7.1f}  {row['peak'] / 1e6:7.0f}  {held / 1e6:15.0f}"
            f"  {(row['peak'] - held) / 1e6:14.0f}  {row['trace']:22.0f}  {row['trace_predicted']:9.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
