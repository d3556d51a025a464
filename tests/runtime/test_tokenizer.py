"""Tokenizers: rebuilt from GGUF as the originals, loaded from folders unchanged, compared before they are paired."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_files import ALPHABET, CONTROL, MERGES, NORMAL, vocabulary, write, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2_REGEX

from dustin_runtime.errors import ConfigError, MissingError
from dustin_runtime.models.gguf_tokenizer import gguf_tokenizer
from dustin_runtime.models.source import resolve
from dustin_runtime.models.tokenizer import compare_tokenizers, load_tokenizer, stop_ids, tokenizer_hash

LLAMA3_REGEX = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
TEXT = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n\t'0189aZé½")), max_size=40)


def pieces(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerFast:
    return load_tokenizer(resolve("smollm2", offline=True).path)


def test_smollm2_splits_numbers_into_digits(smollm2: PreTrainedTokenizerFast) -> None:
    assert pieces(smollm2, "1899") == ["1", "8", "9", "9"]
    # Without the digit splitter the second space would stick to the digit and leave the first one alone.
    assert pieces(smollm2, "in  42") == ["in", "ĠĠ", "4", "2"]
    assert len(smollm2) == 49152


def test_smollm2_special_tokens_are_whole_only_where_written(smollm2: PreTrainedTokenizerFast) -> None:
    assert smollm2.encode("<|im_start|>user") == [1, smollm2.convert_tokens_to_ids("user")]
    assert 1 not in smollm2.encode("< |im_start|>, im_start")
    assert smollm2.encode("Hi") == smollm2.encode("Hi", add_special_tokens=False)
    assert smollm2.decode(smollm2.encode("a<|im_end|>"), skip_special_tokens=True) == "a"
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.pad_token_id) == (1, 2, 2)
    chat = smollm2.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


# Its vocabulary lacks some control characters and the bytes of unassigned planes: they vanish in the original too.
@settings(deadline=None)
@given(text=st.text(st.characters(min_codepoint=32, max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=40))
def test_smollm2_text_survives_and_offsets_cover_it(text: str) -> None:
    tokenizer = CACHE["smollm2"]
    encoded = tokenizer(text, return_offsets_mapping=True)
    assert tokenizer.decode(encoded["input_ids"]) == text
    covered = {at for start, end in encoded["offset_mapping"] for at in range(start, end)}
    assert covered == set(range(len(text)))


@pytest.fixture(scope="module", autouse=True)
def _cache(smollm2: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("gguf")
    for pre in ("default", "gpt-2", "smollm", "qwen2", "llama-bpe", "tekken"):
        path = folder / f"{pre}.gguf"
        CACHE[pre] = gguf_tokenizer(write_tokenizer(path, pre, bos_token_id=len(ALPHABET) + len(MERGES)))
    CACHE["smollm2"] = smollm2


CACHE: dict[str, PreTrainedTokenizerFast] = {}

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
PUBLISHED = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2_REGEX), "isolated"), BYTES]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_REGEX), "isolated"), BYTES]),
}


@settings(deadline=None, max_examples=200)
@given(text=TEXT)
def test_text_is_cut_as_the_published_tokenizers_cut_it(text: str) -> None:
    for pre, published in PUBLISHED.items():
        ours = CACHE[pre].backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert ours == published.pre_tokenize_str(text), pre


def test_families_differ_where_they_should() -> None:
    tool = CACHE["qwen2"].convert_tokens_to_ids("<tool>")
    assert pieces(CACHE["gpt-2"], "1234") == ["123", "4"]
    assert pieces(CACHE["qwen2"], "1234") == ["1", "2", "3", "4"]
    assert pieces(CACHE["llama-bpe"], "1234") == ["<|end|>", "123", "4"]
    assert pieces(CACHE["tekken"], "12") == ["<|end|>", "1", "2"]
    assert CACHE["qwen2"].encode("e\u0301") == CACHE["qwen2"].encode("é")
    assert CACHE["gpt-2"].encode("e\u0301") != CACHE["gpt-2"].encode("é")
    assert CACHE["qwen2"].encode("a<tool>b")[1] == tool
    assert CACHE["qwen2"].decode([tool], skip_special_tokens=True) == "<tool>"


def test_whole_words_ignore_the_order_of_merges(tmp_path: Path) -> None:
    """`abc` is a token that no merge reaches; Llama 3 takes it, GPT-2 cannot."""
    tokens = [*vocabulary([]), ("abc", NORMAL)]
    for pre, expected in (("llama-bpe", ["abc"]), ("gpt-2", ["a", "b", "c"])):
        path = write_tokenizer(tmp_path / f"{pre}.gguf", pre, [], tokens, add_bos_token=False)
        assert pieces(gguf_tokenizer(path), "abc") == expected


def test_padding_of_the_embedding_is_no_vocabulary() -> None:
    tokenizer = CACHE["qwen2"]
    assert len(tokenizer) == len(ALPHABET) + len(MERGES) + 2
    assert "[PAD0]" not in tokenizer.get_vocab()


def test_the_file_decides_about_the_first_token(tmp_path: Path) -> None:
    bos = len(ALPHABET) + len(MERGES)
    with_bos = write_tokenizer(tmp_path / "a.gguf", "qwen2", bos_token_id=bos, add_bos_token=True)
    without = write_tokenizer(tmp_path / "b.gguf", "llama-bpe", bos_token_id=bos, add_bos_token=False)
    assert gguf_tokenizer(with_bos).encode("a")[0] == bos
    assert gguf_tokenizer(without).encode("a")[0] != bos
    with pytest.raises(ConfigError, match="bos_token_id"):
        gguf_tokenizer(write_tokenizer(tmp_path / "c.gguf", "llama-bpe"))


def test_unknown_kinds_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    with pytest.raises(ConfigError, match=r"deepseek-v3.*smollm"):
        gguf_tokenizer(write_tokenizer(path, "deepseek-v3"))
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.pre is missing"):
        gguf_tokenizer(write_tokenizer(path, None))
    with pytest.raises(ConfigError, match="model llama is not supported"):
        gguf_tokenizer(write_tokenizer(path, "default", model="llama"))
    with pytest.raises(ConfigError, match="'b' occurs twice"):
        gguf_tokenizer(write_tokenizer(path, "gpt-2", [], [("a", NORMAL), ("b", NORMAL), ("b", CONTROL)]))
    with pytest.raises(ConfigError, match="merge 'a b'"):
        gguf_tokenizer(write_tokenizer(path, "gpt-2", ["a b"], [("a", NORMAL), ("b", NORMAL)]))
    with pytest.raises(MissingError, match="no tokenizer"):
        gguf_tokenizer(write(path, {}, {}))


def test_folder_keeps_its_tokenizer_whatever_class_it_names(smollm2: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """SmolLM2 names GPT2Tokenizer, for which transformers 5 puts its own splitter in place of the file's."""
    smollm2.save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}))
    loaded = load_tokenizer(tmp_path)
    assert compare_tokenizers(smollm2, loaded) == 49152
    assert tokenizer_hash(smollm2) == tokenizer_hash(loaded)
    assert loaded.chat_template == smollm2.chat_template
    assert loaded.eos_token_id == 2


def test_folder_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    tokens = {token: index for index, (token, _) in enumerate(vocabulary())}
    (tmp_path / "vocab.json").write_text(json.dumps(tokens))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert pieces(load_tokenizer(tmp_path), "the 1234") == ["t", "he", "Ġ", "123", "4"]


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_absent_or_damaged_tokenizer_files_are_one_line(content: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(MissingError, match="tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_no_code_of_a_model_runs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own"}))
    auto = {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(auto))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(MissingError):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_padded_vocabularies_pair_at_the_smaller_one(tmp_path: Path) -> None:
    longer = [*vocabulary()[:-2], ("<extra>", CONTROL)]
    target = gguf_tokenizer(write_tokenizer(tmp_path / "t.gguf", "qwen2", tokens=longer))
    assert compare_tokenizers(target, CACHE["qwen2"]) == len(longer) - 1
    assert compare_tokenizers(CACHE["qwen2"], target) == len(longer) - 1
    assert tokenizer_hash(target) != tokenizer_hash(CACHE["qwen2"])


def test_first_differing_token_is_named(tmp_path: Path) -> None:
    tokens = vocabulary()
    at = len(ALPHABET) + 3
    tokens[at : at + 2] = tokens[at : at + 2][::-1]
    other = gguf_tokenizer(write_tokenizer(tmp_path / "t.gguf", "qwen2", tokens=tokens))
    with pytest.raises(ConfigError, match=rf"token {at}: '12' in the target, '123' in the draft"):
        compare_tokenizers(CACHE["qwen2"], other)


@pytest.mark.parametrize("change", ["merges", "splitter", "normalizer"])
def test_equal_vocabularies_that_cut_differently_are_refused(change: str, tmp_path: Path) -> None:
    pre = {"merges": "qwen2", "splitter": "llama-bpe", "normalizer": "smollm"}[change]
    merges = [merge for merge in MERGES if change != "merges" or merge != "Ġt he"]
    path = write_tokenizer(tmp_path / "t.gguf", pre, merges, vocabulary(), add_bos_token=False)
    with pytest.raises(ConfigError, match="same tokens but cut"):
        compare_tokenizers(CACHE["qwen2"], gguf_tokenizer(path))


def test_hash_is_the_same_in_every_process(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "t.gguf", "qwen2")
    script = (
        "import sys; from pathlib import Path; from dustin_runtime.models.tokenizer import *\n"
        "print(tokenizer_hash(load_tokenizer(Path(sys.argv[1]))))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", script, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == tokenizer_hash(load_tokenizer(path))


def test_stop_ids_are_the_ends_of_text_and_of_turns(smollm2: PreTrainedTokenizerFast) -> None:
    assert stop_ids(smollm2, None) == {0, 2}
    assert stop_ids(smollm2, {"eos_token_id": [7, 2]}) == {0, 2, 7}
    assert stop_ids(smollm2, {"eos_token_id": 9}) == {0, 2, 9}
    with pytest.raises(ConfigError, match="eos_token_id"):
        stop_ids(smollm2, {"eos_token_id": "two"})


@pytest.mark.qwen
def test_real_qwen_tokenizers_are_one_and_upstreams() -> None:
    folder = os.environ.get("DUSTIN_QWEN_PAIR")
    if not folder:
        pytest.skip("DUSTIN_QWEN_PAIR is not set")
    small, large = (load_tokenizer(next(Path(folder).glob(f"*-{size}-*.gguf"))) for size in ("0.5B", "1.5B"))
    assert compare_tokenizers(large, small) == 151665
    assert tokenizer_hash(large) == tokenizer_hash(small)
    assert small.encode("Hello, world! 12") == [9707, 11, 1879, 0, 220, 16, 17]
    assert stop_ids(small, None) == {151643, 151645}
