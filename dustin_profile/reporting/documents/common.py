"""Parts that several kinds of files share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Part(BaseModel):
    """Base of all parts: numbers are finite, unknown fields are somebody else's."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Estimate(Part):
    """A mean over documents with its 95 % interval, which is absent for a single document."""

    mean: float
    low: float | None = None
    high: float | None = None
    method: str = "none"
    documents: int = 0

    @property
    def negated(self) -> Estimate:
        """The same difference the other way round."""
        low, high = (None if end is None else -end for end in (self.high, self.low))
        return self.model_copy(update={"mean": -self.mean, "low": low, "high": high})


class ModelId(Part):
    id: str
    revision: str | None = None
    sha256: str | None = None


class ModelShape(Part):
    id: str
    layers: int = 0
    query_heads: int = 0
    kv_heads: int = 0


class Pair(Part):
    target: ModelShape
    draft: ModelShape


class Models(Part):
    target: ModelId
    draft: ModelId


class Document(Part):
    """A result file. `kind` tells which."""

    kind: str


class Provenance(Part):
    target: ModelId | None = None
    draft: ModelId | None = None
    data: str = ""
    data_sha256: str = ""
    seed: int | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    device: str = ""
    arguments: dict[str, Any] = Field(default_factory=dict)
    stage_seconds: dict[str, float] = Field(default_factory=dict)
