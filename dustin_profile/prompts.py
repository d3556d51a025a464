"""Retrieval prompts: a needle in a haystack, and where its answer stands (CompressKV, arXiv 2508.02401)."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from dustin_profile.encoder import PlainEncoder
from dustin_profile.needles import Needle
from dustin_runtime.errors import CapacityError, ConfigError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*(?P<gap>\s+(?=[\"'“‘(]*[A-Z])|\s*\Z)")
"""A full stop, question or exclamation mark with what closes after it, before white space and a capital (perhaps
behind an opening quote) or the end of the text. Abbreviations ("Dr. Grantly") match too: harmless here."""

LINE_END = re.compile(r"(?P<gap>\n+)")

SEAMS = 8
"""Tokens set aside because texts that are joined may tokenise into a few more than they do alone."""

NEARLY_FULL = 100
"""Tokens that the cut at a sentence end may waste; where it would waste more (a long table), a line end serves."""

LONGEST_TOKEN = 64
"""Characters: more than any tokenizer averages. Bounds how much of a large haystack is tokenised."""


class Sample(NamedTuple):
    """One prompt. Positions are token positions in `ids`."""

    needle: int
    length: int
    depth: float
    ids: list[int]
    """The prompt: at most `length` tokens, ending in "Answer:"."""
    span: tuple[int, ...]
    """The answer inside the needle: every token with a character of it, so also the space that most attach in front.
    Punctuation around it is left out, unless a tokenizer has it in one token with a letter."""
    answer_ids: list[int]
    """The answer as it continues `ids`, behind a space."""
    insert_at: int
    """First token of the needle. What precedes is the same in every prompt over this haystack: a KV prefix to reuse."""


class Place(NamedTuple):
    """A place between two tokens of the haystack: tokens and characters before it."""

    tokens: int
    characters: int


class TokenHaystack(NamedTuple):
    """A haystack, tokenised once. Its sentence and line ends ascend."""

    text: str
    ids: list[int]
    sentences: list[Place]
    lines: list[Place]

    def cut(self, tokens: int) -> Place:
        """The last sentence end within the first `tokens` tokens, or line end where the former wastes much."""
        sentence, line = (_last(places, tokens) for places in (self.sentences, self.lines))
        return sentence if tokens - sentence.tokens <= NEARLY_FULL else max(sentence, line)


class _Needle(NamedTuple):
    """A needle, its question as the prompt's tail, and the tokens of answer and of all that is not haystack."""

    number: int
    text: str
    answer: str
    tail: str
    answer_tokens: int
    tokens: int


def samples(
    tokenizer: PreTrainedTokenizerFast,
    haystack_text: str,
    needles: Sequence[Needle],
    lengths: Iterable[int],
    depths: Iterable[float],
) -> list[Sample]:
    """Every needle at every length and depth: by length, then needle, then depth with the deepest first.

    A prompt is the haystack cut at a sentence end, with the needle at the last sentence end not beyond `depth` (0:
    before everything, 1: behind everything; measured in haystack tokens), a question line and "Answer:". It is built
    as text and tokenised as a whole, without a chat template or special tokens except the tokenizer's own first one.
    It has at most `length` tokens, fewer by what the cut wastes.

    Raises:
        CapacityError: the haystack is too short for a length (it is never repeated), or has no sentence end.
        UsageError: a depth outside [0, 1], or a length that the needle and its question fill.
        ConfigError: a needle whose answer merges with "Answer:" under this tokenizer.
    """
    lengths, depths = sorted(set(lengths)), sorted(set(depths), reverse=True)
    if outside := [depth for depth in depths if not 0 <= depth <= 1]:
        raise UsageError(f"depth {outside[0]}: must lie between 0 and 1")
    encoder = PlainEncoder(tokenizer)
    haystack = tokenise(haystack_text[: LONGEST_TOKEN * max(lengths, default=0)], encoder)
    prepared = [_needle(number, needle, encoder) for number, needle in enumerate(needles)]
    result = []
    for length in lengths:
        for needle in prepared:
            cut = _cut(haystack, length, length - needle.tokens)
            result += [_sample(encoder, haystack, cut, needle, length, depth) for depth in depths]
    return result


def tokenise(text: str, encoder: PlainEncoder) -> TokenHaystack:
    """Tokens of a haystack, and where its sentences and lines end: only places that are borders of tokens."""
    encoding = encoder.encode(text)
    edges = {end: tokens for tokens, (_, end) in enumerate(encoding.offsets, 1)}

    def places(pattern: re.Pattern[str]) -> list[Place]:
        found = []
        for start, end in (match.span("gap") for match in pattern.finditer(text)):
            # Qwen and Llama 3 merge a full stop with the line breaks behind it: then the place is behind these.
            behind_breaks = text.rfind("\n", start, end) + 1
            place = start if start in edges else behind_breaks
            if place in edges:
                found.append(Place(edges[place], place))
        return found

    return TokenHaystack(text, encoding.ids, places(SENTENCE_END), places(LINE_END))


def own_sentence(before: str, sentence: str, after: str) -> str:
    """A sentence as it is put between two parts of a haystack: on a line of its own where `before` ends a line."""
    own_line = not before or before.endswith("\n")
    return sentence + ("\n" if after else "") if own_line else f" {sentence}"


def is_answer(text: str, answer: str) -> bool:
    """Whether a response retrieves the answer: more than half of the answer's words are in it."""
    return answer_recall(text, answer) > 0.5


def answer_recall(text: str, answer: str) -> float:
    """ROUGE-1 recall: the share of the answer's words that a response holds, in [0, 1].

    Words are lower-cased runs of letters and digits, each counted as often as the answer has it. They are not
    stemmed, unlike in CompressKV's detector.
    """
    wanted, said = (Counter(re.findall(r"\w+", part.lower())) for part in (answer, text))
    return (wanted & said).total() / max(wanted.total(), 1)


def _needle(number: int, needle: Needle, encoder: PlainEncoder) -> _Needle:
    tail = f"\n\nQuestion: {needle.question}\nAnswer:"
    tail_ids, continued = encoder(tail), encoder(f"{tail} {needle.answer}")
    if continued[: len(tail_ids)] != tail_ids:
        raise ConfigError(f"needles.{number}.answer: merges with 'Answer:' under this tokenizer; reword its beginning")
    tokens = len(encoder.bos) + len(encoder(f" {needle.needle}")) + len(tail_ids) + SEAMS
    return _Needle(number, needle.needle, needle.answer, tail, len(continued) - len(tail_ids), tokens)


def _cut(haystack: TokenHaystack, length: int, room: int) -> Place:
    """The last sentence end within `room` tokens of haystack, or line end where the former wastes much."""
    if room < 1:
        raise UsageError(f"length {length}: the needle and its question need {length - room} tokens; ask for more")
    if len(haystack.ids) < room:
        raise CapacityError(
            f"haystack: has {len(haystack.ids)} tokens, a prompt of {length} needs {room}; "
            "give a longer haystack (--haystack) or shorter lengths"
        )
    if not _last(haystack.sentences, room).tokens:
        raise CapacityError(
            f"haystack: no sentence ends in its first {room} tokens; give a longer --length or plain prose (--haystack)"
        )
    return haystack.cut(room)


def _last(places: list[Place], tokens: int) -> Place:
    fitting = bisect_right(places, tokens, key=itemgetter(0))
    return places[fitting - 1] if fitting else Place(0, 0)


def _sample(
    encoder: PlainEncoder, haystack: TokenHaystack, cut: Place, needle: _Needle, length: int, depth: float
) -> Sample:
    places = [Place(0, 0), *(place for place in haystack.sentences if place < cut), cut]
    for place in reversed([place for place in places if place.tokens <= depth * cut.tokens]):
        before, after = haystack.text[: place.characters], haystack.text[place.characters : cut.characters]
        inserted = own_sentence(before, needle.text, after)
        encoding = encoder.encode(f"{before}{inserted}{after}{needle.tail} {needle.answer}")
        offsets = encoding.offsets
        insert_at = bisect_right(offsets, len(before), key=itemgetter(1))
        if encoding.ids[:insert_at] == haystack.ids[:insert_at]:
            break
    start = len(before) + inserted.index(needle.answer)
    first = bisect_right(offsets, start, key=itemgetter(1))
    behind = bisect_left(offsets, start + len(needle.answer), key=itemgetter(0))
    ids, skip = encoding.ids, len(encoder.bos)
    return Sample(
        needle=needle.number,
        length=length,
        depth=depth,
        ids=[*encoder.bos, *haystack.ids[:insert_at], *ids[insert_at : -needle.answer_tokens]],
        span=tuple(range(first + skip, behind + skip)),
        answer_ids=ids[-needle.answer_tokens :],
        insert_at=insert_at + skip,
    )
