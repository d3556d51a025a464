from __future__ import annotations

from pathlib import Path

import pytest
from families import FAMILIES, tokenizer_of
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dustin_profile.haystack import load_haystack
from dustin_profile.needles import load_needles
from dustin_profile.prompts import Sample, is_answer, samples
from dustin_profile.texts import topics
from dustin_runtime.errors import CapacityError, MissingError, UsageError
from dustin_runtime.files import digest_text

LENGTHS = (400, 1000, 2000)
DEPTHS = (0.0, 0.3, 0.5, 0.75, 1.0)
NEEDLES = load_needles()
TEXT = topics()[:30_000]


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return tokenizer_of(request)


@pytest.fixture(scope="module")
def grid(tokenizer: PreTrainedTokenizerFast) -> list[Sample]:
    return samples(tokenizer, TEXT, NEEDLES, LENGTHS, DEPTHS)


def plain(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def first(tokenizer: PreTrainedTokenizerFast) -> int:
    return len(tokenizer("")["input_ids"])


def test_order(grid: list[Sample]) -> None:
    order = [(sample.length, sample.needle, sample.depth) for sample in grid]
    expected = [(n, k, d) for n in LENGTHS for k in range(len(NEEDLES)) for d in sorted(DEPTHS, reverse=True)]
    assert order == expected


def test_span_is_exactly_the_answer(tokenizer: PreTrainedTokenizerFast, grid: list[Sample]) -> None:
    for sample in grid:
        tokens = [sample.ids[position] for position in sample.span]
        answer = NEEDLES[sample.needle].answer
        assert tokenizer.decode(tokens).strip(" ") == answer
        assert list(sample.span) == list(range(sample.span[0], sample.span[-1] + 1))
        assert tokens == sample.answer_ids, "the answer is copied token by token"


def test_length(grid: list[Sample]) -> None:
    for sample in grid:
        assert sample.length - 200 < len(sample.ids) <= sample.length


def test_prompt_is_the_tokens_of_its_text(tokenizer: PreTrainedTokenizerFast, grid: list[Sample]) -> None:
    begin = first(tokenizer)
    for sample in grid[:: len(DEPTHS) + 1]:
        needle = NEEDLES[sample.needle]
        assert sample.ids[:begin] == tokenizer("")["input_ids"]
        text = tokenizer.decode(sample.ids[begin:], clean_up_tokenization_spaces=False)
        assert plain(tokenizer, text) == sample.ids[begin:]
        assert plain(tokenizer, f"{text} {needle.answer}") == sample.ids[begin:] + sample.answer_ids
        assert text.endswith(f"\n\nQuestion: {needle.question}\nAnswer:")
        assert text.count(needle.needle) == 1


def test_haystack_before_needle(tokenizer: PreTrainedTokenizerFast, grid: list[Sample]) -> None:
    """It ends at a sentence end, and has the haystack's own tokens: prompts share their KV up to there."""
    begin = first(tokenizer)
    own = plain(tokenizer, TEXT)
    for sample in grid:
        haystack = sample.ids[begin : sample.insert_at]
        assert haystack == own[: len(haystack)]
        before = tokenizer.decode(haystack, clean_up_tokenization_spaces=False)
        assert TEXT.startswith(before)
        if 0 < sample.depth < 1 and before:
            assert before.rstrip("\n").endswith((".", "!", "?", '."', ".)", '?"', '!"'))
        inserted = tokenizer.decode(sample.ids[sample.insert_at :], clean_up_tokenization_spaces=False)
        assert inserted.lstrip(" ").startswith(NEEDLES[sample.needle].needle)


def test_depth(tokenizer: PreTrainedTokenizerFast, grid: list[Sample]) -> None:
    for sample in grid:
        needle = NEEDLES[sample.needle]
        if sample.depth == 0:
            assert sample.insert_at == first(tokenizer)
        if sample.depth == 1:
            tail = tokenizer.decode(sample.ids[sample.insert_at :])
            assert tail.strip() == f"{needle.needle}\n\nQuestion: {needle.question}\nAnswer:"
        assert sample.insert_at <= first(tokenizer) + sample.depth * sample.length
        if sample.length == LENGTHS[-1]:
            assert sample.insert_at > (sample.depth - 0.2) * sample.length


def test_control_tokens_in_a_haystack_are_text(small_tokenizer: PreTrainedTokenizerFast) -> None:
    text = "It ends with </s> here. " * 200
    for sample in samples(small_tokenizer, text, NEEDLES[:1], [500], [0.5]):
        assert small_tokenizer.eos_token_id not in sample.ids


def test_short_haystack_is_not_repeated(small_tokenizer: PreTrainedTokenizerFast) -> None:
    text = "The sun rose over the hills. " * 20
    has = len(plain(small_tokenizer, text))
    with pytest.raises(CapacityError, match=rf"has {has} tokens, a prompt of 900 needs .*--haystack"):
        samples(small_tokenizer, text, NEEDLES, [900], [0.5])


def test_haystack_without_sentences(small_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(CapacityError, match="no sentence ends"):
        samples(small_tokenizer, "word " * 2000, NEEDLES, [900], [0.5])


def test_impossible_grid(small_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UsageError, match=r"depth 1\.5"):
        samples(small_tokenizer, TEXT, NEEDLES, [900], [0.5, 1.5])
    with pytest.raises(UsageError, match="length 40"):
        samples(small_tokenizer, TEXT, NEEDLES, [40], [0.5])


def test_is_answer() -> None:
    answer = "a bowl of warm barley and honey"
    assert is_answer(" A bowl of WARM barley, and honey.\nThe", answer)
    assert is_answer("warm barley and honey", answer)  # 4 of 7
    assert not is_answer("barley and honey", answer)  # 3 of 7
    assert not is_answer("two words", "two other words too")  # a half is not more than a half
    assert not is_answer("bowl bowl bowl bowl bowl", answer)
    assert not is_answer("", answer)


@given(st.text(), st.sampled_from([needle.answer for needle in NEEDLES]))
def test_whole_answer_is_always_accepted(noise: str, answer: str) -> None:
    assert is_answer(f"{noise} {answer} {noise}", answer)


def test_default_haystack() -> None:
    haystack = load_haystack()
    assert haystack.name == "topics"
    assert haystack.sha256 == digest_text(haystack.text)
    assert len(haystack.text) > 300_000


def test_haystack_sources(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("Second.")
    (tmp_path / "a.txt").write_text("First.")
    (tmp_path / "c.md").write_text("Not read.")
    (tmp_path / "rows.jsonl").write_text('{"body": "One."}\n\n{"body": "Two."}\n')
    assert load_haystack(tmp_path).text == "First.\n\nSecond."
    assert load_haystack(tmp_path).name == tmp_path.name
    assert load_haystack(tmp_path / "b.txt")[:2] == ("b.txt", "Second.")
    assert load_haystack(tmp_path / "rows.jsonl", field="body").text == "One.\n\nTwo."
    with pytest.raises(MissingError, match=r"rows\.jsonl:1: no column text \(there are: body\)"):
        load_haystack(tmp_path / "rows.jsonl")
    with pytest.raises(MissingError, match=r"none\.txt"):
        load_haystack(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("content", "expected"), [(b"", "is empty"), (b" \n", "is empty"), (b"a\0b", "binary"), (b"caf\xe9", "not UTF-8")]
)
def test_damaged_haystack(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    for source in (tmp_path / "bad.txt", tmp_path):
        with pytest.raises(MissingError, match=rf"bad\.txt: .*{expected}"):
            load_haystack(source)
