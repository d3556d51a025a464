"""Where every number came from: file and hash, command, device, versions, data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dustin_profile.reporting.blocks import Block, Bullets, Cell, Code, Content, Heading, Row, Table
from dustin_profile.reporting.documents import MADE_BY
from dustin_profile.reporting.documents.common import ModelId, Provenance
from dustin_profile.reporting.documents.evaluation import Drift, Evaluation, Fidelity, Subsets
from dustin_profile.reporting.documents.search import SearchResults
from dustin_profile.reporting.documents.studies import Study
from dustin_profile.reporting.section import Section
from dustin_profile.reporting.sources import Evidence, Source
from dustin_runtime.config import DustinConfig

SHOWN = 12
"""Hex digits of a hash that tell files apart."""


def build(evidence: Evidence) -> Content | None:
    if not evidence.sources:
        return None
    sources = evidence.sources
    files = Bullets([_said(source) for source in sources], [f"{source.name}:" for source in sources])
    blocks: list[Block] = [Heading("Files"), files, Heading("Versions"), _versions(sources)]
    if models := _models(evidence):
        head = ("model", "revision", "SHA-256")
        note = "A model's hash covers its headers and samples of its weights; it is not that of a file."
        blocks.append(Table("Models", head, models, note, frozenset(range(3))))
    if said := list(_arguments(evidence)):
        blocks.append(Heading("Settings that are not defaults"))
        blocks += said
    return Content("What the report was made from. Nothing in it was entered by hand.", blocks)


def _said(source: Source[Any]) -> str:
    data = source.data
    origin = provenance(data)
    inputs = getattr(data, "inputs", None)
    kind = "dustin-profile search" if isinstance(data, DustinConfig) else MADE_BY.get(data.kind, f"hand ({data.kind})")
    if isinstance(data, Evaluation):
        kind += f" {data.task}"
    device = origin.device or getattr(data, "device", "") or getattr(inputs, "device", "")
    hashed = origin.data_sha256 or getattr(inputs, "data_sha256", "")
    parts = [
        f"made by {kind}",
        device or "device not recorded",
        f"data {origin.data} {hashed[:SHOWN]}".replace("  ", " ").strip() if hashed else "",
        f"seed {origin.seed}" if origin.seed is not None else "",
        f"SHA-256 {source.sha256[:SHOWN]}…",
    ]
    return "; ".join(part for part in parts if part)


def _versions(sources: Sequence[Source[Any]]) -> Bullets:
    """Every set of versions once, with the files that it made."""
    files: dict[str, list[str]] = {}
    for source in sources:
        found = provenance(source.data).versions or getattr(source.data, "versions", {})
        said = ", ".join(f"{name} {version}" for name, version in found.items())
        files.setdefault(said or "not recorded", []).append(source.name)
    return Bullets(list(files), [f"{', '.join(names)}:" for names in files.values()])


def provenance(data: Any) -> Provenance:
    """What a document says about its origin, in whichever place it does."""
    found = getattr(data, "provenance", None)
    if isinstance(found, Provenance):
        return found
    return Provenance.model_validate(found) if isinstance(found, dict) and found else Provenance()


def _models(evidence: Evidence) -> list[Row]:
    found: dict[tuple[str, str | None], ModelId] = {}
    for source in evidence.sources:
        for model in models_of(source.data):
            found.setdefault((model.id, model.sha256), model)
    return [
        Row([Cell(model.id), Cell(model.revision or "local"), Cell(model.sha256 or "not recorded")])
        for model in found.values()
    ]


def models_of(data: Any) -> list[ModelId]:
    """The models that a document is of, as far as it tells their hashes."""
    origin = provenance(data)
    found = [origin.target, origin.draft]
    if isinstance(data, SearchResults) and data.traces.models:
        found += [data.traces.models.target, data.traces.models.draft]
    if isinstance(data, Fidelity | Evaluation | Subsets | Drift) and data.inputs.models:
        found += [data.inputs.models.target, data.inputs.models.draft]
    if isinstance(data, Study):
        found += [data.made_of.models.target, data.made_of.models.draft]
    return [model for model in found if model]


def _arguments(evidence: Evidence) -> Iterator[Code]:
    for source in evidence.of(SearchResults):
        if arguments := source.data.provenance.arguments:
            yield Code(f"# {source.name}\ndustin-profile search {' '.join(options(arguments))}")


def options(arguments: dict[str, Any]) -> Iterator[str]:
    """Recorded settings as they would be given; paths were recorded by their last part."""
    from dataclasses import fields

    from dustin_profile.settings import (
        DataSettings,
        HeadSettings,
        ModelSettings,
        ObjectiveSettings,
        SearchSettings,
        StepSettings,
    )

    groups = (ModelSettings, HeadSettings, DataSettings, SearchSettings, ObjectiveSettings, StepSettings)
    flags = {
        field.name: field.metadata["flag"] or field.name.replace("_", "-")
        for group in groups
        for field in fields(group)
    }
    for name, value in arguments.items():
        flag = f"--{flags.get(name, name.replace('_', '-'))}"
        if value is True:
            yield flag
        elif isinstance(value, list):
            yield from (f"{flag} {one}" for one in value)
        elif value is not None and value is not False:
            yield f"{flag} {value}"


SECTION = Section("provenance", "Provenance", "", build)
