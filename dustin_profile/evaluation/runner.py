"""Runs the items of a task with several methods and budgets; what is done is kept item by item."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dustin_profile.evaluation.rows import RowFile
from dustin_profile.evaluation.shared_prompts import groups
from dustin_profile.evaluation.tasks import Item, Task
from dustin_profile.progress import progress, say
from dustin_profile.provenance import device_kind
from dustin_profile.rundir import keep_inputs
from dustin_runtime.config import DustinConfig, changed
from dustin_runtime.engine import Engine
from dustin_runtime.errors import ConflictError, InterruptedRunError, NothingMeasuredError
from dustin_runtime.files import clear_temporaries, digest
from dustin_runtime.generation import Generation
from dustin_runtime.models.shape import check_context
from dustin_runtime.policies import POLICIES, draft_window, make_policy
from dustin_runtime.prompt_store import PromptStore
from dustin_runtime.step import Stepper
from dustin_runtime.streaming_text import TextStream

if TYPE_CHECKING:
    from dustin_runtime.loading import Pair
    from dustin_runtime.models.decoder import Decoder

VERSION = 2
"""Raised when the same inputs would give other rows."""
CHUNK_TOKENS = 4_000_000
"""Prompt tokens that one call of the engine gets: as Python's lists they take about 160 MB."""


class Cell(NamedTuple):
    """One method with one budget; None for a method that reads everything."""

    method: str
    budget: int | None

    @property
    def name(self) -> str:
        """Such as `vanilla` or `dustin-k512`."""
        return self.method if self.budget is None else f"{self.method}-k{self.budget}"

    @classmethod
    def of(cls, name: str) -> Cell | None:
        """The cell of a name; None if it is not one's."""
        method, _, budget = name.rpartition("-k")
        cell = cls(method, int(budget)) if method and budget.isdecimal() else cls(name, None)
        known = POLICIES.get(cell.method)
        return cell if known and known.needs_selection == (cell.budget is not None) else None

    @property
    def order(self) -> tuple[int, int]:
        """For tables: methods as they are listed, then by budget."""
        return list(POLICIES).index(self.method), self.budget or 0


def make_cells(methods: Sequence[str], budgets: Sequence[int], served: DustinConfig) -> list[Cell]:
    """Every method with every budget, those without a budget once; the config's budget if none is given.

    Raises:
        UsageError: a method is unknown, or a budget leaves nothing to choose.
    """
    cells = []
    for method in dict.fromkeys(methods):
        policy = make_policy(method, served.selection)
        for budget in (budgets or [served.selection.budget]) if policy.needs_selection else [None]:
            if budget is not None:
                changed(served.selection, budget, None)
            cells.append(Cell(method, budget))
    return list(dict.fromkeys(cells))


def stepper_of(
    cell: Cell, served: DustinConfig, target: Decoder, draft: Decoder | None, vocab: int, *, sampled: bool = False
) -> Stepper:
    """What steps with a cell's method and budget, as the configuration serves it.

    Args:
        vocab: ids below it are shared by both models.
        sampled: whether rows may have a temperature.
    """
    served = served.model_copy(update={"selection": changed(served.selection, cell.budget, None)})
    policy = make_policy(cell.method, served.selection)
    window = draft_window(policy, None, served) if policy.drafts else None
    return Stepper(target, draft, policy, policy.selection, served.depth, vocab, draft_budget=window, sampled=sampled)


@dataclass
class Run:
    """Items, and their rows in a folder.

    Attributes:
        batch: items that are generated at once.
        rows: by cell, in the items' order, once `measure` has returned; with those of other cells that an earlier
            run left in the folder.
    """

    folder: Path
    task: Task
    served: DustinConfig
    pair: Pair
    cells: Sequence[Cell]
    device: str
    dtype: torch.dtype
    batch: int = 1
    rows: dict[Cell, list[dict[str, Any]]] = field(default_factory=dict)

    def inputs(self) -> dict[str, Any]:
        """What all rows of the folder have in common. Further methods, budgets and items may come in later."""
        pair, served = self.pair, self.served
        return {
            "version": VERSION,
            "task": self.task.name,
            "items": self.task.inputs,
            "models": pair.provenance() | {"rope": pair.rope.model_dump() if pair.rope else None},
            "stop_ids": sorted(pair.stop_ids()),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": device_kind(self.device),
            "batch": self.batch,
            "depth": served.depth,
            "selection": served.selection.model_dump(mode="json"),
            "draft_cache": served.draft_cache,
        }

    def measure(self) -> None:
        """Generate and score what is not done yet. Models are loaded if there is something to do.

        Raises:
            CapacityError: an item with its output exceeds a model's context, or memory does not suffice.
            ConflictError: the folder holds rows of other inputs, or of an item that was another one.
            InterruptedRunError: Ctrl-C came; what was done is kept.
            NothingMeasuredError: the task has no items, two of one id, or a model computes what is not finite.
        """
        items = self._items()
        keep_inputs(self.folder, self.inputs())
        clear_temporaries(self.folder)
        files = {cell: RowFile(self.folder / "rows" / f"{cell.name}.jsonl") for cell in self.cells}
        hashes = {item.id: item_hash(item) for item in items}
        for cell, file in files.items():
            _require_same(file, cell, hashes)
        waiting = {cell: [item for item in items if item.id not in file.rows] for cell, file in files.items()}
        total = sum(map(len, waiting.values()))
        if total:
            models = self._load()
            with progress(f"eval {self.task.name}", total) as advance:
                for group, store in self._groups([cell for cell in self.cells if waiting[cell]], items):
                    for cell in self.cells:
                        if todo := [item for item in group if item.id not in files[cell].rows]:
                            self._measure(cell, todo, files[cell], models, store, hashes, advance)
        complete = self._others(hashes) | files
        self.rows = {
            cell: [complete[cell].rows[item.id] for item in items]
            for cell in sorted(complete, key=lambda cell: cell.order)
        }

    def _others(self, hashes: dict[str, str]) -> dict[Cell, RowFile]:
        """Cells that are in the folder already and have every item."""
        found = {}
        for path in (self.folder / "rows").glob("*.jsonl"):
            if (cell := Cell.of(path.stem)) and cell not in self.cells:
                file = RowFile(path)
                _require_same(file, cell, hashes)
                if absent := hashes.keys() - file.rows.keys():
                    say(f"{cell.name}: {len(absent)} of {len(hashes)} items are not done; left out of the results")
                else:
                    found[cell] = file
        return found

    def _items(self) -> list[Item]:
        items = list(self.task.items())
        if not items:
            raise NothingMeasuredError(f"task {self.task.name}: has no items; give data, or a higher --limit")
        seen: set[str] = set()
        drafted = any(POLICIES[cell.method].drafts for cell in self.cells)
        for item in items:
            if item.id in seen:
                raise NothingMeasuredError(f"item {item.id}: two items have this id, so their results would be mixed")
            seen.add(item.id)
            for shape in [self.pair.target_shape, *([self.pair.draft_shape] if drafted else [])]:
                check_context(shape, len(item.prompt) + item.new_tokens, f"item {item.id} with its output")
        return items

    def _groups(
        self, cells: Sequence[Cell], items: Sequence[Item]
    ) -> Iterable[tuple[Sequence[Item], PromptStore | None]]:
        if len(cells) == 1:
            return [(items, None)]
        return groups(
            items,
            [len(item.prompt) for item in items],
            self.pair,
            [cell.method for cell in cells],
            dtype=self.dtype,
            device=self.device,
            batch=self.batch,
        )

    def _load(self) -> tuple[Decoder, Decoder | None]:
        say(f"loading target {self.pair.target_id}")
        target = self.pair.load_target(self.dtype, self.device)
        if not any(POLICIES[cell.method].drafts for cell in self.cells):
            return target, None
        say(f"loading draft {self.pair.draft_id}")
        return target, self.pair.load_draft(target)

    def _measure(
        self,
        cell: Cell,
        items: Sequence[Item],
        file: RowFile,
        models: tuple[Decoder, Decoder | None],
        store: PromptStore | None,
        hashes: dict[str, str],
        advance: Callable[[float], None],
    ) -> None:
        """One cell. Its engine's buffers are freed when this returns, before the next one's are reserved."""
        stepper = stepper_of(cell, self.served, *models, self.pair.shared_vocab)
        engine = Engine(stepper, self.pair.stop_ids(), rows=self.batch, prompts=store)
        for chunk in chunks(items):
            texts = _Texts(self.pair, chunk)

            def keep(index: int, generation: Generation, texts: _Texts = texts) -> None:
                seconds = texts.seconds(index)  # before the scoring, which takes a second for long texts
                item = texts.items[index]
                text = texts.finish(index)
                scores = self.task.score(item, text)
                file.append(
                    {
                        "id": item.id,
                        "document": item.document,
                        "group": dict(item.group),
                        "sha256": hashes[item.id],
                        "prompt_tokens": len(item.prompt),
                        "tokens": len(generation.tokens),
                        "finished": generation.finished,
                        "text": text,
                        "scores": scores,
                    }
                    | _figures(generation, seconds)
                )
                advance(1)

            prompts = [list(item.prompt) for item in chunk]
            _, statistics = engine.generate(prompts, chunk[0].new_tokens, on_tokens=texts.feed, on_end=keep)
            if statistics.interrupted:
                done = sum(item.id in file.rows for item in items)
                raise InterruptedRunError(
                    f"interrupted; {done} of {len(items)} items of {cell.name} were done and are kept:"
                    " run the same command again to continue"
                )


class _Texts:
    """The texts of one call of the engine, and when each began."""

    def __init__(self, pair: Pair, items: Sequence[Item]) -> None:
        self.items = items
        self._stream = TextStream(pair.tokenizer, len(items))
        self._began: dict[int, float] = {}

    def feed(self, index: int, tokens: list[int]) -> bool:
        """Take an item's new tokens; True once it has come to one of its stop strings."""
        self._began.setdefault(index, time.perf_counter())
        self._stream.feed(index, tokens)
        stop = self.items[index].stop
        # Decoding all of a text at every step is not free: only where it can end something.
        return bool(stop) and end_of(self._stream.text(index), stop) is not None

    def finish(self, index: int) -> str:
        """An item's whole text, without what follows a stop string."""
        text = self._stream.text(index)
        return text[: end_of(text, self.items[index].stop)]

    def seconds(self, index: int) -> float:
        """Since the item's first token, which comes from its prefill."""
        return time.perf_counter() - self._began[index]


def end_of(text: str, stop: Sequence[str]) -> int | None:
    """Where the first stop string stands behind the line breaks that a text begins with; None if there is none."""
    begin = len(text) - len(text.lstrip("\n"))
    return min((place for word in stop if (place := text.find(word, begin)) >= 0), default=None)


def chunks(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Items that follow each other and may be equally long, as many as one call of the engine should get."""
    chunk: list[Item] = []
    tokens = 0
    for item in items:
        alike = not chunk or chunk[0].new_tokens == item.new_tokens
        if not alike or (chunk and tokens + len(item.prompt) > CHUNK_TOKENS):
            yield chunk
            chunk, tokens = [], 0
        chunk.append(item)
        tokens += len(item.prompt)
    if chunk:
        yield chunk


def item_hash(item: Item) -> str:
    """SHA-256 of all that decides an item's result."""
    return digest([list(item.prompt), item.new_tokens, item.stop, item.answers])


def _figures(generation: Generation, seconds: float) -> dict[str, Any]:
    """How the text came about. None where no step was needed: its first token, from the prefill, was the last.

    `tokens_per_s` is what one reader sees: with a batch, prefills and scoring of other items lie between its tokens.
    """
    steps = generation.steps
    return {
        "steps": steps,
        "tau": 1 + generation.accepted / steps if steps else None,
        "tokens_read": generation.read / steps if steps else None,
        "tokens_per_s": (len(generation.tokens) - 1) / seconds if steps and seconds else None,
    }


def _require_same(file: RowFile, cell: Cell, hashes: dict[str, str]) -> None:
    for name, row in file.rows.items():
        if name in hashes and row.get("sha256") != hashes[name]:
            raise ConflictError(
                f"{file.path}: item {name} was another one (its prompt or references differ) when {cell.name} was"
                " measured; results of different data would be mixed: give another --run-dir"
            )
