"""What `dustin-profile search` and `srh` write."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dustin_profile.reporting.documents.common import Document, Estimate, ModelId, Models, Pair, Part, Provenance
from dustin_runtime.config import Selection


class Traces(Part):
    data: str
    data_sha256: str = ""
    context: int
    continuation: int = 0
    dtype: str = ""
    models: Models | None = None


class Traced(Part):
    source: str
    windows: int


class Documents(Part):
    search: dict[str, Traced]
    reported: dict[str, Traced]


class PolicyArr(Part):
    arr: Estimate
    prefix_arr: Estimate
    in_sample_arr: float


class ChosenM(Part):
    chosen: int
    sampler: str = ""
    trials: int = 0
    interval: tuple[int, int] | None = None
    flat: tuple[int, int]
    curve: list[float]
    """ARR at m = 0, 1, ..."""

    @model_validator(mode="after")
    def _on_the_curve(self) -> ChosenM:
        if not 0 <= self.chosen < len(self.curve):
            raise ValueError(f"chosen is {self.chosen}, and the curve has {len(self.curve)} values")
        return self


class Layers(Part):
    target_history_arr: list[float | None]
    draft_rounds_arr: list[list[float | None]]


class Candidate(Part):
    budget: int
    m: int
    draft_layers: list[int]
    depth: int
    draft_cache: str
    step_ms: float
    arr: Estimate
    assumed_arr: bool
    tau: Estimate
    tokens_per_s: Estimate


class Timing(Part):
    device: str
    dtype: str
    max_relative_error: float


class TimedStep(Part):
    depth: int
    budget: int
    windowed: bool
    layers: int
    """Of the draft, that are scored."""
    history: bool
    ms: float = Field(gt=0)
    predicted_ms: float
    fitted: bool


class Served(Part):
    batch: int
    context: int


class Latency(Timing, Document):
    """Steps timed on a device, and what the model of their time that was fitted to most of them says of each."""

    kind: Literal["dustin-latency"]
    version: int = Field(le=1)
    inputs: Served
    measurements: list[TimedStep] = Field(min_length=1)


class Throughput(Part):
    batch: int
    context: int
    chosen: int
    front: list[int]
    """Indices of candidates."""
    candidates: list[Candidate]
    latency: Timing

    @model_validator(mode="after")
    def _named(self) -> Throughput:
        if wrong := [index for index in (self.chosen, *self.front) if not 0 <= index < len(self.candidates)]:
            raise ValueError(f"candidate {wrong[0]} is named, and there are {len(self.candidates)}")
        return self


class SearchResults(Document):
    kind: Literal["dustin-results"]
    version: int = Field(le=1)
    pair: Pair
    traces: Traces
    depth: int
    selection: Selection
    split: str
    documents: Documents
    policies: dict[str, PolicyArr]
    hybrid_minus: dict[str, Estimate]
    m: ChosenM
    layers: Layers
    heads: dict[str, dict[int, list[int]]] = Field(default_factory=dict)
    throughput: Throughput | None = None
    """Of a search for it."""
    provenance: Provenance = Provenance()


class HeadInputs(Part):
    model: ModelId
    mode: str = ""


class Stability(Part):
    top4_overlap: float
    kendall_tau: float


class Heads(Document):
    kind: Literal["dustin-heads"]
    side: Literal["target", "draft"]
    inputs: HeadInputs
    samples: int
    accepted: int
    ranking: list[list[int]] = Field(min_length=1)
    scores: list[list[float]] = Field(min_length=1)
    stability: Stability | None = None

    @model_validator(mode="after")
    def _one_table(self) -> Heads:
        if len({len(layer) for layer in self.scores}) > 1 or len(self.ranking) != len(self.scores):
            raise ValueError("scores: not as many in every layer, or not as many layers as ranking has")
        return self
