"""`dustin-profile drift`: KL against full verification as generation goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dustin_profile.cli.options import Json, Quiet, begin, with_settings
from dustin_profile.settings import ModelSettings


@with_settings(models=ModelSettings)
def drift(
    config: Annotated[Path, typer.Argument(help="Emitted YAML, or the run directory that holds it.")],
    models: ModelSettings,
    data: Annotated[str, typer.Option(help="Documents, as for search.")] = "topics",
    context: Annotated[int, typer.Option(min=2, help="Tokens of every prompt.")] = 2048,
    documents: Annotated[int, typer.Option(min=1, help="Prompts.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 256,
    bucket: Annotated[int, typer.Option(min=1, help="Tokens per row of the table.")] = 32,
    method: Annotated[list[str] | None, typer.Option(help="Method; repeat for several. Default: dustin.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the curves as a PNG.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure how far generation drifts from full verification: KL and agreement by tokens generated."""
    from dustin_profile import progress
    from dustin_profile.check import open_models
    from dustin_profile.drift import by_tokens, measure
    from dustin_profile.provenance import device_name, versions
    from dustin_profile.settings import DataSettings
    from dustin_profile.traces.stage import calibration
    from dustin_runtime.loading import pick_device, pick_dtype
    from dustin_runtime.policies import make_policy
    from dustin_runtime.step import Stepper

    served = begin(config, models, quiet)
    policies = [make_policy(name, served.selection) for name in method or ["dustin"]]
    pair = open_models(served, models)
    settings = DataSettings(data=data, context=context, documents=documents, continuation=tokens)
    prompts = calibration(pair, settings, models.offline, "--context with --tokens").prompts
    device = pick_device(models.device)
    target = pair.load_target(pick_dtype(models.dtype, device), device)
    draft = pair.load_draft(target)
    results: dict[str, dict[str, object]] = {}
    curves: dict[str, tuple[list[float], list[float]]] = {}
    with progress.progress("drift", len(policies) * len(prompts)) as advance:
        for policy in policies:
            stepper = Stepper(target, draft, policy, policy.selection, served.depth, pair.shared_vocab)
            found = []
            for prompt in prompts:
                found.append(measure(stepper, prompt.ids, tokens))
                advance(1)
            rows = by_tokens(found, bucket)
            results[policy.name] = {
                "by_tokens": [{"tokens": t, "kl": kl, "agreement": share} for t, kl, share in rows],
                "mean_kl": float(sum(x.kl.mean() for x in found) / len(found)),
                "documents": {
                    prompt.id: [kl for _, kl, _ in by_tokens([x], bucket)]
                    for prompt, x in zip(prompts, found, strict=True)
                },
            }
            curves[policy.name] = ([float(t) for t, _, _ in rows], [kl for _, kl, _ in rows])
    if plot:
        from dustin_profile.plots import drift_curves

        drift_curves(plot, curves, "KL(full || method), nats")
    if as_json:
        document = {
            "kind": "dustin-drift",
            "pair": pair.identity().model_dump(),
            "depth": served.depth,
            "selection": served.selection.model_dump(mode="json"),
            "context": context,
            "methods": results,
            "versions": versions(),
            "device": device_name(device),
        }
        print(json.dumps(document))
    else:
        from dustin_profile.cli.tables import drift_table

        drift_table(results)
