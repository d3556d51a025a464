"""Every metric on texts that are easy to get wrong; values are worked out by hand beside them."""

from __future__ import annotations

import pytest

from dustin_profile.evaluation.longbench import metrics
from dustin_profile.evaluation.longbench.metrics import (
    classification,
    count,
    edit_similarity,
    f1,
    require_installed,
    retrieval,
    rouge_l,
)
from dustin_runtime.errors import MissingError


@pytest.mark.parametrize(
    ("text", "reference", "score"),
    [
        ("The cat sat on the mat.", "a cat on the mat", 6 / 7),  # cat sat on mat | cat on mat: 2 * 3 / (4 + 3)
        ("", "yes", 0),
        ("The, a; an!", "the", 0),  # no word is left on either side
        ("the U.S.A.", "usa", 1),  # full stops vanish, they do not part words
        ("no no no", "no", 0.5),  # the reference has one of the three: 2 * 1 / (3 + 1)
        ("well-known man", "well known man", 0.4),  # wellknown man | well known man: 2 * 1 / (2 + 3)
        ("theatre", "the atre", 0),  # an article is a whole word
        ("12.5%", "125", 1),  # sic
        ("Paris\n\nLondon", "london paris", 1),  # order and line breaks do not matter
        ("\u2018yes\u2019", "yes", 0),  # only ASCII punctuation goes
    ],
)
def test_f1(text: str, reference: str, score: float) -> None:
    assert f1(text, reference) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "reference", "score"),
    [
        ("the cat sat", "the cat sat", 1),
        ("a b c d", "a x c d", 0.75),  # a c d of 4 and of 4
        ("b a", "a b", 0.5),  # one word in order: 1/2 and 1/2
        ("a a a a", "a b", 2 / 3),  # distinct words: 1 of 1 and 1 of 2: 2 * 1 * 0.5 / 1.5
        ("a b. c d.", "a b c d", 1),  # the parts found by both sentences together
        ("c d. a b.", "a b c d", 1),  # so their order does not matter
        ("Cat, sat", "cat sat", 0.5),  # case and commas count: sat alone
        ("a\n\nb", "a b", 1),
        ("", "a", 0),
        ("...", "a", 0),  # the package raises ValueError
        (" ".join(f"w{number}" for number in range(1100)), "w0", 0),  # it recurses 1100 deep; else 2 / 1101
    ],
)
def test_rouge_l(text: str, reference: str, score: float) -> None:
    pytest.importorskip("rouge")
    assert rouge_l(text, reference) == pytest.approx(score, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "reference", "classes", "score"),
    [
        ("Type: City", "City", ["City", "Country"], 1),
        ("City or Country", "City", ["City", "Country"], 0.5),
        ("group person", "group person", ["person", "group person"], 1),  # person is a part of the right name
        ("group person", "person", ["person", "group person"], 0.5),  # but not the other way round
        ("group person", "group person", ["group", "person", "group person"], 0.5),  # person stands behind group
        ("title person", "animal", ["person", "title person", "animal"], 0),
        ("Animal", "animal", ["animal"], 0),  # case counts
        ("", "animal", ["animal"], 0),
    ],
)
def test_classification(text: str, reference: str, classes: list[str], score: float) -> None:
    assert classification(text, reference, classes) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("There are 12.", 1),
        ("5 or 12", 0.5),
        ("", 0),
        ("twelve", 0),
        ("012", 0),  # compared as text
        ("12, 12 or 3", 2 / 3),
        ("3.12", 0.5),  # two numbers
        ("120", 0),
    ],
)
def test_count(text: str, score: float) -> None:
    assert count(text, "12") == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Paragraph 7", 1),
        ("7", 1),
        ("Paragraph 17", 0),
        ("Paragraph 7, not Paragraph 3", 0.5),
        ("paragraph 7.7.7", 1),  # 3 of 3
        ("Paragraph seven", 0),
        ("", 0),
    ],
)
def test_retrieval(text: str, score: float) -> None:
    assert retrieval(text, "Paragraph 7") == score


def test_a_reference_without_a_paragraph_is_refused() -> None:
    with pytest.raises(MissingError, match="names no paragraph"):
        retrieval("7", "seven")


@pytest.mark.parametrize(
    ("text", "reference", "score"),
    [
        ("x = 1", "x = 1", 1),
        ("\n\nx = 1\ny = 2", "x = 1", 1),  # the first line
        ("# one\n```python\nx = 1 // no\nx = 1\n```", "x = 1", 1),  # the first that is code
        ("c = a//b\nd", "d", 1),  # sic: a division is taken for a comment
        ("x = 2", "x = 1", 0.8),  # "x = ": 2 * 4 / (5 + 5)
        ("abc", "abd", 0.67),  # 2 * 2 / 6, rounded
        ("# a\n// b", "x", 0),
        ("  \nx", "x", 0),  # a line of spaces is the first one
        ("", "", 1),
        ("LLLpqrst", "p.q.r.s.tLLL", 0.3),  # the longest block LLL, nothing beside it: 2 * 3 / 20, not p q r s t
    ],
)
def test_edit_similarity(text: str, reference: str, score: float) -> None:
    assert edit_similarity(text, reference) == pytest.approx(score)


def test_an_absent_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(MissingError, match=r"task qmsum: .* rouge: pip install 'dustin\[longbench\]'"):
        require_installed("rouge_l", "qmsum")
    require_installed("f1", "qasper")
