"""Turn text into token files: `python -m recipes.smollm2_135m.prepare --books FOLDER --held-out-books FOLDER OUT`.

Writes `OUT/*.safetensors`, `OUT/manifest.json` (what was read, by name and hash), and `OUT/heldout-code.txt`, which
evaluate.py reads. None of it belongs in a repository.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dustin_profile.encoder import PlainEncoder
from dustin_profile.progress import say
from dustin_profile.provenance import versions
from dustin_runtime.files import digest, digest_text, write_json, write_text
from dustin_runtime.models.source import resolve
from dustin_runtime.models.tokenizer import tokenizer_hash
from recipes.smollm2_135m.command import run_main
from recipes.smollm2_135m.data import MANIFEST, SPLITS, write_tokens
from recipes.smollm2_135m.texts import Text, books, code, documentation

_PIECE = 100_000
"""Characters encoded at a time; cut at a blank line, where no token of prose spans."""
HELD_OUT_CODE = "heldout-code.txt"


class Collected:
    """Tokens of one source by split, and what they were made from."""

    def __init__(self, encoder: PlainEncoder, separator: int, most: dict[str, int]) -> None:
        self.encoder, self.separator, self.most = encoder, separator, most
        self.pieces: dict[str, list[NDArray[Any]]] = {split: [] for split in SPLITS}
        self.count = dict.fromkeys(SPLITS, 0)
        self.texts: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}

    def add(self, text: Text, split: str) -> bool:
        """Encode a text unless the split is full; says whether it was taken."""
        if self.count[split] >= self.most[split]:
            return False
        ids = [token for piece in _pieces(text.text) for token in self.encoder(piece)] + [self.separator]
        self.pieces[split].append(np.asarray(ids, dtype=np.uint32))
        self.count[split] += len(ids)
        self.texts[split].append((text.name, digest_text(text.text)))
        return True

    def write(self, folder: Path, source: str) -> dict[str, Any]:
        """Write the streams; returns the manifest's entry. Of many small texts it holds one hash over all."""
        entry: dict[str, Any] = {"texts": {}}
        for split in SPLITS:
            tokens = np.concatenate([*self.pieces[split], np.zeros(0, np.uint32)])
            entry[split] = write_tokens(folder, source, split, tokens)
            texts = self.texts[split]
            found: dict[str, Any] = {"count": len(texts), "sha256": digest(texts)}
            entry["texts"][split] = found | ({"names": dict(texts)} if len(texts) <= 100 else {})
        say(f"{source}: {self.count['train']:,} tokens to train on, {self.count['heldout']:,} held out")
        return entry


def main(arguments: argparse.Namespace) -> None:
    """Read everything, write the folder."""
    tokenizer = resolve(arguments.target, offline=True).tokenizer()
    encoder = PlainEncoder(tokenizer)
    separator = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    if separator is None:  # a tokenizer without it ends texts with its own end
        separator = tokenizer.eos_token_id
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    most = {"train": arguments.tokens, "heldout": arguments.held_out_tokens}
    most_code = most | {"train": arguments.code_tokens}
    sources: dict[str, Any] = {}

    collected = Collected(encoder, separator, most)
    for text in books(arguments.books) if arguments.books else ():
        collected.add(text, "train")
    held_out = list(books(arguments.held_out_books)) if arguments.held_out_books else []
    for text in held_out:  # some of every book
        collected.add(_middle(text, 4 * arguments.held_out_tokens // len(held_out)), "heldout")
    sources["books"] = collected.write(out, "books")

    held_out_code: list[str] = []
    for source, texts in (("code", code()), ("docs", documentation())):
        collected = Collected(encoder, separator, most_code)
        for text in _in_random_order(texts):
            taken = collected.add(text, "heldout" if text.held_out else "train")
            if taken and text.held_out and source == "code":
                held_out_code.append(text.text)
        sources[source] = collected.write(out, source)
    write_text(out / HELD_OUT_CODE, "\n\n".join(held_out_code))
    write_json(
        out / MANIFEST,
        {
            "kind": "dustin-draft-data",
            "tokenizer": tokenizer_hash(tokenizer),
            "separator": separator,
            "versions": versions(),
            "sources": sources,
        },
    )


def _in_random_order(texts: Iterable[Text]) -> list[Text]:
    """By the hash of their names: a limit on tokens then takes some of every package."""
    return sorted(texts, key=lambda text: digest_text(text.name))


def _middle(text: Text, characters: int) -> Text:
    """Half of so many characters to either side of a text's middle."""
    begin = max((len(text.text) - characters) // 2, 0)
    return text._replace(text=text.text[begin : begin + characters])


def _pieces(text: str) -> Iterator[str]:
    begin = 0
    while begin < len(text):
        end = text.find("\n\n", begin + _PIECE)
        end = len(text) if end < 0 else end
        yield text[begin:end]
        begin = end


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="prepare", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("out", type=Path, help="folder to write")
    made.add_argument("--target", default="smollm2", help="whose tokenizer; default: the embedded smollm2")
    made.add_argument("--books", type=Path, help="folder of .txt or .txt.xz files to train on")
    made.add_argument("--held-out-books", type=Path, help="folder of such files to evaluate on")
    made.add_argument("--tokens", type=int, default=48_000_000, help="most tokens of books to train on")
    made.add_argument("--code-tokens", type=int, default=14_000_000, help="most tokens of code, and of documentation")
    made.add_argument("--held-out-tokens", type=int, default=1_000_000, help="most tokens per source held out")
    return made


if __name__ == "__main__":
    run_main(parser(), main)
