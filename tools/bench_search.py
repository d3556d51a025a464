"""Time the three phases of the search on synthetic traces: random numbers, no model behind them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from dustin_profile.search.budget import Budget
from dustin_profile.search.phases import SearchOptions, find_draft_layers, find_split, find_target_layer
from dustin_profile.traces.windows import Windows

Result = TypeVar("Result")


def synthetic_windows(document: int, windows: int, tokens: int, target_layers: int, draft_layers: int) -> Windows:
    """Heavy-tailed random rows: a shared signal, seen through other noise by every layer."""
    generator = torch.Generator().manual_seed(document)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    signal = 2 * noise(windows, tokens)
    return Windows(
        document=f"synthetic-{document}",
        prefix=torch.full((windows,), tokens),
        truth=0.9 * signal.softmax(-1),
        tail=torch.full((windows,), 0.1),
        history=(4 * (signal + noise(target_layers, windows, tokens)).softmax(-1)).half(),
        lookahead=(16 * (signal + noise(draft_layers, windows, tokens)).softmax(-1)).half(),
    )


def timed(name: str, run: Callable[[], Result]) -> Result:
    """Run and print the seconds it took."""
    start = time.perf_counter()
    result = run()
    print(f"{name:<22} {time.perf_counter() - start:7.3f} s (synthetic traces)")
    return result


def main() -> None:
    """Build traces, time the phases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--windows", type=int, default=16, help="per document")
    parser.add_argument("--tokens", type=int, default=4096, help="length of every prefix")
    parser.add_argument("--target-layers", type=int, default=30)
    parser.add_argument("--draft-layers", type=int, default=24)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    sizes = (args.windows, args.tokens, args.target_layers, args.draft_layers)
    documents = [synthetic_windows(index, *sizes) for index in range(args.documents)]
    options = SearchOptions(Budget(args.budget, sink=4, window=16))

    start = time.perf_counter()
    target = timed("1: target layer", lambda: find_target_layer(documents, options.budget))
    draft = timed("2: draft layers", lambda: find_draft_layers(documents, target.layer, options))
    curve = timed("3: curve of m", lambda: find_split(documents, target.layer, draft.layers, options.budget))
    print(f"{'all':<22} {time.perf_counter() - start:7.3f} s (synthetic traces)")
    print(f"target layer {target.layer}, draft layers {list(draft.layers)}, m {curve.m}")


if __name__ == "__main__":
    main()
