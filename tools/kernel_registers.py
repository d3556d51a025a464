"""Registers, stack and shared memory of the attention and selection kernels, compiled for Hopper on any machine.

python tools/kernel_registers.py

A stack means that registers were spilled to memory: a sign, and no measurement. A branch that no shape had use for once
gave the sparse kernel one, and lists of 1024 entries took half as long again. Needs no GPU: Triton brings its compiler.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dustin_profile.report import table
from dustin_runtime.judge import MOST
from dustin_runtime.kernels import dense, selection, sparse

HOPPER = GPUTarget("cuda", 90, 32)
BF16 = "q k v rest_keys rest_values saved out"
FP32 = "k_scale v_scale rest_bias partials tops totals lookahead history"
FP64 = "coefficients sums estimates"
INT64 = "start lengths"
INT32 = "counter found found_bits unsorted cuts"
POINTERS = {
    name: f"*{dtype}"
    for dtype, names in (("bf16", BF16), ("fp32", FP32), ("fp64", FP64), ("i64", INT64), ("i32", INT32))
    for name in names.split()
} | {"kept": "*i64", "full": "*i1", "scale": "fp32"}
"""Types of arguments by name, in all kernels; others are int32."""
STRIDE = re.compile(".*_(batch|token|head)$")


class Case(NamedTuple):
    """A kernel with what is known when it is compiled: shapes of Qwen2.5-7B, 16 rows, four new tokens."""

    name: str
    kernel: Any
    known: Mapping[str, object]
    warps: int
    stages: int


def cases() -> Iterator[Case]:
    for guarded in (False, True):
        label = ", guarded" if guarded else ""
        tile = {"ROWS": 64, "D": 128, "KEYS": 64, "SCALED": False, "GUARDED": guarded, "PDL": True}
        yield Case(f"dense{label}", dense._dense, tile | {"BATCH": 16, "TEAMS": True}, 4, 4)
        for listed in (512, 1024):
            for rest in (False, True):
                own = {"LIST": listed // 4, "NEW": 16, "WINDOW": False, "REST": rest, "SAVED": rest, "TEAMS": False}
                name = f"sparse, k = {listed}{', rest' if rest else ''}{label}"
                yield Case(name, sparse._sparse, tile | own, 4, 3)
    for judged in (False, True):
        known: dict[str, object] = {"CHUNKS": 8, "JUDGED": judged}
        label = ", judged" if judged else ""
        yield Case(f"candidates{label}", selection._candidates, known | {"CHUNK": 4096, "MOST": 492}, 8, 3)
        known |= {"COUNT": 3936, "BLOCK": 4096, "LIST": 512, "TILE": 64, "CEILING": MOST, "PARTS": 8}
        yield Case(f"choose{label}", selection._choose, known | {"HAS_LOOKAHEAD": True, "HAS_HISTORY": True}, 8, 3)


def resources(case: Case) -> dict[str, int]:
    """Registers a thread, bytes of stack a thread, and bytes of shared memory a program."""
    names = case.kernel.arg_names
    types = {name: "constexpr" if name in case.known else POINTERS.get(name, "i32") for name in names}
    # What the runtime finds out by itself: tensors begin, and their rows too, where wide loads may.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if types[name].startswith("*") or (types[name] == "i32" and STRIDE.match(name))
    }
    known = {(names.index(name),): value for name, value in case.known.items()}
    source = ASTSource(fn=case.kernel, signature=types, constexprs=known, attrs=aligned)
    made = triton.compile(source, target=HOPPER, options={"num_warps": case.warps, "num_stages": case.stages})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(made.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", said)}
    return {"registers": found["REG"], "stack": found["STACK"], "shared": made.metadata.shared}


def main() -> None:
    rows = [[case.name, *map(str, resources(case).values())] for case in cases()]
    print("\n".join(table(["kernel", "registers", "stack, bytes", "shared, bytes"], rows)))


if __name__ == "__main__":
    main()
