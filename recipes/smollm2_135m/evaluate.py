"""Measure drafts of one target: `python -m recipes.smollm2_135m.evaluate OUT --draft RUN/draft --draft self:6 ...`.

Acceptance per position and τ through the project's engine, ARR through its search, and the time of a forward pass.
Every figure is kept in `OUT/results.json` as it is made: the same command continues. `OUT/results.md` has the tables.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dustin_profile.progress import say
from dustin_profile.provenance import device_name, versions
from dustin_profile.rundir import first_difference
from dustin_profile.settings import DataSettings, HeadSettings, ModelSettings, SearchSettings
from dustin_profile.texts import TOPICS
from dustin_runtime.errors import ConflictError, MissingError, UsageError
from dustin_runtime.files import read_json, write_json, write_text
from dustin_runtime.loading import Pair, open_pair, pick_device, pick_dtype
from recipes.smollm2_135m.command import run_main
from recipes.smollm2_135m.tables import markdown

if TYPE_CHECKING:
    from dustin_runtime.models.decoder import Decoder

PARTS = ("acceptance", "arr", "timing")


class Models(NamedTuple):
    """A pair, loaded."""

    pair: Pair
    target: Decoder
    draft: Decoder


class Evaluation:
    """Figures by part, each under its keys, written as they are made."""

    def __init__(self, out: Path, inputs: dict[str, Any]) -> None:
        self.out = out
        self.results: dict[str, Any] = {"kind": "dustin-draft-evaluation", "inputs": inputs}
        self.results |= {part: [] for part in PARTS}
        if (path := out / "results.json").exists():
            before = read_json(path)
            if found := first_difference(before["inputs"], inputs, "inputs"):
                raise ConflictError(f"{path}: {found[0]} was {found[1]}, now it is {found[2]}: use another folder")
            self.results = before

    def has(self, part: str, **keys: Any) -> bool:
        """Whether a figure is there."""
        return any(keys.items() <= row.items() for row in self.results[part])

    def add(self, part: str, row: dict[str, Any]) -> None:
        """Keep a figure."""
        self.results[part].append(row)
        write_json(self.out / "results.json", self.results)
        write_text(self.out / "results.md", markdown(self.results))


def main(arguments: argparse.Namespace) -> None:
    """Measure what is missing."""
    texts = {"books": arguments.books, "code": arguments.code, "topics": TOPICS if arguments.topics else None}
    texts = {name: str(value) for name, value in texts.items() if value}
    for value in texts.values():
        if value != TOPICS and not Path(value).exists():
            raise MissingError(f"{value}: no such file or folder")
    parts = arguments.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise UsageError(f"--parts: {unknown[0]} is unknown (known: {', '.join(PARTS)})")
    device = pick_device(arguments.device)
    dtype = pick_dtype(arguments.dtype, device)
    pairs = {draft: open_pair(arguments.target, draft, offline=True) for draft in arguments.draft}
    inputs = {
        "target": next(iter(pairs.values())).provenance()["target"]["sha256"],
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "versions": versions(),
        "new_tokens": arguments.new_tokens,
        "prompts": arguments.prompts,
        "budget": arguments.budget,
    }
    evaluation = Evaluation(arguments.out, inputs)
    contexts, depths = _numbers(arguments.contexts), _numbers(arguments.depths)
    if "acceptance" in parts or "timing" in parts:
        target = next(iter(pairs.values())).load_target(dtype, device)
        for pair in pairs.values():
            models = Models(pair, target, pair.load_draft(target))
            for text, where in texts.items() if "acceptance" in parts else ():
                for context in contexts:
                    _acceptance(evaluation, arguments, models, text, where, context, depths)
            if "timing" in parts:
                _timing(evaluation, models, arguments.timing_context)
    if "arr" in parts:
        for text in arguments.arr_texts.split(","):
            for context in contexts if text in texts else ():
                for name, pair in pairs.items():
                    _recovery(evaluation, arguments, _key(pair), name, text, texts[text], context)
    print(markdown(evaluation.results), end="")


def _key(pair: Pair) -> dict[str, Any]:
    """What a figure is known by: the draft's name, and its weights."""
    return {"draft": pair.draft_id, "sha256": pair.provenance()["draft"]["sha256"][:16]}


def _acceptance(
    evaluation: Evaluation,
    arguments: argparse.Namespace,
    models: Models,
    text: str,
    where: str,
    context: int,
    depths: list[int],
) -> None:
    from dustin_profile.data import load_documents, segments
    from recipes.smollm2_135m.acceptance import acceptance

    keys = [_key(models.pair) | {"text": text, "context": context, "depth": depth} for depth in depths]
    missing = [key for key in keys if not evaluation.has("acceptance", **key)]
    if not missing:
        return
    documents = load_documents(where, offline=True)
    tokenizer, count = models.pair.tokenizer, arguments.prompts
    prompts = segments(documents, tokenizer, context=context, count=count, template="raw").prompts
    for key in missing:
        found = acceptance(
            models.pair,
            models.target,
            models.draft,
            prompts,
            depth=key["depth"],
            new_tokens=arguments.new_tokens,
            rows=arguments.rows,
        )
        evaluation.add("acceptance", key | found)
        say(f"{key['draft']} {text} {context} depth {key['depth']}: tau {found['tau'] or 0:.3f}")


def _timing(evaluation: Evaluation, models: Models, context: int) -> None:
    from recipes.smollm2_135m.acceptance import forward_seconds

    key = _key(models.pair) | {"context": context}
    if not evaluation.has("timing", **key):
        row = {
            "draft_1": forward_seconds(models.draft, context, 1),
            "target_1": forward_seconds(models.target, context, 1),
            "target_5": forward_seconds(models.target, context, 5),
        }
        evaluation.add("timing", key | row)


def _recovery(
    evaluation: Evaluation,
    arguments: argparse.Namespace,
    key: dict[str, Any],
    draft: str,
    text: str,
    where: str,
    context: int,
) -> None:
    from recipes.smollm2_135m.recovery import recovery

    if evaluation.has("arr", **key, text=text, context=context):
        return
    found = recovery(
        arguments.out / "arr" / f"{key['draft'].replace(':', '_')}-{key['sha256']}",
        ModelSettings(
            target=arguments.target, draft=draft, device=arguments.device, dtype=arguments.dtype, offline=True
        ),
        HeadSettings(
            lengths=tuple(_numbers(arguments.needle_lengths)),
            depths=(0.0, 0.5, 1.0),
            needle_count=arguments.needles,
            mode="forced",
        ),
        DataSettings(
            data=where,
            context=context,
            documents=arguments.arr_documents,
            continuation=64,
            windows=8,
            template="raw",
        ),
        SearchSettings(budget=arguments.budget, draft_layers=arguments.draft_layers, held_out=0.5),
        f"{text}-{context}",
    )
    evaluation.add("arr", key | {"text": text, "context": context} | found)
    say(f"{key['draft']} {text} {context}: " + ", ".join(f"{n} {v['mean']:.4f}" for n, v in found["arr"].items()))


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} is no list of numbers") from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="evaluate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("out", type=Path, help="folder for results.json, results.md and the runs of the search")
    made.add_argument("--draft", action="append", required=True, help="folder or self:N; repeat for several")
    made.add_argument("--target", default="smollm2")
    made.add_argument("--books", type=Path, help="file or folder of held-out books")
    made.add_argument("--code", type=Path, help="file of held-out code, such as DATA/heldout-code.txt")
    made.add_argument("--topics", action="store_true", help="also the project's default text, never trained on")
    made.add_argument("--parts", default="acceptance,arr,timing", help="default: %(default)s")
    made.add_argument("--contexts", default="1024,2048,4096,7680", help="default: %(default)s")
    made.add_argument("--depths", default="2,4,6", help="default: %(default)s")
    made.add_argument("--prompts", type=int, default=8, help="per kind of text and context; default: %(default)s")
    made.add_argument("--new-tokens", type=int, default=64, help="per prompt; default: %(default)s")
    made.add_argument("--rows", type=int, default=8, help="prompts at a time; default: %(default)s")
    made.add_argument("--budget", type=int, default=256, help="k of ARR; default: %(default)s")
    made.add_argument("--arr-texts", default="books,code,topics", help="kinds of text for ARR; default: %(default)s")
    made.add_argument("--arr-documents", type=int, default=12, help="per kind and context; default: %(default)s")
    made.add_argument("--draft-layers", type=int, default=2, help="draft layers to choose; default: %(default)s")
    made.add_argument("--needles", type=int, default=6, help="needles of the head search; default: %(default)s")
    made.add_argument("--needle-lengths", default="1024,2048", help="default: %(default)s")
    made.add_argument("--timing-context", type=int, default=4096, help="default: %(default)s")
    made.add_argument("--device", default="auto")
    made.add_argument("--dtype", default="auto")
    return made


if __name__ == "__main__":
    run_main(parser(), main)
