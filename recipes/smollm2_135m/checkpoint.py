"""Checkpoints: one safetensors file with weights, both moments of AdamW and, in its metadata, the state as JSON.

One file is replaced as one: a process that is killed leaves the checkpoint before or the one after, never half of each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from dustin_runtime.errors import MissingError
from dustin_runtime.files import atomic_path

MOMENTS = ("exp_avg", "exp_avg_sq")


def save_checkpoint(path: Path, model: nn.Module, optimizer: AdamW, state: dict[str, Any]) -> None:
    """Replace the checkpoint.

    Args:
        state: JSON.
    """
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for moment in MOMENTS:  # absent before the first update
            tensors[f"{moment}.{name}"] = optimizer.state[parameter].get(moment, torch.zeros_like(parameter))
    counts = {float(entry["step"]) for entry in optimizer.state.values() if entry}
    state = state | {"updates": max(counts, default=0.0)}
    with atomic_path(path) as temporary:
        save_file(
            {key: value.contiguous().cpu() for key, value in tensors.items()}, temporary, {"state": json.dumps(state)}
        )


def load_checkpoint(path: Path, model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    """Put weights and moments back in place; returns the state.

    Raises:
        MissingError: the file is damaged, or of another model.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            state: dict[str, Any] = json.loads(opened.metadata()["state"])
            for name, parameter in model.named_parameters():
                with torch.no_grad():
                    parameter.copy_(opened.get_tensor(f"model.{name}"))
                moments = {moment: opened.get_tensor(f"{moment}.{name}").to(parameter.device) for moment in MOMENTS}
                count = torch.tensor(state["updates"], device=parameter.device if _fused(optimizer) else "cpu")
                optimizer.state[parameter] = {"step": count, **moments}
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise MissingError(f"{path}: not a checkpoint of this model ({error}); delete it to begin anew") from None
    return state


def _fused(optimizer: AdamW) -> bool:
    return bool(optimizer.defaults.get("fused"))
