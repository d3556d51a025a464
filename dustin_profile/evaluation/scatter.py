"""Prompts of a wanted length: sentences scattered over a part of a haystack, and a question behind it."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

from dustin_profile.encoder import PlainEncoder
from dustin_profile.prompts import LONGEST_TOKEN, NEARLY_FULL, Place, own_sentence, tokenise
from dustin_runtime.errors import CapacityError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPACE = re.compile(r"\s*")


class Scatterer:
    """A haystack in evenly spaced parts, tokenised once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, haystack: str, parts: int, longest: int) -> None:
        """Lay `parts` parts over the haystack, the first at its beginning, the last ending with it.

        They begin at sentence ends with another one near behind them, so not just before a long table. Where the
        haystack has `parts` times `longest` tokens they share hardly anything; where it has fewer they overlap.
        """
        self._encoder = PlainEncoder(tokenizer)
        self._haystack = tokenise(haystack[: LONGEST_TOKEN * parts * longest], self._encoder)
        spare = max(len(self._haystack.ids) - longest, 0)
        ends = [Place(0, 0), *self._haystack.sentences]
        begins = [
            place
            for place, following in pairwise(ends)
            if place.tokens <= spare and following.tokens - place.tokens <= NEARLY_FULL
        ] or ends[:1]
        places = [bisect_left(begins, spare * part // max(parts - 1, 1), key=itemgetter(0)) for part in range(parts)]
        self._begins = [begins[min(place, len(begins) - 1)] for place in places]

    def count(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len(self._encoder(text))

    def room(self, part: int, length: int, sentences: Sequence[str], tail: str) -> int:
        """Tokens of haystack that a prompt has room for; see `prompt`, which raises the same errors."""
        need = len(self._encoder.bos) + self.count(" ".join(["", *sentences]) + tail)
        if need >= length:
            raise UsageError(f"length {length}: the facts and the question need {need} tokens; ask for more")
        begin = self._begins[part]
        room, there = length - need, len(self._haystack.ids) - begin.tokens
        if there < room:
            raise CapacityError(
                f"haystack: has {there} tokens, a prompt of {length} needs {room}; "
                "give a longer haystack (--haystack) or shorter lengths"
            )
        self._require_sentence(begin, room, length)
        return room

    def prompt(self, part: int, length: int, sentences: Sequence[str], depths: Sequence[float], tail: str) -> list[int]:
        """Token ids: the part of the haystack with each sentence at the last sentence end not beyond its depth, `tail`.

        The part is cut at a sentence end, or a line end where none is near, so that the prompt has at most `length`
        tokens: in prose at most one sentence fewer, and rarely more than 100.

        Args:
            depths: one per sentence, ascending, in [0, 1]: share of the part's tokens.

        Raises:
            UsageError: sentences and tail fill the length.
            CapacityError: the haystack is too short, or has no sentence end where one is needed.
        """
        begin, room = self._begins[part], self.room(part, length, sentences, tail)
        while True:
            self._require_sentence(begin, room, length)
            end = self._haystack.cut(begin.tokens + room)
            ids = [*self._encoder.bos, *self._encoder(self._woven(begin, end, sentences, depths) + tail)]
            if len(ids) <= length:
                return ids
            room -= len(ids) - length  # texts that are joined may have a few more tokens than they have alone

    def _sentence_end(self, tokens: int) -> Place:
        """The last one within the first `tokens` tokens, or the haystack's beginning."""
        fitting = bisect_right(self._haystack.sentences, tokens, key=itemgetter(0))
        return self._haystack.sentences[fitting - 1] if fitting else Place(0, 0)

    def _require_sentence(self, begin: Place, room: int, length: int) -> None:
        if self._sentence_end(begin.tokens + room) <= begin:
            raise CapacityError(
                f"haystack: no sentence ends in {room} of its tokens; give plain prose (--haystack) or ask for"
                f" more than {length} tokens"
            )

    def _woven(self, begin: Place, end: Place, sentences: Sequence[str], depths: Sequence[float]) -> str:
        """The text between two places with the sentences in it."""
        text, places = self._haystack.text, self._haystack.sentences
        inner = [begin, *places[bisect_right(places, begin) : bisect_left(places, end)], end]
        # White space between the sentence before the part and the part's first one belongs to neither.
        leading = _SPACE.match(text, begin.characters)
        woven, at = "", leading.end() if leading else begin.characters
        for sentence, depth in zip(sentences, depths, strict=True):
            wanted = begin.tokens + depth * (end.tokens - begin.tokens)
            place = max(at, inner[bisect_right(inner, wanted, key=itemgetter(0)) - 1].characters)
            woven += text[at:place]
            woven += own_sentence(woven, sentence, text[place : end.characters])
            at = place
        return woven + text[at : end.characters]
