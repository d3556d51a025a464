"""What a training run is asked: the command line, and the part of it that decides the weights."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dustin_runtime.errors import UsageError
from recipes.smollm2_135m.data import parse_shares
from recipes.smollm2_135m.export import FORMATS
from recipes.smollm2_135m.schedule import Schedule, parse_lengths, parse_losses


@dataclass(frozen=True)
class Settings:
    """Everything that decides the weights, apart from data and target. A run is continued with these or not at all."""

    layers: tuple[int, ...]
    ffn: int | None
    steps: int
    tokens_per_step: int
    rate: float
    warmup: int
    floor: float
    weight_decay: float
    clip: float
    lengths: str
    loss: str
    shares: str
    dtype: str
    seed: int

    def schedule(self) -> Schedule:
        """Raises UsageError for one that cannot be run."""
        made = Schedule(
            steps=self.steps,
            rate=self.rate,
            warmup=self.warmup,
            floor=self.floor,
            lengths=parse_lengths(self.lengths),
            losses=parse_losses(self.loss),
        )
        if self.steps < 1 or self.tokens_per_step < made.longest or self.tokens_per_step % made.longest:
            raise UsageError(
                f"--tokens-per-step {self.tokens_per_step}: must be a multiple of the longest sequence, {made.longest}"
            )
        return made

    def as_dict(self) -> dict[str, Any]:
        """JSON."""
        return asdict(self) | {"layers": list(self.layers)}


def parser() -> argparse.ArgumentParser:
    """The command line of `train`."""
    made = argparse.ArgumentParser(
        prog="train",
        description="Distil a draft from SmolLM2-135M. The same command continues a run that was interrupted.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("run", type=Path, help="folder of the run: checkpoint, curve and exported draft")
    made.add_argument("--data", type=Path, required=True, help="folder that prepare wrote")
    made.add_argument("--target", default="smollm2", help="folder, .gguf file or the embedded smollm2")
    model = made.add_argument_group("model")
    model.add_argument("--layers", default="0,1,2,29", help="target layers that the draft's begin as")
    model.add_argument("--ffn", type=int, help="keep the strongest N channels of every layer's MLP; default: all")
    model.add_argument("--format", choices=FORMATS, default="int8", help="of the exported matrices")
    training = made.add_argument_group("training")
    training.add_argument("--steps", type=int, default=2800, help="length of the schedule")
    training.add_argument("--tokens-per-step", type=int, default=65536)
    training.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    training.add_argument("--warmup", type=int, default=100, help="steps")
    training.add_argument("--floor", type=float, default=0.05, help="last learning rate as a share of the highest")
    training.add_argument("--weight-decay", type=float, default=0.01)
    training.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    training.add_argument(
        "--lengths", default="0:512,1024,2048;0.2:1024,4096,8192", help="SHARE:LENGTH,...;... of the steps"
    )
    training.add_argument("--loss", default="0:kl=1;0.5:kl=0.3,tv=1", help="SHARE:kl=WEIGHT,tv=WEIGHT;... of the steps")
    training.add_argument("--shares", default="books=0.5,code=0.12,docs=0.08,own=0.3", help="of the sources")
    training.add_argument("--seed", type=int, default=0)
    machine = made.add_argument_group("machine")
    machine.add_argument("--device", default="auto")
    machine.add_argument("--dtype", default="auto", help="of products: bfloat16 (autocast) or float32")
    machine.add_argument("--micro-tokens", type=int, default=65536, help="tokens whose activations are held at a time")
    machine.add_argument("--chunk", type=int, default=4096, help="tokens whose logits are held at a time")
    machine.add_argument(
        "--compile",
        choices=("none", "loss", "all"),
        default="none",
        help="what torch.compile fuses: faster, not the same bits",
    )
    machine.add_argument("--recompute", action="store_true", help="keep no activations inside a layer")
    run = made.add_argument_group("run")
    run.add_argument("--time-limit", type=float, help="seconds after which this process has stopped and exported")
    run.add_argument("--reserve", type=float, default=30.0, help="seconds of it that are left for the last steps")
    run.add_argument("--stop-at", type=int, help="stop after this many steps of the schedule")
    run.add_argument("--end-at", type=int, help="shorten the schedule: let the rate fall to its floor at this step")
    run.add_argument("--checkpoint-every", type=int, default=200, help="steps")
    run.add_argument("--evaluate-every", type=int, default=200, help="steps")
    run.add_argument("--evaluate-length", type=int, help="tokens of a held-out sequence; default: the longest")
    run.add_argument("--evaluate-count", type=int, default=4, help="held-out sequences per source")
    run.add_argument("--log-every", type=int, default=10, help="steps")
    run.add_argument("--reference", type=Path, help="curve.json of another run with the same settings to compare with")
    run.add_argument("--tolerance", type=float, default=0.02, help="largest relative difference from the reference")
    run.add_argument("--dry-run", action="store_true", help="price the run for known devices, load no weights")
    run.add_argument("--benchmark", action="store_true", help="time steps of every length, write nothing")
    return made


def settings_of(arguments: argparse.Namespace, dtype: str) -> Settings:
    """The settings in a command line.

    Raises:
        UsageError: one makes no sense.
    """
    try:
        layers = tuple(int(part) for part in arguments.layers.split(","))
    except ValueError:
        raise UsageError(f"--layers {arguments.layers}: give numbers such as 0,1,2,29") from None
    for flag in ("steps", "micro_tokens", "chunk", "checkpoint_every", "evaluate_every", "log_every"):
        if getattr(arguments, flag) < 1:
            raise UsageError(f"--{flag.replace('_', '-')} {getattr(arguments, flag)}: must be at least 1")
    parse_shares(arguments.shares)
    names = Settings.__dataclass_fields__.keys() - {"layers", "dtype"}
    made = Settings(layers=layers, dtype=dtype, **{name: getattr(arguments, name) for name in names})
    made.schedule()
    return made
