"""What evaluations on given texts share: prompts with a text behind them, and one file of results per document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dustin_profile.data import Calibration, Prompt
from dustin_profile.progress import progress, say
from dustin_profile.rundir import open_stage, read_part
from dustin_runtime.config import DustinConfig
from dustin_runtime.errors import MissingError
from dustin_runtime.files import clear_temporaries, write_json
from dustin_runtime.loading import Pair
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import check_context

Models = tuple[Decoder, Decoder]


@dataclass(frozen=True)
class GivenTexts:
    """Where an evaluation takes its texts and models from.

    Attributes:
        load: gives target and draft; called if there is something to measure.
        tokens: of text per document, at most.
        inputs: what else the result depends on, for the record.
        kv_dtype: of the target's cache that policies read (`Stepper`).
        temperature: at which total variation is measured.
    """

    pair: Pair
    config: DustinConfig
    load: Callable[[], Models]
    prompts: Calibration
    tokens: int
    inputs: dict[str, Any]
    kv_dtype: torch.dtype | None = None
    temperature: float = 1.0

    def made_from(self, version: int) -> dict[str, Any]:
        """What results are made from, whatever the evaluation."""
        return {
            "version": version,
            "models": self.pair.provenance(),
            "rope": self.pair.rope.model_dump() if self.pair.rope else None,
            "data_sha256": self.prompts.sha256,
            "tokens": self.tokens,
            "depth": self.config.depth,
            "selection": self.config.selection.model_dump(mode="json"),
        } | self.inputs

    def usable(self) -> list[tuple[int, Prompt]]:
        """Documents with something to verify, and their numbers: the first token of a text comes from the prefill.

        Raises:
            CapacityError: a document exceeds a model's context.
            MissingError: there is none.
        """
        found = []
        for index, prompt in enumerate(self.prompts.prompts):
            ids, text = split(prompt, self.tokens)
            for shape in (self.pair.target_shape, self.pair.draft_shape):
                check_context(shape, len(ids) + len(text), f"--context: {prompt.id} with its text")
            if ids and len(text) > 1:
                found.append((index, prompt))
            else:
                say(f"{prompt.id}: left out, its text has {len(text)} tokens and 2 are the least")
        if not found:
            raise MissingError("no document has a text of 2 tokens or more behind its prompt; give other --data")
        return found


def split(prompt: Prompt, tokens: int) -> tuple[list[int], list[int]]:
    """A prompt and the text behind it: the given answer, or a plain text's last tokens."""
    if prompt.answer_ids:
        return prompt.ids, prompt.answer_ids[:tokens]
    return prompt.ids[:-tokens], prompt.ids[-tokens:]


def per_document(
    folder: Path,
    texts: GivenTexts,
    made_from: dict[str, Any],
    overwrite: bool,
    title: str,
    units: int,
    measure: Callable[[Models, Prompt, Callable[[float], None]], dict[str, Any]],
    whole: Callable[[dict[str, Any]], bool],
) -> list[dict[str, Any]]:
    """Measure every document that is not measured yet, and read all results.

    Args:
        folder: of this evaluation; a document's result is `document-NNNN.json` in it.
        title: of the progress.
        units: of work per document; `measure` is given the function that reports them.
        whole: whether an entry is a result.

    Raises:
        ConflictError: the folder holds what was made from other inputs; names the field.
        CapacityError: a document exceeds a model's context, or memory does not suffice.
        MissingError: no document has a text to verify, or a result in the folder is damaged.
    """
    usable = texts.usable()
    open_stage(folder, made_from, overwrite, of_config=False)
    clear_temporaries(folder)
    files = {folder / f"document-{index:04d}.json": prompt for index, prompt in usable}
    if pending := [file for file in files if not file.exists()]:
        models = texts.load()
        with progress(title, len(pending) * units) as advance:
            for file in pending:
                write_json(file, measure(models, files[file], advance))
    return [read_part(file, "measure its document again", whole) for file in files]
