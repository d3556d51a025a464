"""LongBench's metrics: one text against one reference, in [0, 1]. Oddities that decide its published numbers are kept.

ROUGE-L is that of the package `rouge`, which LongBench uses: it splits at full stops and counts distinct words, so
other implementations give other numbers. Code is compared as fuzzywuzzy does without python-Levenshtein (LongBench's
requirements name the former only): Python's own difflib, rounded to a hundredth.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from importlib.util import find_spec

from dustin_profile.evaluation.longbench.table import MetricName
from dustin_runtime.errors import MissingError

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"\d+")
PARAGRAPH = re.compile(r"Paragraph (\d+)")
"""What a reference of the metric `retrieval` holds."""
_NO_CODE = ("`", "#", "//")
"""A line with one of these is markup or a comment."""

Metric = Callable[[str, str, Sequence[str]], float]
"""(text, reference, all classes of the task) -> score."""


def f1(text: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Harmonic mean of the precision and recall of words: lower case, without ASCII punctuation and articles."""
    said, wanted = _words(text), _words(reference)
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def _words(text: str) -> list[str]:
    # Punctuation goes before articles: "a.b" is the word "ab", and "the-" an article.
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def rouge_l(text: str, reference: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L F of the package `rouge`; 0 where it gives up, as LongBench has it.

    It gives up on a text or reference of full stops alone, and on sentences of about 500 words each, in which it
    recurses once a word.
    """
    from rouge import Rouge

    try:
        (found,) = Rouge(metrics=["rouge-l"], stats=["f"]).get_scores(text, reference)
    except (ValueError, RecursionError):
        return 0.0
    return float(found["rouge-l"]["f"])


def classification(text: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (classes named in the text) if the right one is among them.

    A class whose name is a part of the reference's does not count, except, as in LongBench's loop, one that stands
    right behind another such class.
    """
    named = [name for name in classes if name in text]
    place = 0
    while place < len(named):
        if named[place] != reference and named[place] in reference:
            del named[place]
        place += 1  # past what has moved up, too
    return 1 / len(named) if reference in named else 0.0


def count(text: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the text that are the reference, digit by digit."""
    numbers = _NUMBER.findall(text)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(text: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the text that are the reference's paragraph.

    Raises:
        MissingError: the reference names none.
    """
    if not (paragraph := PARAGRAPH.search(reference)):
        raise MissingError(f"reference '{reference[:40]}': names no paragraph, as in 'Paragraph 7'")
    return count(text, paragraph[1])


def edit_similarity(text: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Similarity of the first line of code, none of markup or comment, and the reference."""
    lines = text.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in _NO_CODE)), "")
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100


METRICS: dict[MetricName, Metric] = {
    "f1": f1,
    "rouge_l": rouge_l,
    "classification": classification,
    "count": count,
    "retrieval": retrieval,
    "edit_similarity": edit_similarity,
}


def require_installed(metric: MetricName, task: str) -> None:
    """Refuse before any work a metric whose package is absent.

    Raises:
        MissingError: says how to install it.
    """
    if metric == "rouge_l" and find_spec("rouge") is None:
        raise MissingError(f"task {task}: its metric needs the package rouge: pip install 'dustin[longbench]'")
