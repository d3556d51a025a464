from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from dustin_profile.needles import load_needles
from dustin_profile.prompts import is_answer
from dustin_runtime.errors import ConfigError, MissingError

ENTRY = """
needles:
  - needle: The red door leads to a room full of clocks.
    answer: a room full of clocks
    question: Where does the red door lead?
  - needle: The blue door leads to a pond.
    answer: {answer}
    question: {question}
"""


def test_own_needles_are_many_plain_and_unlike_each_other() -> None:
    needles = load_needles()
    assert len(needles) >= 8
    for needle in needles:
        assert 3 <= len(needle.answer.split()) <= 15
        assert f" {needle.answer}" in needle.needle, "the span would lack the space that tokenizers attach"
        assert not any(character.isdigit() for character in needle.answer)
        assert needle.needle.isascii()
        assert not is_answer(needle.question, needle.answer), "the question gives the answer away"
    for one, other in permutations(needles, 2):
        assert not is_answer(other.needle, one.answer)


def test_file_replaces_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(ENTRY.format(answer="a pond", question="Where does the blue door lead?"))
    assert [needle.answer for needle in load_needles(path)] == ["a room full of clocks", "a pond"]


@pytest.mark.parametrize(
    ("answer", "question", "expected"),
    [
        ("a lake", "Where does it lead?", r"needles\.1\.answer: must stand in the needle"),
        ("o", "Where does it lead?", r"needles\.1\.answer: .*exactly once"),
        ("to a pond.", "Where does it lead?", r"needles\.1\.answer: must begin and end"),
        ('"a\\npond"', "Where does it lead?", r"needles\.1\.answer: must be one line"),
        ("a pond", "Is it A pond?", r"needles\.1\.question: must not contain"),
        ("3", "Where does it lead?", r"needles\.1\.answer: Input should be a valid string"),
        ("a pond", "Where?\n    depth: 3", r"needles\.1\.depth: Extra inputs"),
        ("a pond", "'", r"not YAML"),
        ("!!python/object:os.system {}", "Where?", r"not YAML|needles\.1\.answer"),
    ],
)
def test_bad_entry_is_named(tmp_path: Path, answer: str, question: str, expected: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(ENTRY.format(answer=answer, question=question))
    with pytest.raises(ConfigError, match=expected) as raised:
        load_needles(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["- just\n- a list\n", "needles: []\n", "other: 1\n"])
def test_file_without_needles(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="needles"):
        load_needles(path)


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"none\.yaml"):
        load_needles(tmp_path / "none.yaml")
