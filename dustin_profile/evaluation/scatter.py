"""Prompts of a wanted length: sentences scattered over a part of a haystack, and a question behind it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from dustin_profile.encoder import PlainEncoder
from dustin_profile.prompts import LONGEST_TOKEN, Place, own_sentence, tokenise
from dustin_runtime.errors import CapacityError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Scatterer:
    """A haystack in evenly spaced parts, tokenised once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, haystack: str, parts: int, longest: int) -> None:
        """Lay `parts` parts over the haystack, the first at its beginning, the last ending with it.

        They begin at sentence ends. Where the haystack has `parts` times `longest` tokens they share no more than a
        sentence; where it has fewer they overlap.
        """
        self._encoder = PlainEncoder(tokenizer)
        self._haystack = tokenise(haystack[: LONGEST_TOKEN * parts * longest], self._encoder)
        spare = max(len(self._haystack.ids) - longest, 0)
        self._begins = [self._sentence_end(spare * part // max(parts - 1, 1)) for part in range(parts)]

    def count(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len(self._encoder(text))

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
        while True:
            end = self._haystack.cut(begin.tokens + room)
            if end <= begin or self._sentence_end(begin.tokens + room) <= begin:
                raise CapacityError(
                    f"haystack: no sentence ends in {room} of its tokens; give plain prose (--haystack) or ask for"
                    f" more than {length} tokens"
                )
            ids = [*self._encoder.bos, *self._encoder(self._woven(begin, end, sentences, depths) + tail)]
            if len(ids) <= length:
                return ids
            room -= len(ids) - length  # texts that are joined may have a few more tokens than they have alone

    def _sentence_end(self, tokens: int) -> Place:
        """The last one within the first `tokens` tokens, or the haystack's beginning."""
        fitting = bisect_right(self._haystack.sentences, tokens, key=itemgetter(0))
        return self._haystack.sentences[fitting - 1] if fitting else Place(0, 0)

    def _woven(self, begin: Place, end: Place, sentences: Sequence[str], depths: Sequence[float]) -> str:
        """The text between two places with the sentences in it."""
        text, places = self._haystack.text, self._haystack.sentences
        inner = [begin, *places[bisect_right(places, begin) : bisect_left(places, end)], end]
        woven, at = "", begin.characters
        for sentence, depth in zip(sentences, depths, strict=True):
            wanted = begin.tokens + depth * (end.tokens - begin.tokens)
            place = inner[bisect_right(inner, wanted, key=itemgetter(0)) - 1].characters
            woven += text[at:place] if woven else text[at:place].lstrip()
            woven += own_sentence(woven, sentence, text[place : end.characters])
            at = place
        return woven + text[at : end.characters]
