"""Times of what `dustin-layers` adds to a step, kernels beside their torch references, on a GPU.

    python tools/bench_lists.py merge candidates layer_mass --batch 8 16
    python tools/bench_lists.py layer_mass --batch 16 --context 32768 --tilings

Each line says first whether the kernel's result is the reference's: lists entry by entry, sums within 1e-5 (norm of the
error over that of the reference). Times are of CUDA graph replays, in microseconds; GB/s count what has to be read and
written. Inputs of `layer_mass` rotate over layers that together do not fit in the L2; lists do fit there, as in a step.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dustin_runtime.attention.scoring import layer_mass_reference
from dustin_runtime.bench.timing import graph_ms
from dustin_runtime.kernels import processors
from dustin_runtime.kernels.layer_mass import Tile, Tiling, layer_mass, tiling
from dustin_runtime.kernels.merging import merge
from dustin_runtime.kernels.ranking import candidates
from dustin_runtime.policies.dustin_layers import candidates_reference, merge_reference
from dustin_runtime.scaled import E4M3, Held, Scaled
from dustin_runtime.selection import select
from dustin_runtime.signals import BESIDE_SHARE

SINK, WINDOW, HEAD_SIZE = 4, 16, 128
L2_BYTES = 100e6


class Shape(NamedTuple):
    """Of a target."""

    name: str
    layers: int
    kv_heads: int
    group: int


SHAPES = (Shape("1.5B", 28, 2, 6), Shape("7B", 28, 4, 7), Shape("70B", 80, 8, 8))
Work = Callable[[], object]


def main() -> None:
    """Check and time what is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=["merge", "candidates", "layer_mass"])
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--context", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--budget", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--queries", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--share", type=float, nargs="+", default=[BESIDE_SHARE], help="of the processors, beside all")
    parser.add_argument("--fp8", action="store_true", help="keys in 8 bits")
    parser.add_argument("--tilings", action="store_true", help="of layer_mass, the fastest others")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    wrong = 0
    with torch.inference_mode():
        for shape, batch, context in itertools.product(SHAPES, options.batch, options.context):
            if "layer_mass" in options.parts:
                for queries in options.queries:
                    kinds = (options.share, options.fp8, options.tilings)
                    wrong += not bench_mass(shape, batch, context, queries, *kinds)
            for budget, lists in itertools.product(options.budget, sorted({1, shape.kv_heads})):
                if "candidates" in options.parts:
                    wrong += not bench_candidates(shape, batch, context, budget, lists)
                if "merge" in options.parts:
                    wrong += not bench_merge(shape, batch, context, budget, lists)
    print(f"{wrong} of the checks failed" if wrong else "all checks passed")
    raise SystemExit(1 if wrong else 0)


def report(what: str, equal: bool, reference: Work, kernels: dict[str, Work], gigabytes: float, units: int = 1) -> bool:
    """Time and print one line; gives `equal` back."""
    times = [f"reference {1e3 * graph_ms(reference, 10).ms:9.1f} us"]
    for name, work in kernels.items():
        ms = graph_ms(work, 30, units=units).ms
        times.append(f"{name} {1e3 * ms:8.1f} us {gigabytes / ms * 1e3:6.0f} GB/s")
    print(f"{'equal ' if equal else 'WRONG '} {what:58s} {'   '.join(times)}", flush=True)
    return equal


def lengths_of(batch: int, context: int) -> Tensor:
    """Prefixes that nearly fill the context."""
    return context - torch.arange(batch, device="cuda") * 7 % 61


def bench_mass(
    shape: Shape, batch: int, context: int, queries: int, shares: list[float], fp8: bool, tilings: bool
) -> bool:
    """One layer of every row."""
    of_layer = batch * context * shape.kv_heads * HEAD_SIZE * (1 if fp8 else 2)
    layers = max(2, int(L2_BYTES // of_layer) + 1)
    keys = filled(layers, batch, shape.kv_heads, context, fp8)
    heads = shape.kv_heads * shape.group
    q = 2 * torch.randn(batch, queries, heads, HEAD_SIZE, dtype=torch.bfloat16, device="cuda")
    position = lengths_of(batch, context).unsqueeze(1) + torch.arange(-queries, 0, device="cuda")
    turns = [(torch.arange(batch, device="cuda") + turn) % layers for turn in range(layers)]
    found, want = layer_mass(q, keys, turns[1], position), layer_mass_reference(q, keys, turns[1], position)
    error = float((found - want).norm() / want.norm())

    def ours(programs: int | None, cut: Tiling | None = None) -> Work:
        return lambda: [layer_mass(q, keys, layer, position, programs, cut) for layer in turns]

    kernels = {"all": ours(None)}
    kernels |= {f"{share:.0%}": ours(int(share * processors(q.device))) for share in shares}
    what = f"layer_mass {shape.name}, {batch} x {context}, {queries} queries{', fp8' if fp8 else ''}, error {error:.0e}"
    reference = lambda: layer_mass_reference(q, keys, turns[1], position)  # noqa: E731
    gigabytes = (2 * of_layer + 4 * found.numel()) / 1e9
    equal = report(what, error < 1e-5, reference, kernels, gigabytes, layers)
    if tilings and queries * shape.group <= 256:
        programs = int(shares[0] * processors(q.device))
        print_fastest(tiling(queries * shape.group, q.itemsize), lambda cut: ours(programs, cut), layers)
    return equal


def print_fastest(chosen: Tiling, work: Callable[[Tiling], Work], units: int) -> None:
    """Other tilings of each launch, the other launch's as chosen, on the first share of the processors."""
    for place in ("normalisers", "sums"):
        found = []
        for sizes in itertools.product((64, 128, 256), (4, 8), (2, 3, 4)):
            tile = Tile(*sizes)
            try:
                ms = graph_ms(work(chosen._replace(**{place: tile})), 10, units=units).ms
            except Exception as error:  # too much shared memory
                if "out of resource" not in str(error).lower():
                    raise
                continue
            found.append((1e3 * ms, tile == getattr(chosen, place), tile))
        for us, is_chosen, tile in sorted(found)[:4] + [one for one in sorted(found)[4:] if one[1]]:
            print(f"        {us:9.1f} us  {place} {tuple(tile)}{' chosen' if is_chosen else ''}", flush=True)


def filled(layers: int, batch: int, kv_heads: int, context: int, fp8: bool) -> Held:
    """Keys as a cache has them."""
    keys = torch.empty(layers, batch, kv_heads, context, HEAD_SIZE, dtype=torch.bfloat16, device="cuda").normal_()
    if not fp8:
        return keys.transpose(2, 3)
    return Scaled(keys.to(E4M3).transpose(2, 3), torch.full((layers, batch, kv_heads), 0.5, device="cuda"))


def few_and_many(*size: int) -> Tensor:
    """Scores as attention is: few large ones, and many equal."""
    return (torch.rand(size, device="cuda") ** 8 * 100).round() / 100


def bench_candidates(shape: Shape, batch: int, context: int, budget: int, lists: int) -> bool:
    """Of one layer of every row."""
    mass, lengths, count = few_and_many(1, batch, lists, context), lengths_of(batch, context), budget - SINK - WINDOW
    sizes = {"sink": SINK, "window": WINDOW}
    equal = torch.equal(
        candidates(mass, lengths, count, **sizes), candidates_reference(mass, lengths, count, **sizes)
    )  # fmt: skip
    reference = lambda: candidates_reference(mass, lengths, count, **sizes)  # noqa: E731
    kernels: dict[str, Work] = {"kernels": lambda: candidates(mass, lengths, count, **sizes)}
    what = f"candidates {shape.name}, {batch} x {context}, k = {budget}, {lists} lists"
    return report(what, equal, reference, kernels, (4 * mass.numel() + 8 * batch * lists * count) / 1e9)


def bench_merge(shape: Shape, batch: int, context: int, budget: int, lists: int) -> bool:
    """Of all layers, half of the free budget their own."""
    free, lengths = budget - SINK - WINDOW, lengths_of(batch, context)
    own = free // 2
    ranked = torch.stack(
        [
            candidates_reference(few_and_many(batch, lists, context), lengths - 9, free, sink=SINK, window=WINDOW)
            for _ in range(shape.layers)
        ]
    )
    scores = few_and_many(batch, context)
    shared = select(None, scores, lengths, budget=budget - own, m=0, sink=SINK, window=WINDOW)
    found = merge(shared, ranked, lengths, own, WINDOW)
    equal = torch.equal(found, merge_reference(shared, ranked, lengths, own, WINDOW))
    reference = lambda: merge_reference(shared, ranked, lengths, own, WINDOW)  # noqa: E731
    kernels: dict[str, Work] = {"kernel": lambda: merge(shared, ranked, lengths, own, WINDOW)}
    what = f"merge {shape.name}, {shape.layers} layers, {batch} rows, k = {budget}, {lists} lists"
    return report(what, equal, reference, kernels, 8 * (ranked.numel() + found.numel()) / 1e9)


if __name__ == "__main__":
    main()
