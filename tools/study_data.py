"""Documents of five kinds for studies of selection rules: two JSONL files each, the same for the same sources.

Every second document goes to KIND.jsonl, the others to KIND-other.jsonl: fit on one, measure on the other.

python tools/study_data.py --books FOLDER --news multi_news.jsonl -o FOLDER

books: novels and essays, a text file each. code: modules of this Python's own library. documentation: its reference
topics. retrieval: generated facts scattered over a book, with a question about eight of them and its answer.
summaries: sets of news articles (LongBench's multi_news) up to a length, with the reference summary of the last set.
"""

from __future__ import annotations

import argparse
import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from dustin_profile.evaluation.draw import Draw
from dustin_profile.evaluation.facts import make_facts
from dustin_profile.texts import read_text, text_files, topics
from dustin_runtime.errors import DustinError
from dustin_runtime.files import write_text

FACTS, ASKED = 32, 8
Row = dict[str, str]


def books(folder: Path, count: int, characters: int) -> Iterator[Row]:
    """The middle of each book."""
    files = list(text_files(folder))
    for file in files[:: max(len(files) // count, 1)][:count]:
        text = read_text(file)
        begin = (len(text) - characters) // 2
        yield {"text": text[begin : begin + characters]}


def code(count: int, characters: int) -> Iterator[Row]:
    """Modules that are long enough, from their beginning."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = [path for path in sorted(folder.glob("*.py")) if path.stat().st_size >= characters]
    for path in found[:: max(len(found) // count, 1)][:count]:
        yield {"text": read_text(path)[:characters]}


def documentation(count: int, characters: int) -> Iterator[Row]:
    """Stretches of the reference topics, apart from each other as far as they are long enough."""
    text = topics()
    stride = (len(text) - characters) // max(count - 1, 1)
    for number in range(count):
        yield {"text": text[number * stride : number * stride + characters]}


def retrieval(folder: Path, count: int, characters: int) -> Iterator[Row]:
    """Facts behind sentence ends, one in each of as many stretches of a book."""
    files = list(text_files(folder))
    for number in range(count):
        text = read_text(files[number % len(files)])[20_000:][:characters]
        facts = make_facts("multi-value", Draw(0, "study", number), FACTS, ASKED, text.lower())
        ends = [match.end() for match in re.finditer(r"\. (?=[A-Z])", text)]
        parts, begin = [], 0
        for place, statement in enumerate(facts.statements):
            at = next((end for end in ends if end >= (place + 0.5) / FACTS * len(text)), len(text))
            parts += [text[begin:at], statement + " "]
            begin = at
        context = "".join([*parts, text[begin:]])
        yield {"context": context, "query": facts.tail.strip(), "answer": facts.reply.strip()}


def summaries(path: Path, count: int, characters: int) -> Iterator[Row]:
    """Sets of articles one after the other, the asked one last."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    used = 0
    for _ in range(count):
        sets: list[str] = []
        while sum(map(len, sets)) < characters:
            row = rows[used % len(rows)]
            sets.append(row["context"].replace("NEWLINE_CHAR", "\n"))
            used += 1
        context = "\n\n".join(f"News {number}\n{text}" for number, text in enumerate(sets, 1))
        query = f"Write a one-page summary of News {len(sets)}."
        yield {"context": context, "query": query, "answer": row["answers"][0].replace("NEWLINE_CHAR", "\n").strip()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--news", type=Path)
    parser.add_argument("--count", type=int, default=12, help="documents of a kind")
    parser.add_argument("--characters", type=int, default=48_000, help="of a document, at least as far as it has them")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    if given.count < 1 or given.characters < 1000:
        parser.error("--count, --characters: give at least 1 document of 1000 characters")
    size = (given.count, given.characters)
    kinds = {
        "books": books(given.books, *size),
        "code": code(*size),
        "documentation": documentation(*size),
        "retrieval": retrieval(given.books, *size),
    }
    if given.news:
        kinds["summaries"] = summaries(given.news, *size)
    given.output.mkdir(parents=True, exist_ok=True)
    for kind, rows in kinds.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        for name, half in ((kind, lines[::2]), (f"{kind}-other", lines[1::2])):
            write_text(given.output / f"{name}.jsonl", "".join(half))
        print(f"{kind}: {len(lines)} documents")


if __name__ == "__main__":
    try:
        main()
    except DustinError as error:
        raise SystemExit(f"error: {error}") from None
