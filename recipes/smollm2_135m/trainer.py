"""One run of training: steps, what they leave on disk, and how it is taken up again."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW

from dustin_profile.progress import say
from dustin_profile.provenance import device_name, versions
from dustin_profile.rundir import first_difference
from dustin_runtime.errors import ConflictError, NothingMeasuredError
from dustin_runtime.files import clear_temporaries
from dustin_runtime.models.decoder import Decoder
from recipes.smollm2_135m import curve as records
from recipes.smollm2_135m.checkpoint import load_checkpoint, save_checkpoint
from recipes.smollm2_135m.data import Mixture
from recipes.smollm2_135m.heldout import closeness
from recipes.smollm2_135m.losses import Slopes, distil, slopes
from recipes.smollm2_135m.model import draft_and_target
from recipes.smollm2_135m.settings import Settings

BETAS = (0.9, 0.95)
_PATIENCE = 3
"""Steps in a row whose gradient is not finite and that are left out, before the run is given up."""


class Trainer:
    """Trains in a folder.

    Args:
        target: fp32, on the device of the run.
        inputs: what the run is made from beside the settings (target, data), by name; recorded and compared.
        held_out: by source, [sequences, tokens] int64.
        micro_tokens, chunk: see `settings.parser`.
    """

    def __init__(
        self,
        run: Path,
        settings: Settings,
        target: Decoder,
        mixture: Mixture,
        held_out: dict[str, Tensor],
        inputs: dict[str, Any],
        *,
        micro_tokens: int,
        chunk: int,
        recompute: bool = False,
        compiled: Literal["none", "loss", "all"] = "none",
    ) -> None:
        self.run, self.settings, self.mixture = run, settings, mixture
        self.schedule = settings.schedule()
        self.device = target.device
        self.autocast = settings.dtype == "bfloat16"
        self.micro_tokens, self.chunk = micro_tokens, chunk
        longest = max([self.schedule.longest, *(ids.shape[1] for ids in held_out.values())])
        self.draft, self.target = draft_and_target(
            target, settings.layers, longest, ffn=settings.ffn, recompute=recompute
        )
        if self.autocast:  # as autocast would at every step
            for parameter in self.target.parameters():
                parameter.data = parameter.data.bfloat16() if parameter.dim() == 2 else parameter.data
        self.head = self.target.head.to(torch.bfloat16 if self.autocast else torch.float32)
        self.held_out = {name: ids.to(self.device) for name, ids in held_out.items() if len(ids)}
        self.measure: Slopes = slopes
        if compiled != "none":
            self._compile(compiled == "all")
        self.optimizer = self._optimizer()
        self.step = 0
        self.skipped = 0
        self.seconds = 0.0
        self.since = time.monotonic()
        self.curve: dict[str, Any] = {
            "kind": records.KIND,
            "settings": settings.as_dict() | inputs,
            "versions": versions(),
            "device": device_name(str(self.device)),
            "ending": None,
            "train": [],
            "heldout": [],
            "seconds": [],
        }

    def _compile(self, layers: bool) -> None:
        """Fuse the small operations. What the compiler cannot do is run as it is, with a warning."""
        import torch._dynamo

        torch._dynamo.config.suppress_errors = True
        self.measure = torch.compile(slopes, dynamic=False)
        if layers:
            for layer in (*self.draft.each_layer(), *self.target.each_layer()):
                layer.compile()

    def _optimizer(self) -> AdamW:
        matrices = [parameter for parameter in self.draft.parameters() if parameter.dim() == 2]
        norms = [parameter for parameter in self.draft.parameters() if parameter.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": self.settings.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=self.settings.rate, betas=BETAS, fused=self.device.type == "cuda")

    @property
    def checkpoint_path(self) -> Path:
        return self.run / "checkpoint.safetensors"

    @property
    def curve_path(self) -> Path:
        return self.run / "curve.json"

    def resume(self) -> None:
        """Take up the run where its checkpoint stands, if there is one.

        Raises:
            ConflictError: it was made with other settings; names the first.
            MissingError: the checkpoint is damaged.
        """
        self.run.mkdir(parents=True, exist_ok=True)
        clear_temporaries(self.run)
        self.since = time.monotonic()
        if not self.checkpoint_path.exists():
            return
        before = records.read_curve(self.curve_path)
        if found := first_difference(before["settings"], self.curve["settings"], "settings"):
            raise ConflictError(f"{self.run}: {found[0]} was {found[1]}, now it is {found[2]}: use another folder")
        state = load_checkpoint(self.checkpoint_path, self.draft, self.optimizer)
        self.step, self.seconds, self.skipped = state["step"], state["seconds"], state["skipped"]
        records.until(before, self.step)
        self.curve |= {name: before[name] for name in ("train", "heldout", "seconds")}
        if state["ending"]:
            self._end(*state["ending"])
        say(f"continued at step {self.step} of {self.schedule.end}")

    def end_at(self, step: int) -> None:
        """Shorten the schedule from here on."""
        if self.schedule.ending is None or self.schedule.ending[1] != step:
            self._end(self.step, step)

    def _end(self, decided: int, end: int) -> None:
        self.schedule = replace(self.schedule, ending=(decided, end))
        self.curve["ending"] = [decided, end]

    def _attention(self) -> AbstractContextManager[None]:
        """On a GPU, only kernels that never write attention maps of tokens x tokens."""
        if self.device.type != "cuda":
            return nullcontext()
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])

    def advance(self) -> dict[str, float]:
        """Do one step; returns its figures."""
        step, settings = self.step, self.settings
        length, rate = self.schedule.length_at(step), self.schedule.rate_at(step)
        ids = self.mixture.batch(step, settings.tokens_per_step, length).to(self.device)
        with self._attention():
            figures = self._gradient(ids, step)
        norm = float(torch.nn.utils.clip_grad_norm_(self.draft.parameters(), settings.clip))
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.skipped = 0
        else:
            self.skipped += 1
            say(f"step {step}: the gradient is not finite; left out")
            if self.skipped >= _PATIENCE:
                raise NothingMeasuredError(f"{_PATIENCE} gradients in a row were not finite; lower --rate")
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return figures | {"length": length, "rate": rate, "norm": norm}

    def _gradient(self, ids: Tensor, step: int) -> dict[str, float]:
        """Leave the gradient of a batch in the draft's parameters."""
        weights = self.schedule.weights_at(step)
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for part in ids.split(max(self.micro_tokens // ids.shape[1], 1)):
            share = len(part) / len(ids)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                with torch.no_grad():
                    wanted = self.target(part).flatten(0, 1)
                hidden = self.draft(part).flatten(0, 1)
            found = distil(hidden, wanted, self.head, weights, self.chunk, self.measure)
            (found.loss * share).backward()
            sums += torch.stack([value.detach().double() * share for value in found])
        loss, kl, tv = sums.tolist()
        return {"loss": loss, "kl": kl, "tv": tv}

    def train(self, until: int, *, deadline: float, log: int, evaluate: int, save: int) -> bool:
        """Step until `until` steps are done, or the deadline (of `time.monotonic`) is near.

        Args:
            log, evaluate, save: every so many steps.

        Returns:
            Whether `until` was reached.
        """
        longest = 0.0
        if not self.curve["heldout"]:
            self.record(self.evaluate())
        while self.step < until:
            if time.monotonic() + 2 * longest > deadline:
                return False
            at = time.monotonic()
            figures = self.advance()
            # Where a run is stopped leaves no trace in its record: one that was stopped equals one that was not.
            if self.step % log == 0 or self.step in (1, self.schedule.end):
                self._log(figures)
            if self.step % evaluate == 0 or self.step == self.schedule.end:
                self.record(self.evaluate())
            if self.step % save == 0 and self.step < until:
                self.save()
            longest = max(longest, time.monotonic() - at) if self.step > 1 else longest
        return True

    def _log(self, figures: dict[str, float]) -> None:
        done = {"step": self.step, "tokens": self.step * self.settings.tokens_per_step}
        self.curve["train"].append(done | {name: float(f"{value:.7g}") for name, value in figures.items()})
        seconds = self.seconds + time.monotonic() - self.since
        self.curve["seconds"].append({"step": self.step, "seconds": round(seconds, 2)})
        say(
            f"step {self.step}/{self.schedule.end}  kl {figures['kl']:.4f}  1-tv {1 - figures['tv']:.4f}  "
            f"length {figures['length']:.0f}  rate {figures['rate']:.2e}  norm {figures['norm']:.3f}  {seconds:.0f} s"
        )

    def evaluate(self) -> dict[str, Any]:
        """Measure the draft on held-out text, by source."""
        found = {}
        for name, ids in self.held_out.items():
            rows = max(self.micro_tokens // ids.shape[1], 1)
            with self._attention():
                found[name] = closeness(
                    self.draft, self.target, ids, self.head, rows=rows, chunk=self.chunk, autocast=self.autocast
                )
            say(f"  {name}: " + "  ".join(f"{key} {found[name][key]:.4f}" for key in ("kl", "overlap", "top1")))
        return found

    def record(self, found: dict[str, Any]) -> None:
        """Add what `evaluate` found to the curve."""
        tokens = self.step * self.settings.tokens_per_step
        self.curve["heldout"].append({"step": self.step, "tokens": tokens, "sources": found})

    def save(self) -> None:
        """Write checkpoint and curve.

        The curve first: entries behind the checkpoint are dropped when the run is taken up.
        """
        now = time.monotonic()
        self.seconds, self.since = self.seconds + now - self.since, now
        records.write_curve(self.curve_path, self.curve)
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "skipped": self.skipped,
            "ending": self.curve["ending"],
        }
        save_checkpoint(self.checkpoint_path, self.draft, self.optimizer, state)
