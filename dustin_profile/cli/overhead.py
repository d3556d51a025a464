"""`dustin-profile eval overhead`: what the estimator costs on this device, by context."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from dustin_profile.cli.eval import Config, Overwrite, RunDir, results_folder
from dustin_profile.cli.options import Json, Quiet, begin
from dustin_profile.settings import ModelSettings


def overhead(
    config: Config,
    length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of context; repeat. Default: 1024 to 32768, on a CPU 512 to 8192."),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows. Default: 8, on a CPU 1.")] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Times that each part is timed, less where it is long.")] = 20,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto (float32 on a CPU, bfloat16 on a GPU) or its name.")] = "auto",
    run_dir: RunDir = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time scores and choice of Dustin, Quest and all heads against full attention; loads no model."""
    import torch

    from dustin_profile.evaluation.overhead import CPU_BATCH, CPU_LENGTHS, GPU_BATCH, GPU_LENGTHS, HEADER, rows, run
    from dustin_profile.rundir import locked
    from dustin_runtime.loading import pick_device, pick_dtype

    served = begin(config, ModelSettings(), quiet)
    name = pick_device(device)
    lengths, usual = (GPU_LENGTHS, GPU_BATCH) if name.startswith("cuda") else (CPU_LENGTHS, CPU_BATCH)
    folder = run_dir or results_folder(config, served)
    with locked(folder):
        result = run(
            folder / "overhead",
            served,
            length or lengths,
            batch or usual,
            pick_dtype(dtype, name),
            torch.device(name),
            repeats,
            overwrite,
        )
    if as_json:
        print(json.dumps(result))
    else:
        from dustin_profile.cli.tables import plain_table

        models = " with ".join(result["inputs"]["pair"][side]["id"] for side in ("target", "draft"))
        plain_table(f"shapes of {models}, synthetic caches", HEADER, rows(result))
        print("  ".join(str(folder / "overhead" / f"results.{kind}") for kind in ("json", "md", "png")))
