"""Generated retrieval at any length: many facts of one form in a haystack, and a question about some of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

from dustin_profile.choices import RecallKind
from dustin_profile.evaluation import mentions
from dustin_profile.evaluation.draw import Draw
from dustin_profile.evaluation.facts import Facts, make_facts
from dustin_profile.evaluation.scatter import Scatterer
from dustin_profile.evaluation.tasks import Item
from dustin_profile.haystack import Haystack
from dustin_runtime.errors import UsageError
from dustin_runtime.models.tokenizer import tokenizer_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

KINDS: tuple[RecallKind, ...] = get_args(RecallKind)

VERSION = 1
"""Of wording and generator: other prompts for the same arguments have another number."""

STOP = (".", "\n\n", "\nQuestion:")
"""The prompt ends in the middle of a sentence: its end is the answer's. A single line end is not: over a haystack of
wrapped lines, models wrap a list of answers too."""


class Recall:
    """Samples of the kinds of generated retrieval at several lengths."""

    name = "recall"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        haystack: Haystack,
        lengths: Sequence[int],
        *,
        kinds: Sequence[RecallKind] = KINDS,
        samples: int = 20,
        facts: int = 8,
        asked: int = 4,
        within: tuple[float, float] = (0.0, 1.0),
        seed: int = 0,
    ) -> None:
        """Draw the facts and see that every prompt can be built: what is wrong is said before a model is loaded.

        Args:
            lengths: prompt tokens; a prompt has at most these, fewer by the cut at a sentence end.
            samples: prompts per kind and length.
            facts: statements in a prompt, the distractors among them.
            asked: values, keys or variables that are asked at once; multi-key always asks one.
            within: depths between which the facts are scattered, 0 (before all) to 1 (behind all).

        Raises:
            UsageError: an argument is out of its range (the message names it), or the facts fill a length.
            CapacityError: the haystack is too short for a length, or has no sentence end.
        """
        if not lengths:
            raise UsageError("lengths: none given; give at least one")
        if not kinds or (unknown := [kind for kind in kinds if kind not in KINDS]):
            raise UsageError(f"kinds: {unknown[0] if kinds else 'none given'}; choose from {', '.join(KINDS)}")
        if samples < 1:
            raise UsageError(f"samples {samples}: must be at least 1")
        if not 0 <= within[0] <= within[1] <= 1:
            raise UsageError(f"within {within[0]} to {within[1]}: depths must ascend and lie between 0 and 1")
        self._haystack, self._lengths = haystack, sorted(set(lengths))
        self._kinds = [kind for kind in KINDS if kind in kinds]
        self._samples, self._facts, self._asked, self._within, self._seed = samples, facts, asked, within, seed
        lowered = haystack.text.lower()
        self._drawn = {
            (kind, sample): make_facts(kind, Draw(seed, kind, sample), facts, asked, lowered)
            for kind in self._kinds
            for sample in range(samples)
        }
        self._scatterer = Scatterer(tokenizer, haystack.text, samples, self._lengths[-1])
        for (_, sample), drawn in self._drawn.items():
            for length in self._lengths:
                self._scatterer.room(sample, length, drawn.statements, drawn.tail)
        self._tokenizer = tokenizer_hash(tokenizer)

    @property
    def inputs(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "tokenizer": self._tokenizer,
            "haystack": self._haystack.name,
            "haystack_sha256": self._haystack.sha256,
            "lengths": self._lengths,
            "kinds": self._kinds,
            "samples": self._samples,
            "facts": self._facts,
            "asked": self._asked,
            "within": list(self._within),
            "seed": self._seed,
        }

    def items(self) -> Iterator[Item]:
        """By length, then kind, then sample. A sample has the same facts at every length: lengths are compared on
        equal questions."""
        for length in self._lengths:
            for kind in self._kinds:
                for sample in range(self._samples):
                    yield self._item(kind, length, sample)

    def score(self, item: Item, text: str) -> dict[str, float]:
        """recalled: share of the answers named; precision: share of what is named that is right; exact: all and
        nothing else (for multi-query in the order asked).

        By chance: answers taken at random from all facts of a prompt have a precision of asked / facts.
        """
        wanted, others = item.answers["wanted"], item.answers["others"]
        kind = item.group["kind"]
        tracking = kind == "variable-tracking"
        said = mentions.variables(text, {*wanted, *others}) if tracking else mentions.numbers(text)
        return mentions.judge(said, wanted, ordered=kind == "multi-query")

    def _item(self, kind: RecallKind, length: int, sample: int) -> Item:
        facts = self._drawn[kind, sample]
        depths = self._depths(kind, sample, facts)
        return Item(
            id=f"{kind}-{length}-{sample}",
            # Sample i of every kind and length lies in part i of the haystack, and has the same facts at every length:
            # these items resemble each other. Another sample has other facts, in another part of the haystack while
            # that is long enough; where parts overlap only the filler is shared, the facts are drawn anew all the same.
            document=f"part-{sample}",
            prompt=self._scatterer.prompt(sample, length, facts.statements, depths, facts.tail),
            # Half as long again as a good reply, and some words: room for prose around the answers.
            new_tokens=3 * self._scatterer.count(facts.reply) // 2 + 16,
            stop=STOP,
            group={"kind": kind, "length": str(length)},
            answers={"wanted": facts.wanted, "others": facts.others},
        )

    def _depths(self, kind: RecallKind, sample: int, facts: Facts) -> list[float]:
        """One in each of as many equal stretches as there are facts: random, yet spread over the whole prompt."""
        draw = Draw(self._seed, kind, sample, "depths")
        low, high = self._within
        count = len(facts.statements)
        return [low + (high - low) * (number + draw.share()) / count for number in range(count)]
