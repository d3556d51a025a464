"""Prompts of the retrieval tasks: the same bytes every time, of the wanted length, each answer where it belongs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, tokenizer_of
from transformers import PreTrainedTokenizerFast

from dustin_profile.evaluation.draw import Draw
from dustin_profile.evaluation.facts import ADJECTIVES, NOUNS, make_facts
from dustin_profile.evaluation.needle import NeedleGrid
from dustin_profile.evaluation.recall import KINDS, VERSION, Recall
from dustin_profile.evaluation.tasks import Item, Task
from dustin_profile.haystack import Haystack
from dustin_profile.needles import load_needles
from dustin_profile.texts import topics
from dustin_runtime.errors import CapacityError, ConfigError, DustinError, UsageError
from dustin_runtime.files import digest, digest_text

LENGTHS = (500, 1000)
SAMPLES = 4
FACTS, ASKED = 7, 3
NEEDLES = load_needles()[:3]
DEPTHS = (0, 0.5, 1.0)


def haystack(text: str) -> Haystack:
    return Haystack("some", text, digest_text(text))


HAYSTACK = haystack(topics()[:60_000])
PROSE = haystack(" ".join(f"Sentence {number} says little, and ends here." for number in range(2000)))
"""Own text, so the same under every version of Python."""
FACT = re.compile(r"(The|One of the) (secret|number)[^.]+\.")


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return tokenizer_of(request)


@pytest.fixture(scope="module")
def items(tokenizer: PreTrainedTokenizerFast) -> list[Item]:
    return list(recall(tokenizer).items())


def recall(tokenizer: PreTrainedTokenizerFast, text: Haystack = HAYSTACK, **changes: Any) -> Recall:
    arguments: dict[str, Any] = {"lengths": LENGTHS, "samples": SAMPLES, "facts": FACTS, "asked": ASKED} | changes
    return Recall(tokenizer, text, arguments.pop("lengths"), **arguments)


def needle_grid(tokenizer: PreTrainedTokenizerFast, text: Haystack = HAYSTACK, **changes: Any) -> NeedleGrid:
    arguments: dict[str, Any] = {"needles": NEEDLES, "lengths": LENGTHS, "depths": DEPTHS} | changes
    return NeedleGrid(tokenizer, text, **arguments)


def text_of(tokenizer: PreTrainedTokenizerFast, item: Item) -> str:
    return tokenizer.decode(item.prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("build", [recall, needle_grid])
def test_the_same_items_every_time(small_tokenizer: PreTrainedTokenizerFast, build: Any) -> None:
    task: Task = build(small_tokenizer)
    first = list(task.items())
    assert list(task.items()) == first == list(build(small_tokenizer).items())
    assert len({item.id for item in first}) == len(first)
    assert task.inputs == json.loads(json.dumps(task.inputs)) == build(small_tokenizer).inputs
    assert all(json.loads(json.dumps(item.answers)) == item.answers for item in first)


def test_facts_are_those_of_every_machine() -> None:
    """Whoever changes wording or generator raises VERSION."""
    drawn = [make_facts(kind, Draw(0, kind, sample), FACTS, ASKED, "") for kind in KINDS for sample in range(3)]
    assert (VERSION, digest([facts._asdict() for facts in drawn])) == (
        1,
        "412ed38542aef7cb28c3b149cdf7f6e8572aa197a4fcadca3ad5391ceedf509a",
    )


def test_draws_are_those_of_every_machine() -> None:
    draw = Draw(0, "multi-key", 3)
    assert [draw.below(1000) for _ in range(5)] == [775, 379, 243, 464, 922]
    assert draw.shuffled(range(8)) == [5, 3, 6, 7, 4, 1, 0, 2]


def test_another_seed_gives_other_facts(small_tokenizer: PreTrainedTokenizerFast) -> None:
    zero, one = (list(recall(small_tokenizer, seed=seed).items()) for seed in (0, 1))
    assert not {value for item in zero for value in item.answers["wanted"]} & {
        value for item in one for value in item.answers["wanted"]
    }


def test_every_cell_has_its_samples(items: list[Item]) -> None:
    cells = [(item.group["length"], item.group["kind"], item.document) for item in items]
    expected = [(str(n), kind, f"part-{part}") for n in LENGTHS for kind in KINDS for part in range(SAMPLES)]
    assert cells == expected


def test_recall_lengths(items: list[Item]) -> None:
    for item in items:
        length = int(item.group["length"])
        assert length - 200 < len(item.prompt) <= length
        assert item.new_tokens >= 16


def test_prose_is_cut_within_a_sentence_of_the_length(tokenizer: PreTrainedTokenizerFast) -> None:
    sentence = len(tokenizer(" Sentence 1999 says little, and ends here.")["input_ids"])
    for item in recall(tokenizer, PROSE).items():
        length = int(item.group["length"])
        # What is joined may need fewer tokens than it does alone: a few per fact.
        assert length - sentence - 2 * FACTS < len(item.prompt) <= length


def test_answers_stand_in_their_facts_and_nowhere_else(tokenizer: PreTrainedTokenizerFast, items: list[Item]) -> None:
    for item in items:
        body, question = text_of(tokenizer, item).split("\n\nQuestion: ")
        wanted, others = item.answers["wanted"], item.answers["others"]
        kind = item.group["kind"]
        assert len({*wanted, *others}) == FACTS
        assert len(wanted) == (1 if kind == "multi-key" else ASKED)
        if kind == "variable-tracking":
            value = re.findall(r"[0-9]{6}", question)[0]
            assert body.count(value) == 1
            assert held_by(body, value) == wanted
            assert not re.search("|".join([*wanted, *others]), question)
            continue
        stated = dict(re.findall(r"secret numbers? of the (\w+ \w+) is ([0-9]{6})\.", body))
        for value in (*wanted, *others):
            assert body.count(value) == 1
            assert value not in question
            assert value not in HAYSTACK.text
        asked = re.findall(r"the (\w+ \w+)(?=\?|,| and| in)", question.split("?")[0] + "?")
        if kind == "multi-value":
            assert re.findall(rf"secret numbers of the {asked[0]} is ([0-9]{{6}})\.", body) == wanted
        else:
            assert [stated[key] for key in asked] == wanted


def held_by(body: str, value: str) -> list[str]:
    """Variables with a value, by reading the statements in their order as an interpreter would."""
    values: dict[str, str] = {}
    statement = re.compile(r"The number (?:(?P<value>[0-9]{6}) is|called (?P<other>\w{5}) is also) called (\w{5})\.")
    for match in statement.finditer(body):
        values[match[3]] = match["value"] or values[match["other"]]
    return [name for name, held in values.items() if held == value]


def test_facts_follow_ends_of_sentences_and_are_spread(tokenizer: PreTrainedTokenizerFast) -> None:
    for item in recall(tokenizer, PROSE, within=(0.25, 0.75)).items():
        body = text_of(tokenizer, item).split("\n\nQuestion: ")[0]
        places = [match.span() for match in FACT.finditer(body)]
        assert len(places) == FACTS
        for start, end in places:
            assert body[:start].endswith((". ", ".\n"))
            assert body[end:].startswith((" Sentence", "\nSentence", " The", " One"))
        total = body.count("Sentence")
        first, last = (body[:place].count("Sentence") for place in (places[0][0], places[-1][0]))
        assert 0.25 * total - 2 < first < total / 2 <= last <= 0.75 * total + 1


def test_samples_take_different_parts(tokenizer: PreTrainedTokenizerFast) -> None:
    """The haystack suffices for four parts of 1000 tokens: no sentence is in two samples."""
    found = [
        set(re.findall(r"Sentence \d+", text_of(tokenizer, item)))
        for item in recall(tokenizer, PROSE, kinds=["multi-key"], lengths=[1000]).items()
    ]
    assert all(found)
    assert len(set.union(*found)) == sum(map(len, found))


def test_overlapping_parts_are_still_different(small_tokenizer: PreTrainedTokenizerFast) -> None:
    short = haystack(PROSE.text[:12_000])
    bodies = [text_of(small_tokenizer, item) for item in recall(small_tokenizer, short, lengths=[1000]).items()]
    firsts = [re.findall(r"Sentence \d+", body)[0] for body in bodies]
    assert len(set(firsts)) == SAMPLES


def test_parts_avoid_tables(small_tokenizer: PreTrainedTokenizerFast) -> None:
    """The reference topics hold tables of many hundreds of tokens without a sentence's end."""
    whole = haystack(topics())
    assert len(list(recall(small_tokenizer, whole, kinds=["multi-key"], lengths=[400], samples=60).items())) == 60


def test_one_fact_alone_is_a_plain_needle(small_tokenizer: PreTrainedTokenizerFast) -> None:
    items = list(recall(small_tokenizer, kinds=["multi-key"], facts=1).items())
    assert all(len(item.answers["wanted"]) == 1 and not item.answers["others"] for item in items)


def test_lengths_share_facts(items: list[Item]) -> None:
    half = len(items) // 2
    assert [item.answers for item in items[:half]] == [item.answers for item in items[half:]]


def test_needle_grid(tokenizer: PreTrainedTokenizerFast) -> None:
    items = list(needle_grid(tokenizer).items())
    assert len(items) == len(LENGTHS) * len(NEEDLES) * len(DEPTHS)
    assert {item.document for item in items} == {f"needle-{number}" for number in range(len(NEEDLES))}
    assert {item.group["depth"] for item in items} == {"0.0", "0.5", "1.0"}
    for item in items:
        length = int(item.group["length"])
        assert length - 200 < len(item.prompt) <= length
        assert text_of(tokenizer, item).count(item.answers) == 1


@pytest.mark.parametrize(
    ("changes", "kind", "expected"),
    [
        ({"lengths": []}, UsageError, "lengths: none given"),
        ({"lengths": [150]}, UsageError, r"length 150: the facts and the question need \d+ tokens"),
        ({"lengths": [0]}, UsageError, "length 0"),
        ({"lengths": [500, 40_000]}, CapacityError, "haystack: has .* a prompt of 40000 needs .*give a longer"),
        ({"facts": 0}, UsageError, "facts 0"),
        ({"facts": 9999}, UsageError, "facts 9999: must be at most 512"),
        ({"asked": 0}, UsageError, "asked 0"),
        ({"asked": FACTS + 1}, UsageError, "asked 8"),
        ({"samples": 0}, UsageError, "samples 0"),
        ({"kinds": []}, UsageError, "kinds: none given"),
        ({"kinds": ["single"]}, UsageError, "kinds: single; choose from multi-key"),
        ({"within": (0.5, 1.5)}, UsageError, r"within 0.5 to 1.5"),
        ({"within": (0.5, 0.2)}, UsageError, r"within 0.5 to 0.2"),
        ({"text": haystack("word " * 5000)}, CapacityError, "no sentence ends"),
    ],
)
def test_bad_recall(
    small_tokenizer: PreTrainedTokenizerFast, changes: dict[str, Any], kind: type[DustinError], expected: str
) -> None:
    with pytest.raises(kind, match=expected) as raised:
        recall(small_tokenizer, **changes)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "kind", "expected"),
    [
        ({"needles": []}, ConfigError, "needles: none given"),
        ({"lengths": []}, UsageError, "lengths: none given"),
        ({"depths": []}, UsageError, "depths: none given"),
        ({"depths": [0.5, 1.1]}, UsageError, "depth 1.1"),
        ({"depths": [-0.1]}, UsageError, "depth -0.1"),
        ({"lengths": [20]}, UsageError, "length 20"),
        ({"lengths": [500, 40_000]}, CapacityError, "haystack: has"),
        ({"new_tokens": 0}, UsageError, "new_tokens 0"),
        ({"text": haystack("word " * 5000)}, CapacityError, "no sentence ends"),
    ],
)
def test_bad_needle_grid(
    small_tokenizer: PreTrainedTokenizerFast, changes: dict[str, Any], kind: type[DustinError], expected: str
) -> None:
    with pytest.raises(kind, match=expected):
        needle_grid(small_tokenizer, **changes)


def test_a_haystack_that_holds_every_name(small_tokenizer: PreTrainedTokenizerFast) -> None:
    every = " ".join(f"The {adjective} {noun} is here." for adjective in ADJECTIVES for noun in NOUNS)
    with pytest.raises(CapacityError, match="haystack: holds too many of the names"):
        recall(small_tokenizer, haystack(every))


def test_a_users_needles(small_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("needles:\n- {needle: The red door hides a pond., answer: a pond, question: What is hidden?}\n")
    task = needle_grid(small_tokenizer, needles=load_needles(path))
    assert {item.answers for item in task.items()} == {"a pond"}
