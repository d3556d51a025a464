"""Drift over prompts: every method at every budget generates, all texts of one with one engine; kept text by text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dustin_profile.evaluation.drift import Drift, FullVerification, StepLogits
from dustin_profile.evaluation.drift_tables import draw, markdown
from dustin_profile.evaluation.given_texts import GivenTexts
from dustin_profile.evaluation.repetition import repeated
from dustin_profile.evaluation.rows import RowFile
from dustin_profile.evaluation.runner import Cell, stepper_of
from dustin_profile.evaluation.shared_prompts import groups
from dustin_profile.progress import progress
from dustin_profile.provenance import versions
from dustin_profile.rundir import open_stage
from dustin_profile.statistics import interval
from dustin_runtime.engine import Engine
from dustin_runtime.errors import InterruptedRunError, MissingError, UsageError
from dustin_runtime.files import clear_temporaries, write_json, write_text
from dustin_runtime.generation import Draw, Generation
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.prompt_store import PromptStore

VERSION = 1
"""Raised when the same inputs would give other rows."""
_FIGURES = ("kl", "agreement", "mean_kl", "mean_agreement", "tau", "read", "repeated")
"""What a row says of one text."""


@dataclass(frozen=True)
class Generating:
    """How texts are made and summed up.

    Attributes:
        bucket: tokens of a text whose mean is recorded.
        temperature: 0 is greedy.
        seed: prompt number n draws with seed + n.
        batch: texts that are generated at once.
    """

    bucket: int = 32
    temperature: float = 0.0
    seed: int = 0
    batch: int = 1

    def check(self) -> None:
        """Refuse what cannot be drawn from.

        Raises:
            UsageError: the temperature is negative, or beyond all use.
        """
        if not 0 <= self.temperature <= 1e9:  # which NaN fails too
            raise UsageError(f"--temperature {self.temperature}: give 0, which is greedy, or more, up to 1e9")


def run(
    folder: Path, texts: GivenTexts, cells: Sequence[Cell], how: Generating, overwrite: bool = False
) -> dict[str, Any]:
    """Measure what is not measured yet; write `results.json`, `results.md` and `results.png`.

    Args:
        folder: of this evaluation; a cell's texts are `rows/CELL.jsonl` in it. Cells may come in later.
        texts: its prompts are continued as they are, `texts.tokens` tokens each.

    Returns:
        The document of `results.json`.

    Raises:
        CapacityError: a prompt with its text exceeds a model's context, or memory does not suffice.
        ConflictError: the folder holds what was made from other inputs; names the field.
        InterruptedRunError: Ctrl-C came; what was done is kept.
        MissingError: a result in the folder is damaged.
        NothingMeasuredError: a model computes what is not finite.
    """
    made_from = _made_from(texts, how)
    open_stage(folder, made_from, overwrite, of_config=False)
    clear_temporaries(folder)
    files = {cell: RowFile(folder / "rows" / f"{cell.name}.jsonl") for cell in cells}
    for file in files.values():
        _require_whole(file)
    prompts = texts.prompts.prompts
    waiting = {
        cell: [index for index, prompt in enumerate(prompts) if prompt.id not in file.rows]
        for cell, file in files.items()
    }
    _measure(texts, how, {cell: found for cell, found in waiting.items() if found}, files)
    documents = [
        {
            "id": prompt.id,
            "source": prompt.source,
            "prompt_tokens": len(prompt.ids),
            "cells": {cell.name: {name: files[cell].rows[prompt.id][name] for name in _FIGURES} for cell in cells},
        }
        for prompt in prompts
    ]
    result = {
        "kind": "dustin-drift",
        "inputs": made_from | {"cells": [cell.name for cell in cells]},
        "versions": versions(),
        "summary": {cell.name: _summary(cell, documents, texts.tokens, how.bucket) for cell in cells},
        "documents": documents,
    }
    write_json(folder / "results.json", result)
    write_text(folder / "results.md", markdown(result))
    draw(folder / "results.png", result)
    return result


def _made_from(texts: GivenTexts, how: Generating) -> dict[str, Any]:
    return texts.made_from(VERSION) | {
        "draft_cache": texts.config.draft_cache,
        "bucket": how.bucket,
        "temperature": how.temperature,
        "seed": how.seed,
        "batch": how.batch,
    }


def _require_whole(file: RowFile) -> None:
    for name, row in file.rows.items():
        if absent := set(_FIGURES) - row.keys():
            raise MissingError(
                f"{file.path}: {name} has no {min(absent)}; delete the file to measure its documents again"
            )


def _measure(
    texts: GivenTexts, how: Generating, waiting: Mapping[Cell, Sequence[int]], files: Mapping[Cell, RowFile]
) -> None:
    """Generate, verify in full and keep; models are loaded if there is something to do.

    Args:
        waiting: numbers of the prompts that each cell has still to continue.
    """
    if not waiting:
        return
    target, draft = texts.load()
    prompts = texts.prompts.prompts
    longest = max(len(prompt.ids) for prompt in prompts)
    verifier = FullVerification(target, longest + texts.tokens, texts.pair.shared_vocab)
    with progress("drift", sum(map(len, waiting.values()))) as advance:
        for group, store in _groups(texts, how, list(waiting), target):
            for cell, numbers in waiting.items():
                if todo := [number for number in numbers if number in group]:
                    stepper = stepper_of(
                        cell, texts.config, target, draft, texts.pair.shared_vocab, sampled=how.temperature > 0
                    )
                    engine = Engine(stepper, rows=how.batch, prompts=store)
                    _measure_cell(texts, how, cell, todo, files[cell], engine, verifier, advance)


def _groups(
    texts: GivenTexts, how: Generating, cells: Sequence[Cell], target: Decoder
) -> Iterable[tuple[Sequence[int], PromptStore | None]]:
    """Numbers of prompts that all cells continue before the next ones."""
    lengths = [len(prompt.ids) for prompt in texts.prompts.prompts]
    if len(cells) == 1:
        return [(range(len(lengths)), None)]
    return groups(
        range(len(lengths)),
        lengths,
        texts.pair,
        [cell.method for cell in cells],
        dtype=target.dtype,
        device=target.device,
        batch=how.batch,
    )


def _measure_cell(
    texts: GivenTexts,
    how: Generating,
    cell: Cell,
    numbers: Sequence[int],
    file: RowFile,
    engine: Engine,
    verifier: FullVerification,
    advance: Callable[[float], None],
) -> None:
    """Continue prompts of one cell with its engine."""
    prompts = texts.prompts.prompts
    logits = StepLogits(texts.tokens)

    def keep(place: int, generation: Generation) -> None:
        number = numbers[place]
        found = verifier.drift(prompts[number].ids, generation.tokens, logits.of(place), engine.prompts)
        file.append({"id": prompts[number].id} | _figures(found, generation, how.bucket))
        advance(1)

    _, statistics = engine.generate(
        [prompts[number].ids for number in numbers],
        texts.tokens,
        on_step=logits,
        draws=[Draw(how.temperature, seed=how.seed + number) for number in numbers] if how.temperature else None,
        on_end=keep,
    )
    if statistics.interrupted:
        raise InterruptedRunError(
            f"interrupted; {len(file.rows)} of {len(prompts)} documents of {cell.name} were done and are kept:"
            " run the same command again to continue"
        )


def _figures(found: Drift, generation: Generation, bucket: int) -> dict[str, Any]:
    parts, steps = found.by_tokens(bucket), generation.steps
    return {
        "kl": [kl for kl, _ in parts],
        "agreement": [share for _, share in parts],
        "mean_kl": float(found.kl.mean()),
        "mean_agreement": float(found.agrees.double().mean()),
        "tau": 1 + generation.accepted / steps if steps else None,
        "read": generation.read / steps if steps else None,
        "repeated": repeated(generation.tokens),
    }


def _summary(cell: Cell, documents: Sequence[dict[str, Any]], tokens: int, bucket: int) -> dict[str, Any]:
    """Means over documents, each of which counts the same."""
    rows = [document["cells"][cell.name] for document in documents]
    kl = interval([row["mean_kl"] for row in rows], seed=0)
    ends = [min(begin + bucket, tokens) for begin in range(0, tokens, bucket)]
    return {
        "method": cell.method,
        "budget": cell.budget,
        "kl": kl._replace(low=None if kl.low is None else max(kl.low, 0.0))._asdict(),  # it is never negative
        "agreement": interval([row["mean_agreement"] for row in rows], seed=0, share=True)._asdict(),
        "by_tokens": [
            {"tokens": end} | {name: _mean([row[name][place] for row in rows]) for name in ("kl", "agreement")}
            for place, end in enumerate(ends)
        ],
        "tau": _mean([row["tau"] for row in rows]),
        "read": _mean([row["read"] for row in rows]),
        "repeated": _mean([row["repeated"] for row in rows]),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
