"""`dustin-run bench attention`: how long the attention of a step takes, full and sparse, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dustin_runtime.errors import CapacityError, UsageError

app = typer.Typer(help="Measure the runtime on this machine.")


@app.command("attention")
def attention(
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="CONTEXTxBATCH, such as 16Kx8; repeat for several. Default: 16Kx8, 16Kx16, 32Kx8 and 32Kx16.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the target.")] = 80,
    query_heads: Annotated[int, typer.Option(min=1, help="Query heads of the target.")] = 64,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of the target.")] = 8,
    head_size: Annotated[int, typer.Option(min=2, help="Channels of a head.")] = 128,
    budget: Annotated[int, typer.Option(min=1, help="Prefix tokens that sparse attention reads.")] = 512,
    depth: Annotated[int, typer.Option(min=1, max=64, help="Draft tokens per step; depth + 1 are verified.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Times per figure; fewer where they take over 2 s.")] = 20,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    json: Annotated[
        Path | None, typer.Option(help="Write the document here, and as Markdown beside it.", show_default=False)
    ] = None,
) -> None:
    """Time verification attention over the full cache and over chosen tokens, on random caches."""
    from dustin_runtime.bench.workload import PAPER_WORKLOADS, Sizes, parse_workload
    from dustin_runtime.files import require_writable, write_json, write_text

    workloads = list(dict.fromkeys(map(parse_workload, workload))) if workload else list(PAPER_WORKLOADS)
    sizes = Sizes(layers, query_heads, kv_heads, head_size, budget, depth)
    sizes.check()
    if json:
        require_writable(json, "--json")
    if device == "cpu" and not workload:
        raise UsageError("--device cpu: give a small --workload, such as 500x2; the default ones are a GPU's")

    import torch

    from dustin_runtime.bench.attention import measure
    from dustin_runtime.bench.report import attention_markdown
    from dustin_runtime.loading import pick_device, pick_dtype

    if device == "auto" and not torch.cuda.is_available():
        raise CapacityError(
            "no CUDA device: this measures GPU kernels; give --device cpu and a small --workload to try it"
        )
    kind = pick_device(device)
    chosen = pick_dtype(dtype, kind)
    name = str(chosen).removeprefix("torch.")
    command = " ".join(
        [
            *("dustin-run bench attention", *(f"--workload {one}" for one in workloads)),
            *(f"--layers {layers} --query-heads {query_heads} --kv-heads {kv_heads} --head-size {head_size}".split()),
            *(f"--budget {budget} --depth {depth} --repeats {repeats} --dtype {name} --device {kind}".split()),
        ]
    )
    document = measure(
        sizes,
        workloads,
        dtype=chosen,
        device=torch.device(kind),
        repeats=repeats,
        command=command,
        progress=lambda line: typer.echo(line, err=True),
    )
    text = attention_markdown(document)
    typer.echo(text, nl=False)
    if json:
        write_json(json, document)
        if json.suffix == ".json":
            write_text(json.with_suffix(".md"), text)
