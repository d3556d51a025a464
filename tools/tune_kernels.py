"""Sweep the tilings of the attention and product kernels, and print the fastest beside what the runtime chooses.

    python tools/tune_kernels.py dense sparse linear

Every figure is the median of graph replays over rotating inputs that do not fit in the L2. Compiling takes most of the
time: run it once with `--compile PART/PARTS` in as many processes as there are cores, then without.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dustin_runtime.bench.timing import graph_ms
from dustin_runtime.kernels import dense, linear, processors, sparse
from dustin_runtime.kernels.pointwise import silu_mul

BATCH, CONTEXT, QUERY_HEADS, KV_HEADS, HEAD_SIZE, TOKENS, BUDGET = 16, 32768, 64, 8, 128, 5, 512
CACHES = 12
PRODUCTS = {  # outputs, inputs, gated: Qwen2.5-0.5B and 7B
    "0.5B qkv": (1152, 896, False),
    "0.5B output": (896, 896, False),
    "0.5B gate, up": (4864, 896, True),
    "0.5B down": (896, 4864, False),
    "0.5B head": (151936, 896, False),
    "7B qkv": (4608, 3584, False),
    "7B output": (3584, 3584, False),
    "7B gate, up": (18944, 3584, True),
    "7B down": (3584, 18944, False),
    "7B head": (152064, 3584, False),
}
Work = tuple[str, Any, Callable[[], object], int, float]
"""Name, tiling (None: a peer or the runtime's choice), work, units in it, gigabytes of a unit."""


def main() -> None:
    """Sweep what is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="+", choices=["dense", "sparse", "linear"])
    parser.add_argument("--compile", metavar="PART/PARTS", help="only compile one part of the tilings")
    options = parser.parse_args()
    part, parts = map(int, options.compile.split("/")) if options.compile else (0, 1)
    with torch.inference_mode():
        for name in options.kernels:
            sweep({"dense": dense_work, "sparse": sparse_work, "linear": linear_work}[name](), part, parts)


def sweep(works: Iterator[Work], part: int, parts: int) -> None:
    """Time all works, or run every `parts`-th once so that it is compiled; print the best of each name."""
    found: dict[str, list[tuple[float, str, float]]] = {}
    for index, (name, tiling, work, units, gigabytes) in enumerate(works):
        if index % parts != part:
            continue
        try:
            if parts > 1:
                work()
                continue
            ms = graph_ms(work, 10, units=units).ms
        except Exception as error:  # too much shared memory, mostly
            if "out of resource" not in str(error).lower():
                raise
            continue
        found.setdefault(name, []).append((ms, str(tiling or "chosen"), gigabytes))
    for name, rows in found.items():
        print(f"{name}: chosen and peers")
        for ms, tiling, gigabytes in (row for row in rows if not row[1].startswith("Tiling")):
            print(f"  {1e3 * ms:9.1f} us {gigabytes / ms:6.2f} TB/s  {tiling}")
        for ms, tiling, gigabytes in sorted(row for row in rows if row[1].startswith("Tiling"))[:5]:
            print(f"  {1e3 * ms:9.1f} us {gigabytes / ms:6.2f} TB/s  {tiling}")


def _inputs() -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    q = torch.randn(BATCH, TOKENS, QUERY_HEADS, HEAD_SIZE, dtype=torch.bfloat16, device="cuda")
    start = torch.full((BATCH,), CONTEXT - TOKENS - 1, device="cuda")
    size = (2, BATCH, KV_HEADS, CONTEXT, HEAD_SIZE)
    caches = []
    for _ in range(CACHES):
        k, v = torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_().transpose(2, 3)
        caches.append((k, v))
    return q, start, caches


def dense_work() -> Iterator[Work]:
    """Full attention at 16 x 32K, 64/8 heads of 128, 5 new tokens."""
    q, start, caches = _inputs()
    gigabytes = 4 * BATCH * KV_HEADS * CONTEXT * HEAD_SIZE / 1e9
    rows = q.view(BATCH, TOKENS, KV_HEADS, -1, HEAD_SIZE).transpose(2, 3).reshape(BATCH, -1, KV_HEADS, HEAD_SIZE)

    def flash() -> None:
        for k, v in caches[:4]:
            torch.ops.aten._flash_attention_forward(
                rows, k, v, None, None, rows.shape[1], CONTEXT, 0.0, False, False, scale=HEAD_SIZE**-0.5
            )

    def ours(tiling: dense.Tiling | None) -> Callable[[], None]:
        return lambda: [dense.dense_attention(q, k, v, start, tiling) for k, v in caches[:4]] and None

    yield "dense", "torch flash, packed", flash, 4, gigabytes
    yield "dense", None, ours(None), 4, gigabytes
    for count, warps, stages in itertools.product((1, 2, 4), (4, 8), (2, 3, 4)):
        tiling = dense.Tiling(64, 64, count * processors(q.device), 256, warps, stages)
        yield "dense", tiling, ours(tiling), 4, gigabytes


def sparse_work() -> Iterator[Work]:
    """80 launches of sparse attention over rotating caches, k = 512."""
    q, start, caches = _inputs()
    free = CONTEXT - TOKENS - 1
    kept = torch.stack([torch.randperm(free, device="cuda")[:BUDGET].sort().values for _ in range(BATCH)])[:, None]
    gigabytes = 4 * BATCH * KV_HEADS * (BUDGET + TOKENS) * HEAD_SIZE / 1e9
    for batch in (BATCH, BATCH // 2):

        def ours(tiling: sparse.Tiling | None, batch: int = batch) -> Callable[[], None]:
            def run() -> None:
                for index in range(80):
                    k, v = caches[index % CACHES]
                    sparse.sparse_attention(q[:batch], k[:batch], v[:batch], start[:batch], kept[:batch], tiling)

            return run

        share = gigabytes * batch / BATCH
        yield f"sparse, batch {batch}", None, ours(None), 80, share
        for keys, splits, stages in itertools.product((32, 64, 128), (1, 2, 4), (2, 3, 4)):
            tiling = sparse.Tiling(64, keys, splits, 4, stages)
            yield f"sparse, batch {batch}", tiling, ours(tiling), 80, share


def linear_work() -> Iterator[Work]:
    """Products of 16 to 128 rows with the matrices of a 0.5B and a 7B model, and cuBLAS beside them."""
    for (name, (outputs, inputs, gated)), rows in itertools.product(PRODUCTS.items(), (16, 32, 64, 128)):
        gigabytes = 2e-9 * outputs * inputs * (1 + gated)
        count = max(1, min(24, int(0.4 / gigabytes)))
        size = (count, outputs * (1 + gated), inputs)
        weights = torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(std=inputs**-0.5)
        x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")

        def cublas(x: Tensor = x, weights: Tensor = weights, gated: bool = gated) -> None:
            for weight in weights:
                out = F.linear(x, weight)
                if gated:
                    silu_mul(out)

        def ours(
            tiling: linear.Tiling | None, x: Tensor = x, weights: Tensor = weights, gated: bool = gated
        ) -> Callable[[], None]:
            return lambda: [linear.linear(x, weight, gated=gated, cut=tiling) for weight in weights] and None

        title = f"{name}, {rows} rows"
        yield title, "cuBLAS", cublas, count, gigabytes
        used = linear.worthwhile(rows, outputs, inputs, gated)
        yield title, f"chosen{'' if used else ' (not used: cuBLAS is)'}", ours(None), count, gigabytes
        for out, tile, splits, stages in itertools.product((16, 32, 64, 128), (64, 128, 256), (1, 2, 4, 8), (3, 4, 5)):
            programs = -(-outputs // out) * splits
            bytes_held = 2 * stages * tile * (out * (1 + gated) + max(16, rows))
            if 60 <= programs <= 3000 and inputs >= 2 * tile * splits and 16 << 10 <= bytes_held <= 200 << 10:
                tiling = linear.Tiling(out, tile, splits, 4, stages)
                yield title, tiling, ours(tiling), count, gigabytes


if __name__ == "__main__":
    main()
