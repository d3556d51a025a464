"""The interface of a section: one module of `sections` each, one line in its list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dustin_profile.reporting.blocks import Content
from dustin_profile.reporting.sources import Evidence


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        key: anchor on the page; its figures' names begin with it.
        command: what would produce its data, for readers of a report without them; empty if it rests on other sections.
        build: None if the evidence has nothing for it.
    """

    key: str
    title: str
    command: str
    build: Callable[[Evidence], Content | None]
