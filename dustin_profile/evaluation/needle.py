"""Needles in a haystack as an evaluation: one fact, asked at every length and depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dustin_profile.evaluation.tasks import Item
from dustin_profile.haystack import Haystack
from dustin_profile.needles import Needle
from dustin_profile.prompts import answer_recall, is_answer, samples
from dustin_runtime.errors import ConfigError, UsageError
from dustin_runtime.models.tokenizer import tokenizer_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

STOP = ("\nQuestion:",)
"""Not a line end: small models begin with an empty line, or announce the answer on a line of its own. All that they say
is judged, as in CompressKV's detector."""


class NeedleGrid:
    """Every needle at every length and depth of one haystack: the prompts that `dustin-profile srh` scores heads on."""

    name = "needle"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        haystack: Haystack,
        needles: Sequence[Needle],
        lengths: Sequence[int],
        depths: Sequence[float],
        *,
        new_tokens: int = 32,
    ) -> None:
        """Build all prompts, so that whatever is wrong with them is said before a model is loaded.

        Args:
            lengths: prompt tokens; a prompt has at most these, fewer by the cut at a sentence end.
            depths: where the needle is put, 0 (before all) to 1 (behind all).
            new_tokens: the most tokens of an answer.

        Raises:
            ConfigError: there is no needle, or one whose answer merges with the prompt's end.
            UsageError: there is no length or depth, one lies outside its range, or new_tokens is below 1.
            CapacityError: the haystack is too short for a length, or has no sentence end.
        """
        if not needles:
            raise ConfigError("needles: none given; give at least one fact, with its question and answer")
        for flag, values in (("lengths", lengths), ("depths", depths)):
            if not values:
                raise UsageError(f"{flag}: none given; give at least one")
        if new_tokens < 1:
            raise UsageError(f"new_tokens {new_tokens}: must be at least 1")
        self._needles = list(needles)
        self._haystack = haystack
        self._lengths, self._depths = sorted(set(lengths)), sorted({float(depth) for depth in depths}, reverse=True)
        self._new_tokens = new_tokens
        self._tokenizer = tokenizer_hash(tokenizer)
        self._samples = samples(tokenizer, haystack.text, self._needles, self._lengths, self._depths)

    @property
    def inputs(self) -> dict[str, Any]:
        return {
            "tokenizer": self._tokenizer,
            "haystack": self._haystack.name,
            "haystack_sha256": self._haystack.sha256,
            "needles": [needle.model_dump() for needle in self._needles],
            "lengths": self._lengths,
            "depths": self._depths,
            "new_tokens": self._new_tokens,
        }

    def items(self) -> Iterator[Item]:
        """By length, then needle, then depth with the deepest first."""
        for sample in self._samples:
            yield Item(
                id=f"{sample.length}-{sample.needle}-{sample.depth}",
                # All prompts share one haystack; what a result is to hold for is other facts. Whether a model finds a
                # fact at one depth says much about the same fact at another: only needles are independent draws.
                document=f"needle-{sample.needle}",
                prompt=sample.ids,
                new_tokens=self._new_tokens,
                stop=STOP,
                group={"length": str(sample.length), "depth": str(sample.depth)},
                answers=self._needles[sample.needle].answer,
            )

    def score(self, item: Item, text: str) -> dict[str, float]:
        """found: the answer is there (more than half of its words); recall: the share of its words (ROUGE-1)."""
        return {"found": float(is_answer(text, item.answers)), "recall": answer_recall(text, item.answers)}
