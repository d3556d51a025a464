"""Tokenizers: loading them without running model code, and proving that two of them are the same."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dustin_runtime.errors import ConfigError, MissingError
from dustin_runtime.files import digest
from dustin_runtime.models.gguf_tokenizer import gguf_tokenizer

# Equal vocabularies may still cut text differently. Each line is one way in which real tokenizers disagree.
_PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "In 1899, 3.14159 and 1,000,000; v2.5.1 at 12:30",
    "year  1899\n\n  42",
    "  leading and trailing  \t tabs\t\n\n\n newlines \r\n ",
    "def f(x):\n    return {'a': x[0] != None}  # don't",
    "I'M sure they'll say it's WE'VE",
    "café cafe\u0301 naïve Ångström",
    "漢字かな交じり文、한국어 текст العربية",
    "½ ² Ⅻ १२३ ①",
    "🙂👍🏽 → ∑ “quotes” …",
    "<|im_start|>user\n<|endoftext|></s><|eot_id|>",
)
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>")


def load_tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model folder or a GGUF file.

    Raises:
        MissingError: there is none, or it is damaged.
        ConfigError: it is of a kind that cannot be rebuilt faithfully.
    """
    if not source.is_dir():
        return gguf_tokenizer(source)
    # A tokenizer.json is complete. Read by itself, it cannot be overruled by the class that tokenizer_config.json
    # names: GPT2Tokenizer, for one, puts its own splitter in place of SmolLM2's.
    loader = PreTrainedTokenizerFast if (source / "tokenizer.json").is_file() else AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(str(source), local_files_only=True, trust_remote_code=False, use_fast=True)
    except Exception as error:  # what the library raises depends on what is wrong, down to Exception itself
        reason = str(error).strip().split("\n")[0]
        raise MissingError(f"{source}: no usable tokenizer ({reason}); a tokenizer.json is needed") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"{source}: only a slow tokenizer, without text offsets; a tokenizer.json is needed")
    return tokenizer


def compare_tokenizers(target: PreTrainedTokenizerFast, draft: PreTrainedTokenizerFast) -> int:
    """Number of ids that the two share: every id below it is the same token in both, and both cut text alike.

    Raises:
        ConfigError: they differ; it names the first differing token, or a text that they cut differently.
    """
    ours, theirs = _tokens(target), _tokens(draft)
    shared = min(len(ours), len(theirs))
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            raise ConfigError(
                f"tokenizers differ at token {index}: {one!r} in the target, {other!r} in the draft; "
                "a pair must share its tokenizer"
            )
    for text, cut, other_cut in zip(_PROBES, _probe(target), _probe(draft), strict=True):
        if cut != other_cut:
            at = next(at for at in count() if cut[at : at + 1] != other_cut[at : at + 1])
            raise ConfigError(
                f"tokenizers have the same tokens but cut {text!r} differently: token {at} is {_name(ours, cut, at)} "
                f"in the target, {_name(theirs, other_cut, at)} in the draft; a pair must share its tokenizer"
            )
    return shared


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 over the tokens in order and over how some texts are cut: equal hashes, equal token ids."""
    return digest({"tokens": _tokens(tokenizer), "probes": _probe(tokenizer)})


def stop_ids(tokenizer: PreTrainedTokenizerFast, generation_config: Mapping[str, Any] | None) -> set[int]:
    """Ids that end a generated text: the model's end of text and the end of a turn.

    Raises:
        ConfigError: the generation config's `eos_token_id` is neither an id nor a list of them.
    """
    configured = (generation_config or {}).get("eos_token_id")
    ids = configured if isinstance(configured, list) else [configured]
    if not all(index is None or type(index) is int for index in ids):
        raise ConfigError(f"generation_config.json: eos_token_id {configured!r} is neither an id nor a list of ids")
    added = tokenizer.get_added_vocab()
    found = {*ids, tokenizer.eos_token_id, *(added.get(name) for name in _ENDS)}
    return {index for index in found if index is not None}


def _tokens(tokenizer: PreTrainedTokenizerFast) -> list[str | None]:
    """Tokens by id; None for an id that is no token."""
    ids = {index: token for token, index in tokenizer.get_vocab().items()}
    return [ids.get(index) for index in range(max(ids) + 1)]


def _probe(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False) for text in _PROBES]


def _name(tokens: list[str | None], ids: list[int], at: int) -> str:
    return repr(tokens[ids[at]]) if at < len(ids) else "missing"
