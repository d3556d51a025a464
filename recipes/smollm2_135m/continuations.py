"""Let the target continue text, as material to learn from: `python -m recipes.smollm2_135m.continuations DATA`.

A draft is asked about the target's own text, which is not a book's: greedy text in particular repeats itself. Prompts
are drawn from the folder's training text (and, for a held-out part, from what is held out there). Prompt and
continuation become one document of the source `own`. Parts are kept as they are finished: the same command continues.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dustin_profile.progress import progress, say
from dustin_profile.rundir import open_stage
from dustin_runtime.engine import Engine
from dustin_runtime.errors import MissingError, UsageError
from dustin_runtime.files import atomic_path, digest
from dustin_runtime.generation import Draw
from dustin_runtime.loading import open_pair, pick_device, pick_dtype
from dustin_runtime.policies import make_policy
from dustin_runtime.step import Stepper
from recipes.smollm2_135m import BEGAN
from recipes.smollm2_135m.command import run_main
from recipes.smollm2_135m.data import (
    SPLITS,
    Mixture,
    Tokens,
    parse_shares,
    read_manifest,
    read_source,
    write_source,
    write_tokens,
)

SOURCE = "own"


class Group(NamedTuple):
    """Documents of one form."""

    prompt: int
    new: int
    share: float
    """Of all new tokens, relative."""


class Part(NamedTuple):
    """Documents that are generated together and written as one file."""

    split: str
    group: Group
    first: int
    """Number of its first document within split and group."""
    documents: int

    @property
    def file(self) -> str:
        return f"{self.split}-{self.group.prompt}+{self.group.new}-{self.first}.safetensors"


def parse_groups(text: str) -> list[Group]:
    """Read `1024+512:2,...`: tokens of the prompt, new tokens, relative share of all new tokens.

    Raises:
        UsageError: not of that form.
    """
    groups = []
    for entry in text.split(","):
        sizes, _, share = entry.partition(":")
        prompt, _, new = sizes.partition("+")
        try:
            groups.append(Group(int(prompt), int(new), float(share or 1)))
        except ValueError:
            raise UsageError(f"--groups {text}: {entry!r}: give PROMPT+NEW:SHARE, such as 1024+512:2") from None
    if min(min(group) for group in groups) <= 0 or len({group[:2] for group in groups}) < len(groups):
        raise UsageError(f"--groups {text}: give positive numbers, and no form twice")
    return groups


def parts(groups: list[Group], tokens: int, split: str, rows: int) -> Iterator[Part]:
    """Documents with `tokens` new tokens in all, at most `rows` to a part."""
    whole = sum(group.share for group in groups)
    for group in groups:
        count = math.ceil(tokens * group.share / whole / group.new) if tokens else 0
        for first in range(0, count, rows):
            yield Part(split, group, first, min(rows, count - first))


class Writer:
    """Generates parts with one target."""

    def __init__(self, engine: Engine, streams: dict[str, dict[str, Tokens]], arguments: argparse.Namespace) -> None:
        self.engine, self.streams = engine, streams
        self.shares = parse_shares(arguments.shares)
        self.temperatures = [float(value) for value in arguments.temperatures.split(",")]
        self.seed, self.separator = arguments.seed, arguments.separator

    def write(self, folder: Path, part: Part) -> int:
        """Generate a part and write it; returns the number of its new tokens."""
        from safetensors.numpy import save_file

        group = part.group
        # A seed of its own for each split and form: their documents begin at different places.
        seed = int(digest([self.seed, part.split, group.prompt, group.new])[:8], 16)
        mixture = Mixture(self.streams[part.split], self.shares, group.prompt, seed)
        numbers = range(part.first, part.first + part.documents)
        prompts = [mixture.block_at(number).tolist() for number in numbers]
        draws = [Draw(self.temperatures[number % len(self.temperatures)], 1.0, seed + number) for number in numbers]
        found, _ = self.engine.generate(prompts, group.new, draws=draws)
        if any(generation.finished is None for generation in found):
            raise KeyboardInterrupt
        documents = [
            np.asarray([*prompt, *generation.tokens, self.separator], np.int32)
            for prompt, generation in zip(prompts, found, strict=True)
        ]
        with atomic_path(folder / part.file) as temporary:
            save_file({"tokens": np.concatenate(documents)}, temporary)
        return sum(len(generation.tokens) for generation in found)


def main(arguments: argparse.Namespace) -> None:
    """Generate what is missing, then join the parts into the source."""
    from safetensors.numpy import load_file

    data: Path = arguments.data
    manifest = read_manifest(data)
    arguments.separator = manifest["separator"]
    device = pick_device(arguments.device)
    groups = parse_groups(arguments.groups)
    shares = parse_shares(arguments.shares)
    if absent := sorted(shares.keys() - manifest["sources"].keys()):
        raise UsageError(f"--shares: {data} has no {absent[0]}")
    pair = open_pair(arguments.target, "self:1", offline=True)
    inputs = {
        "target": pair.target_source.content_hash(),
        "data": digest({name: manifest["sources"][name] for name in sorted(shares)}),
        "shares": arguments.shares,
        "groups": arguments.groups,
        "tokens": [arguments.tokens, arguments.held_out_tokens],
        "temperatures": arguments.temperatures,
        "rows": arguments.rows,
        "seed": arguments.seed,
        "dtype": str(pick_dtype(arguments.dtype, device)).removeprefix("torch."),
    }
    folder = data / "own-parts"
    open_stage(folder, inputs, arguments.overwrite)
    sizes = dict(zip(SPLITS, (arguments.tokens, arguments.held_out_tokens), strict=True))
    # The held-out part first: it is small, and a run that is cut short must have it. Then forms in turn, as one that
    # is cut short should have some of each.
    wanted = [*parts(groups, sizes["heldout"], "heldout", arguments.rows)]
    wanted += sorted(parts(groups, sizes["train"], "train", arguments.rows), key=lambda part: part.first)
    if todo := [part for part in wanted if not (folder / part.file).exists()]:
        target = pair.load_target(pick_dtype(arguments.dtype, device), device)
        policy = make_policy("vanilla", None)
        stepper = Stepper(target, None, policy, None, 0, pair.shared_vocab, sampled=True)
        streams = {
            split: {name: read_source(data, manifest, name, split) for name in shares}
            for split in {part.split for part in todo}
        }
        writer = Writer(Engine(stepper, pair.stop_ids(), rows=arguments.rows), streams, arguments)
        _generate(folder, writer, todo, arguments.time_limit)
    entry: dict[str, object] = {"texts": {"made_with": inputs}}
    for split in SPLITS:
        files = [folder / part.file for part in wanted if part.split == split and (folder / part.file).exists()]
        tokens = np.concatenate([*(load_file(path)["tokens"] for path in files), np.zeros(0, np.int32)])
        entry[split] = write_tokens(data, SOURCE, split, tokens)
        say(f"{SOURCE}, {split}: {len(tokens):,} tokens, prompts included, in {len(files)} parts")
    if not entry["train"]:
        raise MissingError("no part was finished; give more time")
    write_source(data, SOURCE, entry)


def _generate(folder: Path, writer: Writer, todo: list[Part], limit: float | None) -> None:
    """Generate parts until all are there or the next would outlast the limit."""
    slowest = 0.0  # seconds per new token of the slowest part
    with progress("continuations", sum(part.documents * part.group.new for part in todo)) as advance:
        for part in todo:
            size = part.documents * part.group.new
            if limit and time.monotonic() - BEGAN + slowest * size > limit:
                say("no time for another part; the same command continues")
                return
            began = time.monotonic()
            made = writer.write(folder, part)
            seconds = time.monotonic() - began
            slowest = max(slowest, seconds / size)
            say(f"{part.file}: {made:,} tokens in {seconds:.1f} s")
            advance(size)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="continuations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("data", type=Path, help="folder that prepare wrote")
    made.add_argument("--target", default="smollm2")
    made.add_argument("--tokens", type=int, default=4_000_000, help="new tokens to train on; default 4 million")
    made.add_argument("--held-out-tokens", type=int, default=60_000, help="new tokens to evaluate on; default 60,000")
    made.add_argument(
        "--groups",
        default="256+768:2,1024+1024:2,3072+1024:1,7168+1024:0.5",
        help="PROMPT+NEW:SHARE, ...; default %(default)s",
    )
    made.add_argument("--shares", default="books=0.6,code=0.25,docs=0.15", help="of the prompts; default %(default)s")
    made.add_argument("--temperatures", default="0,0,0.7,1", help="taken in turn; default %(default)s")
    made.add_argument("--rows", type=int, default=256, help="prompts at a time; default %(default)s")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--device", default="auto")
    made.add_argument("--dtype", default="auto")
    made.add_argument("--time-limit", type=float, help="seconds after which no further part is begun")
    made.add_argument("--overwrite", action="store_true", help="discard parts that were made from other inputs")
    return made


if __name__ == "__main__":
    run_main(parser(), main)
