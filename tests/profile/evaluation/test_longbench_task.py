"""Prompts as LongBench's own script makes them, and the rows that they are made from."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from dustin_profile.encoder import PlainEncoder
from dustin_profile.evaluation.longbench.averages import averages
from dustin_profile.evaluation.longbench.data import Row, load_rows
from dustin_profile.evaluation.longbench.table import find_task, load_table
from dustin_profile.evaluation.longbench.task import SEAM, LongBench, without_middle
from dustin_profile.texts import topics
from dustin_runtime.errors import MissingError, UsageError
from dustin_runtime.files import digest_text

OFFICIAL = {
    "narrativeqa": "aada7ed24b06",
    "qasper": "0fbdd123fe7f",
    "multifieldqa_en": "20b4666a2de8",
    "hotpotqa": "9ec4ae308865",
    "2wikimqa": "9ec4ae308865",
    "musique": "9ec4ae308865",
    "gov_report": "91c25d585b18",
    "qmsum": "dca23b678fe0",
    "multi_news": "2af3f28c40b9",
    "trec": "0eff8bebdba9",
    "triviaqa": "00a802e6377e",
    "samsum": "a68d88423490",
    "passage_count": "986550b6c610",
    "passage_retrieval_en": "39b96b7fa52b",
    "lcc": "6a1f24cf0bb8",
    "repobench-p": "ee9ec182ea5f",
}
"""SHA-256 of the prompts in LongBench/config/dataset2prompt.json at commit 2e00731 of THUDM/LongBench."""


def row(**changes: Any) -> dict[str, Any]:
    return {
        "input": "Who?",
        "context": "Ann met Bob.",
        "answers": ["Ann"],
        "dataset": "hotpotqa",
        "all_classes": None,
        "_id": "x",
    } | changes


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    return path


def prompt_of(task: LongBench, tokenizer: PreTrainedTokenizerFast) -> str:
    (item,) = task.items()
    return str(tokenizer.decode(list(item.prompt)))


def a_row(context: str = "Ann met Bob.", question: str = "Who?", *answers: str) -> Row:
    return Row(1, context, question, answers or ("Ann",), ())


@pytest.fixture
def chatty(small_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    found = copy.deepcopy(small_tokenizer)
    found.chat_template = "{% for m in messages %}<user>{{ m.content }}</user>{% endfor %}<answer>"
    return found


def test_the_table_is_the_official_one() -> None:
    table = load_table()
    assert {name: digest_text(entry.prompt)[:12] for name, entry in table.items()} == OFFICIAL
    tokens = {name: entry.new_tokens for name, entry in table.items()}
    assert [name for name in tokens if tokens[name] == 512] == ["gov_report", "qmsum", "multi_news"]
    assert [name for name in tokens if tokens[name] == 128] == ["narrativeqa", "qasper", "samsum"]
    assert [name for name in tokens if tokens[name] == 64] == ["multifieldqa_en", "trec", "lcc", "repobench-p"]
    assert sorted(set(tokens.values())) == [32, 64, 128, 512]
    assert [name for name in table if not table[name].chat] == ["trec", "triviaqa", "samsum", "lcc", "repobench-p"]
    assert [name for name in table if table[name].first_line] == ["trec", "triviaqa", "samsum"]
    sizes: dict[str, int] = {}
    for entry in table.values():
        sizes[entry.category] = sizes.get(entry.category, 0) + entry.samples
    assert list(sizes.values()) == [550, 600, 600, 600, 400, 1000]


def test_a_prompt_is_filled_in_and_braces_in_a_text_stay(small_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = {"triviaqa": [a_row("f = {context}", "{x}")]}
    task = LongBench(rows, small_tokenizer, context=4096)
    assert prompt_of(task, small_tokenizer).endswith("some examples.\n\nf = {context}\n\n{x}")


def test_only_tasks_that_are_meant_for_it_get_the_chat_template(chatty: PreTrainedTokenizerFast) -> None:
    for name, template, expected in (
        ("hotpotqa", "auto", True),
        ("hotpotqa", "raw", False),
        ("triviaqa", "auto", False),
        ("lcc", "chat", False),
    ):
        task = LongBench({name: [a_row()]}, chatty, context=4096, template=template)  # type: ignore[arg-type]
        text = prompt_of(task, chatty)
        assert text.startswith("<user>") == text.endswith("</user><answer>") == expected, name


def test_a_long_prompt_loses_its_middle_as_in_the_official_script(small_tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = PlainEncoder(small_tokenizer)
    text = topics()[:3000]
    ids = encoder(text)
    for limit in (16, 101, 256):
        half = limit // 2
        official = small_tokenizer.decode(ids[:half]) + small_tokenizer.decode(ids[-half:])
        assert without_middle(text, encoder, limit) == official
    assert without_middle(text, encoder, len(ids)) == text


def test_a_character_is_not_cut_through(small_tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = PlainEncoder(small_tokenizer)  # which has a token per byte of these
    cut = without_middle("\U0001f40d" * 40, encoder, 30)
    assert set(cut) == {"\U0001f40d"}
    assert len(encoder(cut)) <= 30 + 2 * 3


def test_prompts_fit_the_context_by_default_whatever_surrounds_them(chatty: PreTrainedTokenizerFast) -> None:
    rows = {name: [a_row(topics()[:30_000])] for name in ("hotpotqa", "lcc")}
    for item in LongBench(rows, chatty, context=512).items():
        assert 512 - SEAM - 2 <= len(item.prompt) + item.new_tokens <= 512
    with pytest.raises(UsageError, match="task hotpotqa: the models' context of 48 tokens leaves no room"):
        LongBench({"hotpotqa": [a_row()]}, chatty, context=48)
    with pytest.raises(UsageError, match="--max-length 4: must be at least 16"):
        LongBench({"hotpotqa": [a_row()]}, chatty, context=512, max_length=4)


def test_the_best_reference_counts_and_some_tasks_score_their_first_line(
    small_tokenizer: PreTrainedTokenizerFast,
) -> None:
    rows = {
        "hotpotqa": [a_row("", "", "Bob", "Ann Lee")],
        "triviaqa": [a_row("", "", "Bob", "Ann Lee")],
        "samsum": [a_row("", "", "Ann met Bob")],
    }
    pytest.importorskip("rouge")
    task = LongBench(rows, small_tokenizer, context=4096)
    items = {item.group["task"]: item for item in task.items()}
    text = "\nAnn Lee\nQuestion: who else?"
    assert task.score(items["hotpotqa"], text) == {"score": pytest.approx(4 / 7)}  # 2 * 2 / (5 + 2)
    assert task.score(items["triviaqa"], text) == {"score": 1}
    assert items["samsum"].stop == ("\n",)
    assert task.score(items["samsum"], "Ann met Bob\nDialogue: so") == {"score": pytest.approx(1)}


def test_questions_on_one_context_are_one_document(small_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = {"hotpotqa": [a_row(), a_row(question="Where?"), a_row("Elsewhere.")]}
    first, second, third = LongBench(rows, small_tokenizer, context=4096).items()
    assert first.document == second.document != third.document


def test_rows_come_from_a_folder_a_file_or_parquet(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    entries = [row(), row(dataset="lcc", answers=["x", "y"]), row(input="Where?")]
    mixed = write(tmp_path / "mixed.jsonl", *entries)
    found = load_rows(str(mixed))
    assert {task: [r.number for r in rows] for task, rows in found.items()} == {"hotpotqa": [1, 3], "lcc": [2]}
    assert {task: len(rows) for task, rows in load_rows(str(mixed), limit=1).items()} == {"hotpotqa": 1, "lcc": 1}
    assert list(load_rows(str(mixed), ["lcc"])) == ["lcc"]
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "hotpotqa.jsonl", {k: v for k, v in row().items() if k != "dataset"})
    pandas.DataFrame(entries[1:2]).to_parquet(folder / "lcc.parquet")
    found = load_rows(str(folder))
    assert found["lcc"][0].answers == ("x", "y")
    assert found["hotpotqa"] == [a_row()]


def test_rows_come_from_the_hub_one_part_per_task(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    calls = []

    def load_dataset(*arguments: str, **options: Any) -> list[dict[str, Any]]:
        calls.append((*arguments, options))
        return [row(dataset=arguments[1]) for _ in range(3)]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = load_rows("THUDM/LongBench@v1", ["lcc", "hotpotqa"], limit=2)
    assert {task: len(rows) for task, rows in found.items()} == {"hotpotqa": 2, "lcc": 2}
    wanted = {"split": "test", "revision": "v1"}
    assert calls == [("THUDM/LongBench", "lcc", wanted), ("THUDM/LongBench", "hotpotqa", wanted)]


def test_a_hub_data_set_that_is_not_cached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MissingError, match=r"^nobody/nothing, lcc: is not in the local cache, and --offline forbids"):
        load_rows("nobody/nothing", ["lcc"], offline=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": None}, "column context holds NoneType, text expected"),
        ({"answers": []}, "column answers is empty; a row needs at least one reference"),
        ({"answers": "Ann"}, "column answers holds str, a list of texts expected"),
        ({"answers": [1]}, "column answers holds list, a list of texts expected"),
        ({"dataset": "trec"}, "column all_classes is empty; this task is scored with it"),
        ({"dataset": "passage_retrieval_en"}, "column answers: 'Ann' names no paragraph, as in 'Paragraph 7'"),
    ],
)
def test_a_bad_row_is_named_with_its_column(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "x.jsonl", row(), row(**changes))
    with pytest.raises(MissingError) as error:
        load_rows(str(path))
    assert str(error.value) == f"{path}:2: {message}"


def test_what_is_absent_or_unknown_is_named(tmp_path: Path) -> None:
    no_input = write(tmp_path / "hotpotqa.jsonl", {k: v for k, v in row().items() if k != "input"})
    with pytest.raises(MissingError, match=r"hotpotqa.jsonl:1: no column input \(there are: context, answers"):
        load_rows(str(no_input))
    unknown = write(tmp_path / "x.jsonl", row(dataset="vcsum"))
    with pytest.raises(UsageError, match=r"x.jsonl:1: dataset vcsum: no English task of LongBench"):
        load_rows(str(unknown))
    with pytest.raises(UsageError, match=r"--task quasper: no English task of LongBench; did you mean 'qasper'\?"):
        load_rows(str(tmp_path), ["quasper"])
    with pytest.raises(MissingError, match=r"has no lcc.jsonl; put LongBench's file there"):
        load_rows(str(tmp_path), ["lcc"])
    with pytest.raises(MissingError, match=r"x.jsonl: has no row of lcc"):
        load_rows(str(unknown), ["lcc"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingError, match=r"has no file of a task, such as narrativeqa.jsonl"):
        load_rows(str(tmp_path / "empty"))
    with pytest.raises(MissingError, match=r"--data nowhere: no such file or folder, and not a data set"):
        load_rows("nowhere")
    assert find_task("lcc", "--task").samples == 500


def test_both_averages() -> None:
    def entry(group: dict[str, str], mean: float) -> dict[str, Any]:
        return {"method": "sd", "budget": None, "group": group, "scores": {"score": {"mean": mean}}}

    entries = [
        entry({}, 0.9),
        entry({"category": "single-document QA", "task": "qasper"}, 0.2),
        entry({"category": "single-document QA", "task": "multifieldqa_en"}, 0.4),
        entry({"category": "code", "task": "lcc"}, 0.6),
    ]
    (found,) = averages({"entries": entries})
    assert found["tasks"] == 3
    assert found["plain"] == pytest.approx(0.4)
    assert found["weighted"] == pytest.approx((200 * 0.2 + 150 * 0.4 + 500 * 0.6) / 850)
    assert found["categories"] == {"single-document QA": pytest.approx(100 / 350), "code": pytest.approx(0.6)}
