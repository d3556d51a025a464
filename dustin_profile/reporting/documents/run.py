"""What `dustin-run` writes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dustin_profile.reporting.documents.common import Document, Part


class Statistics(Part):
    tau: float
    tokens_per_s: float
    acceptance_per_position: list[float]
    kept_tokens_per_step: float


class Compared(Part):
    method: str
    statistics: Statistics
    rows: int
    equal_rows: int
    common_prefix: float
    equal_tokens: float


class Generated(Part):
    statistics: Statistics
    compare: Compared | None = None


class GenerationSummary(Document):
    kind: Literal["dustin-generation-summary"]
    prompts: int
    prompt_tokens: int
    new_tokens: int
    device: str = ""
    dtype: str = ""
    methods: dict[str, Generated]


class Generation(Document):
    """What `dustin-run generate --json` prints; texts and tokens are left alone."""

    kind: Literal["dustin-generation"]
    method: str
    kv_dtype: str = ""
    """Of the target's cache; of its dtype if empty."""
    budget: int | None = None
    statistics: Statistics
    compare: Compared | None = None


class Roofline(Part):
    device: str
    bytes_per_s: float


class Budgeted(Part):
    budget: int


class BenchRow(Part):
    method: str
    batch: int
    context: int
    budget: int | None = None
    draft_reads: int | str | None = None
    """Tokens of its cache; `all`; None where nothing is drafted."""
    kv_dtype: str = ""
    """Of the target's cache; of its dtype if empty."""
    rule: str = ""
    """A guard, or several budgets, that the method was measured with."""
    tokens_per_s: float
    tau: float
    acceptance_per_position: list[float] = Field(default_factory=list)
    """Share of steps that accept the first draft, the first two, and so on."""
    step_ms: float = Field(gt=0)
    roofline_ms: float
    over_roofline: float
    components_ms: dict[str, float] = Field(default_factory=dict)
    synthetic: list[str] = Field(default_factory=list)
    alpha: float | None = None

    @property
    def how(self) -> str:
        """What sets it apart from other rows of its method: what its draft reads, a cache of 8 bits, a guard."""
        reads = [f"draft reads {self.draft_reads}"] if self.draft_reads else []
        cache = ["8-bit cache"] if self.kv_dtype.startswith("float8") else []
        return ", ".join([*reads, *cache, *([self.rule] if self.rule else [])])


class Bench(Document):
    kind: Literal["dustin-bench"]
    pair: str
    ranks: int = 1
    """Processes that shared the target, each on a device of its own."""
    device: str
    versions: dict[str, str] = Field(default_factory=dict)
    dtype: str = ""
    command: str = ""
    synthetic: list[str] = Field(default_factory=list)
    roofline: Roofline
    selection: Budgeted | None = None
    rows: list[BenchRow] = Field(min_length=1)

    @property
    def devices(self) -> str:
        """What it ran on, and on how many of them."""
        return self.device if self.ranks == 1 else f"{self.ranks} × {self.device}"


class Timed(Part):
    ms: float


class AttentionRow(Part):
    data: str
    workload: str
    best_full: str
    best_full_ms: float
    sparse: Timed
    estimation_ms: float
    sparse_step_ms: float
    speedup: float
    unpacked_ms: float | None = None
    paper_speedup: float | None = None


class AttentionSettings(Part):
    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    budget: int
    depth: int
    dtype: str = ""


class AttentionBench(Document):
    kind: Literal["dustin-bench-attention"]
    device: str
    versions: dict[str, str] = Field(default_factory=dict)
    command: str = ""
    data: str
    timing: str = ""
    settings: AttentionSettings
    notes: list[str] = Field(default_factory=list)
    rows: list[AttentionRow] = Field(min_length=1)


class StageTime(Part):
    """One stage of profiling; fields of other stages are empty."""

    part: Literal["srh", "trace", "search"]
    pair: str
    seconds: float
    side: str = ""
    documents: int = 0
    context: int = 0
    continuation: int = 0
    windows: int = 0
    prompts: int = 0
    longest: int = 0
    mode: str = ""
    budget: int = 0


class ProfileTimes(Document):
    kind: Literal["dustin-profile-time"]
    device: str
    versions: dict[str, str] = Field(default_factory=dict)
    dtype: str = ""
    command: str = ""
    synthetic: list[str] = Field(default_factory=list)
    rows: list[StageTime] = Field(min_length=1)
