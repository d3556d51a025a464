"""Distil a draft from its target: `python -m recipes.smollm2_135m.train RUN --data FOLDER`; `--help` has the rest.

The folder of the run receives `checkpoint.safetensors` (replaced now and then: the same command continues),
`curve.json`, `curve.png`, `final.json` and `draft/`, which the runtime loads as `--draft RUN/draft`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from dustin_profile.progress import say
from dustin_runtime.errors import ConflictError, RegressionError, UsageError
from dustin_runtime.files import digest, write_json
from dustin_runtime.loading import pick_device, pick_dtype
from dustin_runtime.models.source import resolve
from dustin_runtime.pricing import DEVICES
from recipes.smollm2_135m import BEGAN
from recipes.smollm2_135m.command import run_main
from recipes.smollm2_135m.data import Mixture, parse_shares, read_manifest, read_source, spread
from recipes.smollm2_135m.price import price
from recipes.smollm2_135m.settings import Settings, parser, settings_of


def main(arguments: argparse.Namespace) -> None:
    """Price, time, or train."""
    device = pick_device(arguments.device)
    dtype = str(pick_dtype(arguments.dtype, device)).removeprefix("torch.")
    if dtype not in ("bfloat16", "float32"):
        raise UsageError(f"--dtype {dtype}: give bfloat16 or float32")
    settings = settings_of(arguments, dtype)
    if arguments.dry_run:
        _dry_run(arguments, settings)
        return
    trainer, tokenizer = _trainer(arguments, settings, device)
    if arguments.benchmark:
        print(json.dumps(benchmark(trainer, arguments.time_limit), indent=1))
        return
    trainer.resume()
    if arguments.end_at:
        trainer.end_at(arguments.end_at)
    until = min(arguments.stop_at or trainer.schedule.end, trainer.schedule.end)
    deadline = BEGAN + arguments.time_limit - arguments.reserve if arguments.time_limit else math.inf
    complete = trainer.train(
        until,
        deadline=deadline,
        log=arguments.log_every,
        evaluate=arguments.evaluate_every,
        save=arguments.checkpoint_every,
    )
    _finish(arguments, trainer, tokenizer)
    done = trainer.step == trainer.schedule.end
    say(f"{trainer.step} of {trainer.schedule.end} steps done" + ("" if done else "; the same command continues"))
    if complete and arguments.reference:
        _compare(arguments.reference, trainer.curve, arguments.tolerance)


def _trainer(arguments: argparse.Namespace, settings: Settings, device: str) -> tuple[Any, str]:
    """The trainer, and the hash of its target's tokenizer."""
    import torch

    from dustin_runtime.models.tokenizer import tokenizer_hash
    from dustin_runtime.models.weights import load_decoder
    from recipes.smollm2_135m.trainer import Trainer

    manifest = read_manifest(arguments.data)
    source = resolve(arguments.target, offline=True)
    tokenizer = tokenizer_hash(source.tokenizer())
    if manifest["tokenizer"] != tokenizer:
        raise ConflictError(f"{arguments.data}: was made with another tokenizer than {source.id}'s; prepare it again")
    shares = parse_shares(settings.shares)
    if absent := sorted(shares.keys() - manifest["sources"].keys()):
        there = ", ".join(sorted(manifest["sources"]))
        raise UsageError(f"--shares: {arguments.data} has no {absent[0]} (it has {there}); make it, or leave it out")
    longest = settings.schedule().longest
    streams = {name: read_source(arguments.data, manifest, name, "train") for name in shares}
    mixture = Mixture(streams, shares, longest, settings.seed)
    held_out = {
        name: spread(
            read_source(arguments.data, manifest, name, "heldout"),
            arguments.evaluate_length or longest,
            arguments.evaluate_count,
        )
        for name in manifest["sources"]
    }
    files = {name: [manifest["sources"][name][split] for split in ("train", "heldout")] for name in shares}
    inputs = {"target": source.content_hash(), "data": digest(files)}
    trainer = Trainer(
        arguments.run,
        settings,
        load_decoder(source.path, source.shape(), torch.float32, device),
        mixture,
        held_out,
        inputs,
        micro_tokens=arguments.micro_tokens,
        chunk=arguments.chunk,
        recompute=arguments.recompute,
        compiled=arguments.compile,
    )
    return trainer, tokenizer


def _finish(arguments: argparse.Namespace, trainer: Any, tokenizer: str) -> None:
    """Save, measure, export, and measure again what was stored."""
    from recipes.smollm2_135m import curve
    from recipes.smollm2_135m.export import export, round_as_stored

    trained = trainer.evaluate()
    trainer.save()
    hashes = export(trainer.draft, arguments.run / "draft", tokenizer, arguments.format)
    stored = trained
    if arguments.format == "int8":
        say("as stored:")
        round_as_stored(trainer.draft)
        stored = trainer.evaluate()
    write_json(
        arguments.run / "final.json",
        {"kind": "dustin-draft-final", "step": trainer.step, "seconds": round(trainer.seconds, 1)}
        | {"trained": trained, "stored": stored, "format": arguments.format, "sha256": hashes},
    )
    curve.draw_curve(arguments.run / "curve.png", trainer.curve)  # last: nothing depends on it
    say(f"{arguments.run / 'draft'}: " + ", ".join(f"{name} {found}" for name, found in hashes.items()))


def _compare(path: Path, curve: dict[str, Any], tolerance: float) -> None:
    from recipes.smollm2_135m.curve import largest_difference, read_curve

    steps, difference = largest_difference(read_curve(path), curve)
    text = f"{steps} recorded steps in common with {path.name}; losses differ by {difference:.2%} at most"
    if difference > tolerance:
        raise RegressionError(f"{text}, more than {tolerance:.2%}")
    print(text)


def benchmark(trainer: Any, limit: float | None, repeats: int = 3) -> dict[str, Any]:
    """Time steps of every length.

    Returns:
        Tokens per second by length; how many steps of the schedule's mix of lengths fit into `limit` seconds; memory.
    """
    import torch

    schedule, tokens = trainer.schedule, trainer.settings.tokens_per_step
    steps = {schedule.length_at(step): step for step in range(schedule.steps)}
    seconds: dict[int, float] = {}
    for length, step in sorted(steps.items()):
        times = []
        for _ in range(repeats + 1):
            at = time.monotonic()
            trainer.step = step
            trainer.advance()  # reads the gradient's norm, so the device has finished
            times.append(time.monotonic() - at)
        seconds[length] = min(times[1:])
        say(f"length {length}: {tokens / seconds[length]:,.0f} tokens/s")
    mean = sum(seconds[schedule.length_at(step)] for step in range(schedule.steps)) / schedule.steps
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {
        "tokens_per_second": {str(length): round(tokens / value) for length, value in seconds.items()},
        "seconds_per_step": round(mean, 4),
        "steps_in_limit": int(limit / mean) if limit else None,
        "peak_bytes": peak,
    }


def _dry_run(arguments: argparse.Namespace, settings: Settings) -> None:
    shape = resolve(arguments.target, offline=True).shape()
    draft = shape.model_copy(update={"layers": len(settings.layers), "ffn": settings.ffn or shape.ffn})
    priced = [
        price(
            shape,
            draft,
            settings.schedule(),
            tokens_per_step=settings.tokens_per_step,
            micro_tokens=arguments.micro_tokens,
            chunk=arguments.chunk,
            recompute=arguments.recompute,
            device=device,
        )
        for device in DEVICES.values()
    ]
    print(json.dumps(priced, indent=1))


if __name__ == "__main__":
    run_main(parser(), main)
