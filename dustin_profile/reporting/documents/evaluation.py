"""What `dustin-profile eval` and `drift` write."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dustin_profile.reporting.documents.common import Document, Estimate, Models, Pair, Part, Provenance
from dustin_runtime.config import Selection


class Row(Part):
    """One method, budget and group of items."""

    method: str
    budget: int | None
    group: dict[str, str]
    items: int
    scores: dict[str, Estimate] = Field(min_length=1)
    minus_vanilla: dict[str, Estimate] | None = None
    same_text: int | None = None
    tau: float | None = None
    tokens_read: float | None = None
    tokens_per_s: float | None = None
    prompt_tokens: float | None = None
    new_tokens: float | None = None
    perplexity: float | None = None
    """Of a given text, not the method's own; so are the two below, which are null where it is verified in full."""
    kl: Estimate | None = None
    loss_difference: Estimate | None = None
    tau_by_document: Estimate | None = None
    speed_by_document: Estimate | None = None
    speed_over_vanilla: Estimate | None = None


class Average(Part):
    method: str
    budget: int | None
    tasks: int
    plain: float
    weighted: float
    categories: dict[str, float] = Field(default_factory=dict)


class EvalInputs(Part):
    items: dict[str, Any] = Field(default_factory=dict)
    """What decides the task's items."""
    models: Models
    dtype: str = ""
    device: str = ""
    depth: int = 0
    selection: Selection
    draft_cache: str = "full"


class Evaluation(Document):
    kind: Literal["dustin-eval"]
    version: int = Field(le=1)
    task: str
    pair: Pair
    inputs: EvalInputs
    entries: list[Row] = Field(min_length=1)
    averages: list[Average] = Field(default_factory=list)
    provenance: Provenance = Provenance()

    @property
    def of_books(self) -> bool:
        """Whether given texts are continued, so that perplexity is its measure, rather than questions answered."""
        return any(entry.perplexity is not None for entry in self.entries)

    @property
    def full_perplexity(self) -> float | None:
        """That of full verification, whichever method it is measured with."""
        return next(
            (entry.perplexity for entry in self.entries if entry.perplexity and not entry.loss_difference), None
        )


class FidelityInputs(Part):
    version: int = Field(le=2)
    models: Models
    data_sha256: str = ""
    tokens: int
    depth: int
    selection: Selection
    dtype: str = ""
    device: str = ""
    context: int = 0


class FidelityCell(Part):
    kl: Estimate
    arr: Estimate
    agreement: Estimate
    loss_difference: Estimate
    perplexity: float
    read: float
    kl_median: float | None = None
    """Over the windows of all documents, as is the one below."""
    arr_median: float | None = None
    windows: int | None = None


class FullCell(Part):
    perplexity: float


class Windows(Part):
    """One value per verified window."""

    kl: list[float]
    arr: list[float]


class Measured(Part):
    kl: float
    arr: float
    read: float
    agreement: float | None = None
    windows: Windows | None = None


class FullMeasured(Part):
    loss: float
    read: float


class FidelityDocument(Part):
    id: str
    prompt_tokens: int
    text_tokens: int
    full: FullMeasured
    cells: dict[str, Measured]


class Fidelity(Document):
    kind: Literal["dustin-fidelity"]
    inputs: FidelityInputs
    versions: dict[str, str] = Field(default_factory=dict)
    device: str = ""
    summary: dict[str, FidelityCell | FullCell | float | None]
    documents: list[FidelityDocument] = Field(min_length=1)

    @property
    def cells(self) -> dict[tuple[str, int], FidelityCell]:
        """By method and budget, in the file's order."""
        found = {}
        for name, cell in self.summary.items():
            method, _, budget = name.rpartition("-k")
            if isinstance(cell, FidelityCell) and budget.isdecimal():
                found[method, int(budget)] = cell
        return found

    @property
    def full_perplexity(self) -> float | None:
        full = self.summary.get("full")
        return full.perplexity if isinstance(full, FullCell) else None

    @property
    def correlation(self) -> float | None:
        """Rank correlation of ARR and KL over documents and cells."""
        found = self.summary.get("arr_kl_rank_correlation")
        return found if isinstance(found, float) else None


class SubsetInputs(FidelityInputs):
    subsets: int
    """Of every size and document."""


class Pooled(Part):
    pearson: float | None
    spearman: float | None
    pearson_log: float | None


class Correlations(Part):
    """ARR with KL over the subsets of one size: within documents, and over all points together."""

    subsets: int
    arr: tuple[float, float]
    kl: tuple[float, float]
    pooled: Pooled
    pearson: Estimate | None
    spearman: Estimate | None
    pearson_log: Estimate | None


class Subset(Part):
    budget: int
    arr: float
    kl: float


class SubsetDocument(Part):
    id: str
    text_tokens: int
    subsets: list[Subset]


class Subsets(Document):
    kind: Literal["dustin-subsets"]
    inputs: SubsetInputs
    versions: dict[str, str] = Field(default_factory=dict)
    summary: dict[str, Correlations]
    """By size, and `all`."""
    documents: list[SubsetDocument] = Field(min_length=1)


class DriftInputs(Part):
    version: int = Field(le=1)
    context: int
    tokens: int
    models: Models | None = None
    data_sha256: str = ""
    bucket: int | None = None
    temperature: float | None = None
    batch: int | None = None
    depth: int | None = None
    selection: Selection | None = None
    device: str = ""
    dtype: str = ""


class Bucket(Part):
    tokens: int
    kl: float
    agreement: float


class DriftCell(Part):
    method: str
    budget: int | None
    kl: Estimate
    agreement: Estimate
    by_tokens: list[Bucket] = Field(min_length=1)
    tau: float | None = None
    read: float | None = None
    repeated: float | None = None


class DriftDocument(Part):
    id: str
    prompt_tokens: int


class Drift(Document):
    kind: Literal["dustin-drift"]
    inputs: DriftInputs
    versions: dict[str, str] = Field(default_factory=dict)
    summary: dict[str, DriftCell] = Field(min_length=1)
    documents: list[DriftDocument] = Field(min_length=1)

    @property
    def budgets(self) -> list[int]:
        """The largest first."""
        return sorted({cell.budget for cell in self.summary.values() if cell.budget is not None}, reverse=True)

    @property
    def budget(self) -> int | None:
        """The one to show where there is room for one: the config's own, or the middle one; None if there is none."""
        own = self.inputs.selection.budget if self.inputs.selection else None
        return own if own in self.budgets else self.budgets[len(self.budgets) // 2] if self.budgets else None

    def at(self, budget: int | None) -> list[DriftCell]:
        """Of one budget, or of the methods that have none; best first."""
        return sorted((cell for cell in self.summary.values() if cell.budget == budget), key=lambda cell: cell.kl.mean)
