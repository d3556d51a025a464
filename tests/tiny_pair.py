"""Two small random models on one tokenizer: whole commands run on them in seconds, and their text means nothing."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 2000
CONTEXT = 4096
SIZES = {"target": (4, 6), "draft": (3, 4)}
"""Layers and query heads."""
KV_HEADS = 2
HEAD_SIZE = 16


class TinyPair(NamedTuple):
    """The models' folders."""

    target: Path
    draft: Path

    @property
    def options(self) -> list[str]:
        """For a command line."""
        return ["--target", str(self.target), "--draft", str(self.draft), "--offline", "--device", "cpu"]


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 2000 tokens, trained on Python's reference topics; it adds no special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from dustin_profile.texts import topics

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([topics()[:100_000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def write_pair(folder: Path, tokenizer: PreTrainedTokenizerFast) -> TinyPair:
    """Write `tiny-target` and `tiny-draft` to `folder`."""
    for seed, side in enumerate(SIZES):
        write_model(folder / f"tiny-{side}", side, seed, tokenizer)
    return TinyPair(folder / "tiny-target", folder / "tiny-draft")


def write_model(folder: Path, side: str, seed: int, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Write one model; weights are large enough that attention is far from uniform."""
    layers, heads = SIZES[side]
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=heads * HEAD_SIZE,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
