"""The tokenizer inside a GGUF file, rebuilt as the original one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dustin_runtime.errors import ConfigError, MissingError
from dustin_runtime.models.gguf_header import read_header

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Splitter:
    """How text is cut before byte pairs are merged: successive patterns, and what goes with them."""

    patterns: tuple[str, ...]
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    """A piece that is itself a token stays one, whatever the merges say (`ignore_merges`)."""
    bos: bool = False
    """Text begins with the beginning-of-text token unless the file says otherwise."""


_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# `tokenizer.ggml.pre` names a tokenizer; the file holds nothing else about how it splits text. The patterns are
# those of each family's published tokenizer.json; `default` is llama.cpp's own fallback.
_SPLITTERS = {
    "default": _Splitter((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _Splitter((_GPT2,)),
    "smollm": _Splitter((_GPT2,), single_digits=True),
    "qwen2": _Splitter((rf"{_WORDS}|\p{{N}}|{_REST}",), nfc=True),
    "llama-bpe": _Splitter((rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), whole_words=True, bos=True),
    "tekken": _Splitter(
        (
            rf"{_CASED}*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+|{_CASED}+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        whole_words=True,
        bos=True,
    ),
}


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a GGUF file.

    `transformers` converts GGUF tokenizers too, but takes seconds to do so and loses SmolLM2's digit splitting. Unused
    tokens at the end, which pad the embedding, are left out: the tokenizer's length is the vocabulary text can reach.

    Raises:
        MissingError: the file is unreadable, or holds no tokenizer.
        ConfigError: the tokenizer is of a kind that cannot be rebuilt faithfully; it is named.
    """
    metadata = read_header(path).metadata
    tokens, kinds = _vocabulary(path, metadata)
    splitter = _splitter(path, metadata)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = _merges(path, metadata, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splitter.whole_words))
    if splitter.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(splitter)
    tokenizer.decoder = decoders.ByteLevel()
    special = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=special[kind])
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in special
        ]
    )
    names = {
        role: tokens[index]
        for role, key in _ROLES.items()
        if (index := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None and index < len(tokens)
    }
    tokenizer.post_processor = _post_processor(path, metadata, splitter, names, vocabulary)
    result = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)
    result.chat_template = metadata.get("tokenizer.chat_template")
    return result


def _vocabulary(path: Path, metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Tokens and their types, without the unused ones at the end."""
    if (model := metadata.get("tokenizer.ggml.model")) is None:
        raise MissingError(f"{path}: holds no tokenizer (tokenizer.ggml.model is missing); convert the model again")
    if model != "gpt2":
        raise ConfigError(
            f"{path}: tokenizer model {model} is not supported in GGUF files (supported: gpt2, byte-level BPE); "
            "give the folder or hub id with the original tokenizer.json"
        )
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    if not tokens or len(kinds) != len(tokens):
        raise MissingError(f"{path}: {len(tokens)} tokens but {len(kinds)} token types; convert the model again")
    used = max((index + 1 for index, kind in enumerate(kinds) if kind != TokenType.UNUSED), default=0)
    if len(set(tokens[:used])) != used:
        twice = Counter(tokens[:used]).most_common(1)[0][0]
        raise ConfigError(f"{path}: token {twice!r} occurs twice in tokenizer.ggml.tokens; convert the model again")
    return tokens[:used], kinds[:used]


def _merges(path: Path, metadata: Mapping[str, Any], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs to merge, in order. They are checked because the library aborts on a pair that makes no token."""
    merges = []
    for merge in metadata.get("tokenizer.ggml.merges", ()):
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise ConfigError(f"{path}: merge {merge!r} does not make a token of two tokens; convert the model again")
        merges.append((left, right))
    return merges


def _splitter(path: Path, metadata: Mapping[str, Any]) -> _Splitter:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _SPLITTERS:
        raise ConfigError(
            f"{path}: tokenizer.ggml.pre {name or 'is missing'}: not supported (supported: {', '.join(_SPLITTERS)}); "
            "give the folder or hub id with the original tokenizer.json"
        )
    return _SPLITTERS[name]


def _pre_tokenizer(splitter: _Splitter) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitter.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitter.patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _post_processor(
    path: Path, metadata: Mapping[str, Any], splitter: _Splitter, names: Mapping[str, str], ids: Mapping[str, int]
) -> processors.PostProcessor:
    """Keep offsets as they are, leading spaces included, and put the beginning-of-text token first where it belongs."""
    keep_offsets = processors.ByteLevel(trim_offsets=False)
    if metadata.get("tokenizer.ggml.add_eos_token"):
        raise ConfigError(f"{path}: tokenizer.ggml.add_eos_token is not supported: text to be continued has no end")
    if not metadata.get("tokenizer.ggml.add_bos_token", splitter.bos):
        return keep_offsets
    if (bos := names.get("bos_token")) is None:
        raise ConfigError(f"{path}: tokenizer.ggml.bos_token_id is missing, and text must begin with that token")
    special = [(bos, ids[bos])]
    first = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=special)
    return processors.Sequence([keep_offsets, first])
