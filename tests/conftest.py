"""Fixtures that several packages' tests share."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast

# Workers share the cores: a second thread each would wait for its turn at the end of every operation.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 2000 tokens, trained on Python's reference topics; it adds no special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from dustin_profile.texts import topics

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([topics()[:100_000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
