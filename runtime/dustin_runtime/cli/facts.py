"""What has to be the same on all ranks of a run, for their numbers to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dustin_runtime.config import DustinConfig


def facts(
    given: Mapping[str, object],
    prompts: Sequence[Sequence[int]] | None,
    served: DustinConfig | None,
    origins: Mapping[str, Mapping[str, object]],
    device: str,
) -> dict[str, object]:
    """For `Ranks.agree`: by the name that an error says, those first that a user can change at once.

    Args:
        given: the command's options, by their names in Python.
        origins: of `target` and `draft`, what makes them the models that they are.
    """
    import torch

    found: dict[str, object] = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    config = served.model_dump(mode="json", exclude={"evidence", "provenance"}) if served else {}
    for name, part in config.items():
        entries = {f"{name}.{key}": value for key, value in part.items()} if isinstance(part, dict) else {name: part}
        found |= {f"the config's {key}": value for key, value in entries.items()}
    found["prompts"] = prompts
    for side, origin in origins.items():
        found |= {f"the {side}'s {key}": value for key, value in origin.items()}
    found["torch"] = torch.__version__
    found["device"] = torch.cuda.get_device_name(device) if device != "cpu" else device
    return found
