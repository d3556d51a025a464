"""Tokenising text as it stands: no chat template, no special tokens but the tokenizer's own first one."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast


class PlainEncoder:
    """A tokenizer reduced to text → tokens with exact character offsets.

    `bos` holds the special token that the tokenizer puts first by default ([] for most, e.g. Qwen2.5's). It is never
    part of an encoding: who builds a prompt puts it in front once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        first = list(tokenizer("a")["input_ids"])[:1]
        self.bos: list[int] = first if first == [tokenizer.bos_token_id] else []
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        # The post-processor adds special tokens and, in some families (Llama 3), trims spaces from the offsets:
        # " word" would seem to begin one character late.
        self._backend.post_processor = None
        self._backend.encode_special_tokens = True  # "<|im_end|>" inside a book is text, not a control token
        self._backend.no_truncation()
        self._backend.no_padding()

    def __call__(self, text: str) -> list[int]:
        """Token ids of `text`."""
        return list(self.encode(text).ids)

    def encode(self, text: str) -> Encoding:
        """Tokens of `text` with their character offsets; a leading space belongs to its token."""
        encoding: Encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding
