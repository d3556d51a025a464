"""Calibration prompts: documents cut or fitted to one context length."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from dustin_profile.choices import Template
from dustin_profile.documents import Columns, Document, load_documents
from dustin_profile.encoder import PlainEncoder
from dustin_runtime.errors import MissingError, UsageError
from dustin_runtime.files import digest, digest_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Calibration", "Columns", "Document", "Prompt", "load_documents", "segments"]


class Prompt(NamedTuple):
    """One calibration prompt, by token ids."""

    id: str
    source: str
    ids: list[int]
    answer_ids: list[int] | None
    """The given answer as a continuation of `ids`; None where the model's own continuation is wanted."""
    sha256: str
    """Of the ids in decimal, joined by spaces."""


class Calibration(NamedTuple):
    """What a run is calibrated on."""

    prompts: list[Prompt]
    """In the order of the documents; fewer than were asked for where the documents have no more."""
    skipped: int
    """Documents that were looked at and are too short (or whose query alone is too long)."""
    sources: dict[str, str]
    """Documents used: their ids and SHA-256."""
    sha256: str
    """Of all prompts and answers."""


class _Text(NamedTuple):
    """A document's tokens. Compact, because a library of books would be large as lists of Python integers."""

    document: Document
    tokens: array[int]
    """All of a plain text; the finished prompt of a document with a query."""
    pieces: int
    """Prompts to be had: 0 if it is too short."""
    length: int
    """Tokens before anything is cut."""


def segments(
    documents: list[Document],
    tokenizer: PreTrainedTokenizerFast,
    *,
    context: int,
    count: int,
    template: Template = "auto",
) -> Calibration:
    """Make `count` prompts of `context` tokens, the tokenizer's own first special token included. Nothing is random.

    A plain text gives non-overlapping segments of exactly `context` tokens, which begin at multiples of that length
    and are spread evenly over the text; all texts give equally many where they can. A document with a query gives one
    prompt, "context, blank line, query", in the tokenizer's chat template (`auto`: if it has one): its middle is left
    out so that `context` tokens remain, or a few less (as in LongBench, arXiv 2308.14508). Documents with fewer than
    `context` tokens are skipped. If there are more documents than prompts, those taken are spread evenly over them.

    Raises:
        MissingError: no document is long enough; the message names the longest.
        UsageError: `context` or `count` is too small, or template `chat` is asked of a tokenizer without one.
    """
    encoder = PlainEncoder(tokenizer)
    if count < 1 or context <= len(encoder.bos):
        raise UsageError(f"context {context}, {count} prompts: both must be positive")
    if template == "chat" and not tokenizer.chat_template:
        raise UsageError("template chat: the tokenizer has no chat template; use raw")
    chat = bool(tokenizer.chat_template) and template != "raw"
    usable: list[tuple[int, _Text]] = []
    skipped: list[_Text] = []
    for index in _spread(len(documents)):
        document = documents[index]
        if document.query is None:
            tokens = array("i", encoder(document.text))
            length = len(tokens) + len(encoder.bos)
            text = _Text(document, tokens, len(tokens) // (context - len(encoder.bos)), length)
        else:
            text = _fit(document, tokenizer if chat else None, encoder, context)
        if text.pieces:
            usable.append((index, text))
        else:
            skipped.append(text)
        if len(usable) == count:
            break
    if not usable:
        raise _too_short(skipped, context)
    shares = _shares([text.pieces for _, text in usable], count)
    chosen = sorted(zip(usable, shares, strict=True), key=lambda item: item[0][0])
    prompts = [prompt for (_, text), share in chosen for prompt in _prompts(text, share, context, encoder, chat)]
    return Calibration(
        prompts,
        len(skipped),
        {text.document.id: text.document.sha256 for (_, text), _ in chosen},
        digest([[prompt.id, prompt.sha256, prompt.answer_ids] for prompt in prompts]),
    )


def _spread(number: int) -> list[int]:
    """0 … number − 1 so ordered (by reversed bits) that any first few are spread evenly."""
    bits = max(1, (number - 1).bit_length())
    return sorted(range(number), key=lambda index: int(f"{index:0{bits}b}"[::-1], 2))


def _shares(pieces: list[int], count: int) -> list[int]:
    """How many of its pieces each text gives, as equal as possible, `count` together if they suffice."""
    shares = [0] * len(pieces)
    while giving := [index for index, most in enumerate(pieces) if shares[index] < most][:count]:
        for index in giving:
            shares[index] += 1
        count -= len(giving)
    return shares


def _fit(document: Document, chat: PreTrainedTokenizerFast | None, encoder: PlainEncoder, context: int) -> _Text:
    """The prompt of a document with a query, without so much of the middle that it has at most `context` tokens."""
    offsets = encoder.encode(document.text).offsets

    def prompt(kept: int) -> list[int]:
        head, tail = kept - kept // 2, kept // 2
        start = offsets[-tail][0] if tail else len(document.text)
        content = f"{document.text[: offsets[head - 1][1]]}{document.text[start:]}\n\n{document.query}"
        if chat is None:
            return [*encoder.bos, *encoder(content)]
        messages = [{"role": "user", "content": content}]
        rendered = chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(chat.backend_tokenizer.encode(rendered, add_special_tokens=False).ids)

    kept = len(offsets)
    ids = prompt(kept) if kept else []
    length = len(ids)
    while kept > 0 and len(ids) > context:
        kept -= len(ids) - context
        ids = prompt(kept) if kept > 0 else []
    return _Text(document, array("i", ids), int(kept > 0 and length >= context), length)


def _prompts(text: _Text, share: int, context: int, encoder: PlainEncoder, chat: bool) -> Iterator[Prompt]:
    document = text.document
    if document.query is not None:
        answer = None
        if document.answer is not None:
            answer = encoder(document.answer if chat else f"\n\n{document.answer}")
        yield _prompt(document.id, document.source, text.tokens.tolist(), answer)
        return
    width = context - len(encoder.bos)
    for number in ((2 * rank + 1) * text.pieces // (2 * share) for rank in range(share)):
        ids = [*encoder.bos, *text.tokens[number * width : (number + 1) * width]]
        yield _prompt(f"{document.id}#{number:04d}", document.source, ids, None)


def _prompt(id: str, source: str, ids: list[int], answer_ids: list[int] | None) -> Prompt:
    return Prompt(id, source, ids, answer_ids, digest_text(" ".join(map(str, ids))))


def _too_short(skipped: list[_Text], context: int) -> MissingError:
    if not skipped:
        return MissingError("calibration data: no documents; name a file, folder or data set that has some")
    document, _, _, length = max(skipped, key=lambda text: text.length)
    if length >= context:
        return MissingError(f"{document.id}: its query leaves no room for its text; pass more than --context {context}")
    return MissingError(
        f"{document.id}: the longest document has {length} tokens, fewer than --context {context}; "
        f"pass --context {length} or longer texts"
    )
