from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dustin_profile.data import Columns, _shares, _spread, load_documents, segments
from dustin_profile.texts import topics
from dustin_runtime.errors import MissingError, UsageError
from dustin_runtime.files import digest_text

TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}\n{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """Two long texts and one that is too short."""
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "long.txt").write_text(topics()[:60_000])
    (folder / "middling.txt").write_text(topics()[100_000:120_000])
    (folder / "short.txt").write_text("Too short. " * 20)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    contexts = [topics()[start : start + size] for start, size in ((0, 9000), (9000, 300), (20000, 12000))]
    lines = [
        {"idx": number, "context": context, "query": f"What is number {number}?", "answer": f"It is {number}."}
        for number, context in enumerate(contexts)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_segments_of_plain_texts(small_tokenizer: PreTrainedTokenizerFast, books: Path) -> None:
    documents = load_documents(str(books), offline=True)
    calibration = segments(documents, small_tokenizer, context=512, count=8)
    assert calibration.skipped == 1
    assert list(calibration.sources) == ["long.txt", "middling.txt"]
    assert calibration.sources["long.txt"] == digest_text((books / "long.txt").read_text())
    assert [prompt.source for prompt in calibration.prompts] == ["long.txt"] * 4 + ["middling.txt"] * 4
    tokens = {name: small_tokenizer((books / name).read_text())["input_ids"] for name in calibration.sources}
    for prompt in calibration.prompts:
        name, number = prompt.id.split("#")
        assert prompt.ids == tokens[name][int(number) * 512 : (int(number) + 1) * 512]
        assert len(prompt.ids) == 512
        assert prompt.answer_ids is None
        assert prompt.sha256 == digest_text(" ".join(map(str, prompt.ids)))
    numbers = [int(prompt.id.split("#")[1]) for prompt in calibration.prompts[:4]]
    steps = {later - earlier for earlier, later in pairwise(numbers)}
    assert max(steps) - min(steps) <= 1
    assert numbers[0] > 0
    assert segments(documents, small_tokenizer, context=512, count=8) == calibration


def test_all_there_is_when_fewer_than_asked(small_tokenizer: PreTrainedTokenizerFast, books: Path) -> None:
    documents = load_documents(str(books), offline=True)
    calibration = segments(documents, small_tokenizer, context=4096, count=1000)
    lengths = [len(small_tokenizer(document.text)["input_ids"]) for document in documents]
    assert len(calibration.prompts) == sum(length // 4096 for length in lengths) < 1000
    assert len({prompt.id for prompt in calibration.prompts}) == len(calibration.prompts)


def test_hash_depends_on_the_prompts(small_tokenizer: PreTrainedTokenizerFast, books: Path) -> None:
    documents = load_documents(str(books), offline=True)
    hashes = {segments(documents, small_tokenizer, context=c, count=n).sha256 for c, n in ((64, 2), (64, 3), (65, 2))}
    assert len(hashes) == 3


def test_first_token_is_counted(small_tokenizer: PreTrainedTokenizerFast) -> None:
    from tokenizers import processors

    backend = small_tokenizer.backend_tokenizer.from_str(small_tokenizer.backend_tokenizer.to_str())
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    document = load_documents("topics", offline=True)[0]
    document = document._replace(text=document.text[:20_000])
    prompts = segments([document], tokenizer, context=100, count=10_000).prompts
    own = small_tokenizer(document.text)["input_ids"]
    assert all(len(prompt.ids) == 100 and prompt.ids[0] == 0 for prompt in prompts)
    assert [token for prompt in prompts for token in prompt.ids[1:]] == own[: len(own) // 99 * 99]


def test_rows_are_cut_in_the_middle(small_tokenizer: PreTrainedTokenizerFast, rows: Path) -> None:
    documents = load_documents(str(rows), offline=True)
    calibration = segments(documents, small_tokenizer, context=1000, count=8)
    assert calibration.skipped == 1
    assert [prompt.id for prompt in calibration.prompts] == ["rows.jsonl#0001", "rows.jsonl#0003"]
    for prompt, document in zip(calibration.prompts, (documents[0], documents[2]), strict=True):
        assert 990 < len(prompt.ids) <= 1000
        text = small_tokenizer.decode(prompt.ids, clean_up_tokenization_spaces=False)
        assert text.endswith(f"{document.text[-900:]}\n\n{document.query}")
        assert text.startswith(document.text[:900])
        assert prompt.answer_ids is not None
        assert small_tokenizer.decode(prompt.answer_ids) == f"\n\n{document.answer}"


def test_chat_template(small_tokenizer: PreTrainedTokenizerFast, rows: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=small_tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    documents = load_documents(str(rows), offline=True)
    prompt = segments(documents, tokenizer, context=800, count=1).prompts[0]
    assert 790 < len(prompt.ids) <= 800
    assert prompt.ids.count(tokenizer.bos_token_id) == 2
    text = tokenizer.decode(prompt.ids, clean_up_tokenization_spaces=False)
    assert text.startswith(f"<s>user\n{documents[0].text[:600]}")
    assert text.endswith(f"{documents[0].query}</s>\n<s>assistant\n")
    assert tokenizer.decode(prompt.answer_ids) == documents[0].answer
    raw = segments(documents, tokenizer, context=800, count=1, template="raw")
    assert raw == segments(documents, small_tokenizer, context=800, count=1)
    with pytest.raises(UsageError, match="chat template"):
        segments(documents, small_tokenizer, context=800, count=1, template="chat")


def test_context_whose_query_fills_it(small_tokenizer: PreTrainedTokenizerFast, rows: Path) -> None:
    documents = [document._replace(query="why " * 200) for document in load_documents(str(rows), offline=True)]
    with pytest.raises(MissingError, match=r"rows.jsonl#000\d: its query leaves no room .*--context 100"):
        segments(documents, small_tokenizer, context=100, count=1)


def test_nothing_is_long_enough(small_tokenizer: PreTrainedTokenizerFast, books: Path) -> None:
    (books / "long.txt").unlink()
    documents = load_documents(str(books), offline=True)
    length = len(small_tokenizer((books / "middling.txt").read_text())["input_ids"])
    with pytest.raises(MissingError, match=rf"middling\.txt: .* {length} tokens, .* pass --context {length} or longer"):
        segments(documents, small_tokenizer, context=100_000, count=4)
    assert segments(documents, small_tokenizer, context=length, count=4).prompts[0].id == "middling.txt#0000"


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 60))
def test_shares_are_as_equal_as_can_be(pieces: list[int], count: int) -> None:
    shares = _shares(pieces, count)
    assert sum(shares) == min(count, sum(pieces))
    for share, most in zip(shares, pieces, strict=True):
        assert share <= most
        assert share == most or share >= max(shares) - 1


@given(st.integers(0, 200))
def test_any_first_few_are_spread(number: int) -> None:
    order = _spread(number)
    assert sorted(order) == list(range(number))
    for few in range(1, number + 1):
        ends = [-1, *sorted(order[:few]), number]
        assert max(later - earlier for earlier, later in pairwise(ends)) <= 4 * number / few + 2


def test_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"text": "A book.", "body": "The long text.", "question": "Why?", "reply": "So.", "query": null}\n'
    )
    plain = load_documents(str(path), offline=True)[0]
    assert (plain.text, plain.query, plain.answer) == ("A book.", None, None)
    document = load_documents(str(path), offline=True, columns=Columns("body", "question", "reply"))[0]
    assert document[1:5] == ("rows.jsonl", "The long text.", "Why?", "So.")
    assert document.sha256 != plain.sha256
    for columns in (
        Columns(context="bodies"),
        Columns(query="bodies"),
        Columns(answer="bodies"),
        Columns(text="bodies"),
    ):
        with pytest.raises(MissingError, match=r"rows\.jsonl:1: no column bodies .*; rename the one to read to it"):
            load_documents(str(path), offline=True, columns=columns)


def test_parquet_equals_jsonl(tmp_path: Path, rows: Path) -> None:
    import pandas

    path = tmp_path / "rows.parquet"
    pandas.read_json(rows, lines=True).to_parquet(path)
    ours, theirs = (load_documents(str(file), offline=True, limit=2) for file in (path, rows))
    assert [document.sha256 for document in ours] == [document.sha256 for document in theirs]
    assert [document.id for document in ours] == ["rows.parquet#0001", "rows.parquet#0002"]
    pandas.DataFrame({"context": ["a", None]}).to_parquet(path)
    with pytest.raises(MissingError, match=r"rows\.parquet:2: column context holds NoneType"):
        load_documents(str(path), offline=True)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"", r"a\.txt: is empty"),
        ("a.txt", b"\x89PNG\0\0", r"a\.txt: is binary"),
        ("a.txt", b"\xff\xfe text", r"a\.txt: is not UTF-8"),
        ("a.jsonl", b"\n\n", r"a\.jsonl: is empty"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2: is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', r"a\.jsonl:2: is list"),
        ("a.jsonl", b'{"text": "x"}\n\xff\n', r"a\.jsonl:2: is not UTF-8"),
        ("a.jsonl", b'{"body": "x", "n": 1}\n', r"a\.jsonl:1: no column context \(there are: body, n\)"),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: column text holds int"),
        ("a.jsonl", b'{"text": "x", "query": ["y"]}\n', r"a\.jsonl:1: column query holds list"),
        ("a.parquet", b"PAR1 not really", r"a\.parquet: is not a parquet file"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(MissingError, match=expected) as raised:
        load_documents(str(path), offline=True)
    assert "\n" not in str(raised.value)


def test_absent_sources(tmp_path: Path) -> None:
    for spec in (str(tmp_path / "none.txt"), "topic", ""):
        with pytest.raises(MissingError):
            load_documents(spec, offline=True)
    with pytest.raises(MissingError, match=r"has no \.txt files"):
        load_documents(str(tmp_path), offline=True)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple[Any, ...]]]:
    """Replaces the hub by one data set with given rows, and records what is asked of it."""
    import datasets
    import huggingface_hub

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def serve(rows: Any) -> list[tuple[Any, ...]]:
        def load_dataset(*arguments: Any, **options: Any) -> Any:
            calls.append((*arguments, options))
            return rows

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, revision: ["sft", "dpo"])
        return calls

    return serve


def test_hub(hub: Callable[[Any], list[tuple[Any, ...]]]) -> None:
    calls = hub([{"context": "Long.", "query": "Why?", "answer": "So."}] * 3)
    documents = load_documents("zai-org/LongReward-10k", offline=False, limit=2)
    load_documents("zai-org/LongReward-10k:dpo@v1.0", offline=False)
    assert calls == [
        ("zai-org/LongReward-10k", {"split": "sft", "revision": None}),
        ("zai-org/LongReward-10k", {"split": "dpo", "revision": "v1.0"}),
    ]
    assert [document.id for document in documents] == ["LongReward-10k#0001", "LongReward-10k#0002"]
    assert documents[0].answer == "So."


def test_hub_cache_of_another_revision(hub: Callable[[Any], list[tuple[Any, ...]]]) -> None:
    class Rows(list[dict[str, str]]):
        cache_files = ({"filename": "/cache/org___set/default/0.0.0/abc123/set-train.arrow"},)

    hub(Rows([{"text": "Long."}]))
    assert len(load_documents("org/set@abc123", offline=True)) == 1
    with pytest.raises(MissingError, match="the local cache has abc123"):
        load_documents("org/set@def456", offline=True)


def test_hub_data_set_that_is_not_cached(hub: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingError, match=r"nobody/nothing:train: is not in the local cache"):
        load_documents("nobody/nothing:train", offline=True)
