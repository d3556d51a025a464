"""Prompts from the command line, text files and JSONL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dustin_runtime.errors import MissingError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def gather_prompts(texts: Sequence[str], files: Sequence[Path], jsonl: Path | None, field: str) -> list[str]:
    """All prompts in order: texts, whole files, then rows of a JSONL file.

    Raises:
        UsageError: there is none, or one is not Unicode.
        MissingError: a file is absent, empty or not text, or a row has no such field; names file and line.
    """
    found = [_unicode(text, index) for index, text in enumerate(texts)]
    found += [_read(path) for path in files]
    if jsonl:
        for number, line in enumerate(_read(jsonl).split("\n"), start=1):
            if line.strip():
                found.append(_row(line, field, f"{jsonl}:{number}"))
    if not found:
        raise UsageError("no prompt: give text as arguments, --file or --jsonl")
    return found


def encode(tokenizer: PreTrainedTokenizerFast, text: str, chat: bool, limit: int | None) -> list[int]:
    """Token ids of a prompt.

    Args:
        chat: render it as a user's message in the tokenizer's chat template.
        limit: keep only the first tokens.

    Raises:
        UsageError: the tokenizer has no chat template.
    """
    if chat:
        if not tokenizer.chat_template:
            raise UsageError("--chat: the tokenizer has no chat template")
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=not chat)
    return ids[:limit]


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise MissingError(f"{path}: not UTF-8 text") from None
    except OSError as error:
        raise MissingError(f"{path}: cannot be read ({error.strerror})") from None
    if not text.strip() or "\0" in text:
        raise MissingError(f"{path}: {'binary' if text.strip() else 'empty'}; give a text file")
    return text


def _row(line: str, field: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MissingError(f"{where}: not JSON ({getattr(error, 'msg', error)})") from None
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        raise MissingError(f"{where}: has no text field '{field}'; name it with --field")
    text: str = value[field]
    if _half_a_character(text):
        raise MissingError(f"{where}: '{field}' holds half a surrogate pair, which is no text")
    return text


def _unicode(text: str, index: int) -> str:
    if _half_a_character(text):
        raise UsageError(f"prompt {index}: is not UTF-8 text")
    return text


def _half_a_character(text: str) -> bool:
    """Whether it cannot be encoded: Python puts bytes of a command line that are no text into lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
