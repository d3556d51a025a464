"""`dustin-profile env`: what a bug report needs."""

from __future__ import annotations

import json

from dustin_profile.cli.options import Json


def env(as_json: Json = False) -> None:
    """Print versions and device, for bug reports."""
    import os
    import platform

    import torch

    from dustin_profile.provenance import device_name, versions
    from dustin_runtime.loading import pick_device

    facts: dict[str, object] = {"platform": platform.platform(), "cores": os.cpu_count()}
    facts.update(versions())
    facts["device"] = device_name(pick_device("auto"))
    facts["cuda"] = torch.version.cuda
    if as_json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            print(f"{name:12} {value}")
