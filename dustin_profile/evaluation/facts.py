"""Generated facts and a question about them: unguessable answers, found nowhere but in the facts.

The kinds follow RULER (arXiv 2404.06654); the wording is this project's own. A question ends in the middle of its
answer's sentence, so that the answer is the natural continuation even for a small model that was never taught to chat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from dustin_profile.choices import RecallKind
from dustin_profile.evaluation.draw import Draw
from dustin_runtime.errors import CapacityError, UsageError

VALUE_DIGITS = 6
"""One guess in 900,000 hits. All values have as many digits, so none is part of another."""

_ADJECTIVES = """
amber ancient brass broken copper crimson crooked crystal dusty emerald faded frozen gentle golden hidden hollow iron
ivory jade lonely marble mossy narrow orange painted purple quiet rusty scarlet silver velvet wooden
"""
_NOUNS = """
anchor badger barrel beetle bridge candle castle chapel cottage falcon fiddle fountain garden heron kettle ladder
lantern lizard meadow mirror otter parrot pigeon piano rabbit saddle statue teapot tiger turtle wagon windmill
"""
ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())
CONSONANTS, VOWELS = "BDGKLMNRTV", "AIOU"
"""Letters of a variable's name, five in turn, such as TOLIN: read as one word, and no word of English but by rare
chance."""

_TRIES = 1000


class Facts(NamedTuple):
    """What one prompt hides and asks.

    Attributes:
        statements: sentences to scatter over the haystack in this order.
        tail: end of the prompt, to be continued by the answer.
        wanted: the answers, in the order of the question (multi-query) or of the statements.
        others: answers to other questions about the same statements.
        reply: an answer as good as can be; how long one may be is measured on it.
    """

    statements: list[str]
    tail: str
    wanted: list[str]
    others: list[str]
    reply: str


def make_facts(kind: RecallKind, draw: Draw, facts: int, asked: int, haystack: str) -> Facts:
    """Draw `facts` statements of which `asked` hold the answers (one for multi-key).

    Args:
        haystack: lower-cased; no key, name or value that it holds is drawn.

    Raises:
        UsageError: there are to be no facts, none asked, more asked than there are, or more than there are names for.
        CapacityError: the haystack holds nearly every name.
    """
    if facts < 1:
        raise UsageError(f"facts {facts}: must be at least 1")
    if facts > (most := len(ADJECTIVES) * len(NOUNS) // 2):
        raise UsageError(f"facts {facts}: must be at most {most}")
    if kind == "multi-key":
        asked = 1
    if not 1 <= asked <= facts:
        raise UsageError(f"asked {asked}: must be at least 1 and at most the {facts} facts")
    return _KINDS[kind](draw, _Names(draw, haystack), facts, asked)


class _Names:
    """Distinct new names, none of which the haystack holds."""

    def __init__(self, draw: Draw, haystack: str) -> None:
        self._draw, self._haystack = draw, haystack

    def values(self, count: int) -> list[str]:
        first = 10 ** (VALUE_DIGITS - 1)
        return self._new(count, lambda: str(first + self._draw.below(9 * first)))

    def keys(self, count: int) -> list[str]:
        return self._new(count, lambda: f"{self._draw.choice(ADJECTIVES)} {self._draw.choice(NOUNS)}")

    def variables(self, count: int) -> list[str]:
        letters = (CONSONANTS, VOWELS, CONSONANTS, VOWELS, CONSONANTS)
        return self._new(count, lambda: "".join(map(self._draw.choice, letters)))

    def _new(self, count: int, propose: Callable[[], str]) -> list[str]:
        names: dict[str, None] = {}
        for _ in range(_TRIES + 10 * count):
            if len(names) == count:
                return list(names)
            name = propose()
            if name.lower() not in self._haystack:
                names[name] = None
        raise CapacityError(
            f"haystack: holds too many of the names for {count} facts; give another one, or fewer facts"
        )


def _multi_key(draw: Draw, names: _Names, facts: int, asked: int) -> Facts:
    keys, values = names.keys(facts), names.values(facts)
    return Facts(
        _shuffled_facts(draw, keys, values),
        _tail(f"What is the secret number of the {keys[0]}?", f"The secret number of the {keys[0]} is"),
        values[:1],
        values[1:],
        f" {values[0]}.",
    )


def _multi_value(draw: Draw, names: _Names, facts: int, asked: int) -> Facts:
    groups = _groups(names.values(facts), asked)
    owners = dict(zip(names.keys(len(groups)), groups, strict=True))
    pairs = draw.shuffled([(key, value) for key, group in owners.items() for value in group])
    key, wanted = next(iter(owners.items()))
    ordered = [value for _, value in pairs if value in wanted]
    return Facts(
        [f"One of the secret numbers of the {key} is {value}." for key, value in pairs],
        _tail(f"What are all the secret numbers of the {key}?", f"The secret numbers of the {key} are"),
        ordered,
        [value for _, value in pairs if value not in wanted],
        f" {_listed(ordered)}.",
    )


def _multi_query(draw: Draw, names: _Names, facts: int, asked: int) -> Facts:
    keys, values = names.keys(facts), names.values(facts)
    subject = f"the secret numbers of {_listed([f'the {key}' for key in keys[:asked]])}"
    return Facts(
        _shuffled_facts(draw, keys, values),
        _tail(f"What are {subject}, in this order?", f"In this order, {subject} are"),
        values[:asked],
        values[asked:],
        f" {_listed(values[:asked])}.",
    )


def _variable_tracking(draw: Draw, names: _Names, facts: int, asked: int) -> Facts:
    chains = _groups(names.variables(facts), asked)
    values = names.values(len(chains))
    statements = [_chain(chain, value) for chain, value in zip(chains, values, strict=True)]
    # Chains are mixed, but each keeps its order: a variable is assigned before another takes over its value.
    turns = draw.shuffled([number for number, chain in enumerate(chains) for _ in chain])
    return Facts(
        [next(statements[number]) for number in turns],
        _tail(f"What are all the names of the number {values[0]}?", f"The number {values[0]} is called"),
        chains[0],
        [name for chain in chains[1:] for name in chain],
        f" {_listed(chains[0])}.",
    )


def _chain(names: Sequence[str], value: str) -> Iterator[str]:
    """Assignments in words: of the wordings tried, the one where a model of 135M parameters is right most often."""
    yield f"The number {value} is called {names[0]}."
    for before, name in pairwise(names):
        yield f"The number called {before} is also called {name}."


def _groups(values: list[str], size: int) -> list[list[str]]:
    """`size` values each; the last group takes what is left."""
    return [values[begin : begin + size] for begin in range(0, len(values), size)]


def _shuffled_facts(draw: Draw, keys: list[str], values: list[str]) -> list[str]:
    pairs = draw.shuffled(list(zip(keys, values, strict=True)))
    return [f"The secret number of the {key} is {value}." for key, value in pairs]


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _tail(question: str, begun: str) -> str:
    return f"\n\nQuestion: {question}\nAnswer: {begun}"


_KINDS: dict[RecallKind, Callable[[Draw, _Names, int, int], Facts]] = {
    "multi-key": _multi_key,
    "multi-value": _multi_value,
    "multi-query": _multi_query,
    "variable-tracking": _variable_tracking,
}
