"""What the studies in `tools/` write: cells, which are methods with a budget and settings, of every document."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field, model_validator

from dustin_profile.reporting.documents.common import Document, Models, Part
from dustin_runtime.config import Selection

C = TypeVar("C", bound=Part)
CellName = Annotated[str, Field(pattern=r"^\S.* k[1-9]\d*$")]
"""Method, settings and budget, such as `dustin-rest rest {"queries": 8} k250`."""


class StudyTexts(Part):
    """What documents are made of, and what they are verified with."""

    version: int = Field(le=1)
    models: Models
    data_sha256: str = ""
    """Older files do not have it."""
    tokens: int
    context: int
    depth: int
    selection: Selection
    device: str = ""
    dtype: str = ""


class StudyDocument(Part, Generic[C]):
    id: str
    source: str = ""
    kind: str = ""
    cells: dict[str, C] = Field(min_length=1)

    @property
    def group(self) -> str:
        """What kind of text it is: as said, or the name of the file that it is from."""
        return self.kind or PurePath(self.source).stem


class StudyCell(Part):
    kl: float
    agreement: float
    read: float
    places: list[float] = Field(default_factory=list)
    """KL of every place in a step. Older files do not have it."""


class Study(Document):
    versions: dict[str, str] = Field(default_factory=dict)

    @property
    def made_of(self) -> StudyTexts:
        """What its documents are made of, of several texts the first."""
        raise NotImplementedError

    @property
    def device(self) -> str:
        return self.made_of.device


T = TypeVar("T", bound=StudyTexts)
D = TypeVar("D", bound=StudyDocument[Any])


class PlainStudy(Study, Generic[T, D]):
    """One whose documents are all made of the same."""

    inputs: T
    documents: list[D] = Field(min_length=1)

    @property
    def texts(self) -> list[tuple[T, D]]:
        """Every document with what it was made of."""
        return [(self.inputs, one) for one in self.documents]

    @property
    def made_of(self) -> StudyTexts:
        return self.inputs


class ListDocument(StudyDocument[StudyCell]):
    cells: dict[CellName, StudyCell] = Field(min_length=1)


class ListStudy(PlainStudy[StudyTexts, ListDocument]):
    kind: Literal["dustin-study-lists"]


class SplitDocument(ListDocument):
    data: int = Field(ge=0)
    """Which of the study's texts."""


class SplitInputs(Part):
    texts: list[StudyTexts] = Field(min_length=1)


class SplitStudy(Study):
    kind: Literal["dustin-study-splits"]
    inputs: SplitInputs
    documents: list[SplitDocument] = Field(min_length=1)

    @model_validator(mode="after")
    def _texts_are_there(self) -> SplitStudy:
        for number, one in enumerate(self.documents):
            if one.data >= len(self.inputs.texts):
                known = len(self.inputs.texts)
                raise ValueError(f"documents.{number}.data: {one.data}, and the length of inputs.texts is {known}")
        return self

    @property
    def texts(self) -> list[tuple[StudyTexts, SplitDocument]]:
        """Every document with what it was made of."""
        return [(self.inputs.texts[one.data], one) for one in self.documents]

    @property
    def made_of(self) -> StudyTexts:
        return self.inputs.texts[0]


class TellsStep(Part):
    """What a step's KL is beside, see `tools/study_tells.py`."""

    kl: float = Field(ge=0)
    estimate: float
    unread: float
    rest: float
    drafted: float
    served: float
    apart: float


class TellsCell(Part):
    steps: list[TellsStep] = Field(min_length=1)


class TellsStudy(PlainStudy[StudyTexts, StudyDocument[TellsCell]]):
    """Of every step its KL and what might tell it, see `evaluation.tells`."""

    kind: Literal["dustin-study-tells"]


class GuardCell(Part):
    """KL of every token and, as its mean, of every step; which steps were verified in full, where any could be."""

    agreement: float
    read: float
    tokens: list[float] = Field(min_length=1)
    kl: list[float] = Field(min_length=1)
    full: list[int] = Field(default_factory=list)


class GuardInputs(StudyTexts):
    method: str
    budget: int


class GuardStudy(PlainStudy[GuardInputs, StudyDocument[GuardCell]]):
    kind: Literal["dustin-study-guard"]
