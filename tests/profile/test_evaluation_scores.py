"""How evaluated texts are judged: hand-checked texts with prose, wrong extras and odd forms around the answers."""

from __future__ import annotations

import pytest

from dustin_profile.evaluation.mentions import numbers, variables
from dustin_profile.evaluation.needle import NeedleGrid
from dustin_profile.evaluation.recall import Recall
from dustin_profile.evaluation.tasks import Item

A, B, C, D = "123456", "234567", "345678", "456789"
X, Y, Z, OTHER = "TOLIN", "MARAD", "GUDOK", "BIVAN"
THIRD = pytest.approx(1 / 3)
TWO_THIRDS = pytest.approx(2 / 3)


def recall_item(kind: str, wanted: list[str], others: list[str]) -> Item:
    group = {"kind": kind, "length": "512"}
    return Item("id", "part-0", [1], 8, (), group, {"wanted": wanted, "others": others})


def scored(kind: str, wanted: list[str], others: list[str], text: str) -> tuple[float, float, float]:
    task = object.__new__(Recall)  # judging needs no prompts
    figures = task.score(recall_item(kind, wanted, others), text)
    assert list(figures) == ["recalled", "precision", "exact"], "the first is the headline"
    assert all(0 <= figure <= 1 for figure in figures.values())
    return tuple(figures.values())  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 123456", (1, 1, 1)),
        (" **123,456**", (1, 1, 1)),
        (" one of the 4 numbers, 2) 123456!", (1, 1, 1)),
        (" 123456, or 234567", (1, 0.5, 0)),
        (" 123456123456", (0, 0, 0)),
        (" 0123456", (0, 0, 0)),
        (" 12345", (0, 0, 0)),
        (" 123456 (123456, I repeat: #123456)", (1, 1, 1)),
        (" not given", (0, 0, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_multi_key(text: str, expected: tuple[float, float, float]) -> None:
    assert scored("multi-key", [A], [B, C], text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The values are 123456, 234567 and 345678.", (1, 1, 1)),
        (" 345678,234567,123456", (1, 1, 1)),
        (" 123,456, 234,567, and 345,678", (1, 1, 1)),
        ("\n- 123456\n- 234567\n", (TWO_THIRDS, 1, 0)),
        (" 123456, 234567, 345678 and 456789", (1, 0.75, 0)),
        (" 123456, 123456, 123456", (THIRD, 1, 0)),
        (" 123456, 999999, 23456", (THIRD, THIRD, 0)),
        (" 456789", (0, 0, 0)),
    ],
)
def test_multi_value(text: str, expected: tuple[float, float, float]) -> None:
    assert scored("multi-value", [A, B, C], [D], text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 123456, 234567 and 345678, respectively", (1, 1, 1)),
        (" 234567, 123456 and 345678", (1, 1, 0)),
        (" the barrel's is 123456, that of the 2 herons 234567; 345678", (1, 1, 1)),
        (" 123456, 234567", (TWO_THIRDS, 1, 0)),
        (" 123456, 456789, 234567, 345678", (1, 0.75, 0)),
        ("?", (0, 0, 0)),
    ],
)
def test_multi_query(text: str, expected: tuple[float, float, float]) -> None:
    assert scored("multi-query", [A, B, C], [D], text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" TOLIN, MARAD and GUDOK", (1, 1, 1)),
        (" 'Gudok', `marad`, TOLIN's", (1, 1, 1)),
        (" all those whose VALUE is 123456: TOLIN_MARAD", (TWO_THIRDS, 1, 0)),
        (" TOLIN, BIVAN", (THIRD, 0.5, 0)),
        (" TOLIN, KOKOK", (THIRD, 0.5, 0)),
        (" TOLINMARAD", (0, 0, 0)),
        (" 123456", (0, 0, 0)),
    ],
)
def test_variable_tracking(text: str, expected: tuple[float, float, float]) -> None:
    assert scored("variable-tracking", [X, Y, Z], [OTHER], text) == expected


def test_mentions_are_distinct_and_in_order() -> None:
    assert numbers("9 and 345678; 123,456 and 345678, 1,234,567, 12 ٣٤٥") == [C, A, "1234567"]
    assert variables("Marad TOLIN marad KOKOK kokok", {X, Y}) == [Y, X, "KOKOK"]


@pytest.mark.parametrize(
    ("text", "found", "share"),
    [
        (" Cold nettle tea, with pepper.", 1, 1),
        ("\n\nIt is tea with pepper", 1, 0.6),
        ("\n\nThe answer is:\n\nCold nettle tea with\npepper.\n\nThe answer is:", 1, 1),
        (" tea and pepper", 0, 0.4),
        (" tea tea tea tea tea", 0, 0.2),
        (" I do not know", 0, 0),
        ("", 0, 0),
    ],
)
def test_needle(text: str, found: float, share: float) -> None:
    item = Item("id", "needle-0", [1], 8, (), {}, "cold nettle tea with pepper")
    figures = object.__new__(NeedleGrid).score(item, text)
    assert figures == {"found": found, "recall": share}
    assert next(iter(figures)) == "found"
