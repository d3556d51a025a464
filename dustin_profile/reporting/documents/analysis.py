"""What `dustin-profile eval arr`, `stability` and `overhead` write."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dustin_profile.reporting.documents.common import Document, Estimate, Pair, Part, Provenance
from dustin_profile.reporting.documents.search import Traces
from dustin_runtime.config import Selection


class AtBudget(Part):
    policy: str
    budget: int
    read: float
    arr: Estimate
    below_oracle: Estimate | None = None


class Group(Part):
    """One group of documents with the split of the budget that would suit it best."""

    group: str
    documents: int
    m: int
    best_m: int
    arr: dict[str, Estimate]
    minus_dustin: dict[str, Estimate]


class AtDistance(Part):
    """History of some tokens ago."""

    rule: str
    distance: int
    budget: int
    arr: Estimate
    below_oracle: Estimate | None = None


class ForcedPass(Part):
    device: str = ""
    dtype: str = ""


class Recovery(Document):
    kind: Literal["dustin-arr"]
    version: int = Field(le=1)
    pair: Pair
    selection: Selection
    depth: int
    split: str
    traces: list[Traces] = Field(default_factory=list)
    documents: dict[str, object] = Field(min_length=1)
    budgets: list[AtBudget] = Field(default_factory=list)
    splits: list[Group] = Field(default_factory=list)
    layers: dict[str, list[Estimate]] | None = None
    distances: list[AtDistance] | None = None
    """These and `layers` take a pass over the documents: null from traces alone."""
    forced_pass: ForcedPass | None = None
    provenance: Provenance = Provenance()

    @property
    def device(self) -> str:
        return self.forced_pass.device if self.forced_pass else ""


class Agreement(Part):
    top4_overlap: Estimate
    kendall_tau: Estimate


class OfSize(Agreement):
    needles: int
    prompts: int


class Between(Agreement):
    first: str | int | float
    second: str | int | float


class Rankings(Part):
    """How well rankings of one model agree that were measured in different ways."""

    model: str
    needles: int
    prompts: int
    chance_overlap: float
    sizes: list[OfSize] = Field(default_factory=list)
    lengths: list[Between] = Field(default_factory=list)
    depths: list[Between] = Field(default_factory=list)
    runs: list[Between] = Field(default_factory=list)


class Stabilities(Document):
    kind: Literal["dustin-stability"]
    version: int = Field(le=1)
    target: Rankings | None = None
    draft: Rankings | None = None
    provenance: Provenance = Provenance()

    @property
    def sides(self) -> list[tuple[str, Rankings]]:
        return [(name, side) for name, side in (("target", self.target), ("draft", self.draft)) if side]


class Timing(Part):
    ms: float
    min_ms: float = Field(gt=0)


class FullTiming(Timing):
    kernel: str


class Estimator(Timing):
    of_full: float
    of_sparse_step: float


class OverheadRow(Part):
    context: int
    full: FullTiming
    sparse: Timing
    estimators: dict[str, Estimator] = Field(min_length=1)


class OverheadInputs(Part):
    pair: Pair
    selection: Selection
    depth: int
    batch: int
    device: str = ""
    dtype: str = ""


class Overhead(Document):
    kind: Literal["dustin-overhead"]
    version: int = Field(le=1)
    data: str
    inputs: OverheadInputs
    timing: str = ""
    rows: list[OverheadRow] = Field(min_length=1)
    provenance: Provenance = Provenance()
