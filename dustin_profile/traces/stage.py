"""The stage that collects traces, resumable per document."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dustin_profile.choices import Template
from dustin_profile.data import Calibration, Prompt, load_documents, segments
from dustin_profile.dealing import deal, grouped
from dustin_profile.progress import say
from dustin_profile.rundir import first_difference
from dustin_profile.settings import DataSettings
from dustin_profile.traces.collect import Collector, Heads, Prompted, ShortContinuationError, TraceSettings
from dustin_profile.traces.store import TraceStore
from dustin_profile.traces.windows import Windows
from dustin_runtime.errors import ConflictError, MissingError, NothingMeasuredError
from dustin_runtime.loading import Pair
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import check_context
from dustin_runtime.parallel.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from dustin_profile.search.stopping import Decision

TRACES_VERSION = 2
"""Raised when the same inputs would be traced differently: documents of an older version are not mixed in."""


def calibration(
    pair: Pair, settings: DataSettings, offline: bool, asked_by: str = "--context with --continuation"
) -> Calibration:
    """Read the documents and cut the prompts.

    Args:
        asked_by: the options of the command that ask for the tokens, for errors.

    Raises:
        CapacityError: context and continuation exceed a model's range.
        MissingError: the data is absent, damaged, or shorter than the context.
    """
    for shape in (pair.target_shape, pair.draft_shape):
        check_context(shape, settings.context + settings.continuation, asked_by)
    documents = load_documents(settings.data, offline=offline)
    found = segments(
        documents, pair.tokenizer, context=settings.context, count=settings.documents, template=settings.template
    )
    have, asked = len(found.prompts), settings.documents
    if have < asked:
        say(f"{settings.data}: holds {have} prompts of {settings.context} tokens; {asked} were asked for")
    return found


def trace_inputs(
    pair: Pair,
    settings: DataSettings,
    depth: int,
    prompts: Calibration,
    dtype: str,
    heads: dict[str, Heads],
    rows: int,
    team: int = 1,
) -> dict[str, Any]:
    """What traces are made from; `rows` as of `Collector`, `team` ranks that the target is split over."""
    split = {"tensor_parallel": team} if team > 1 else {}  # sums of parts round otherwise than one sum
    return split | {
        "version": TRACES_VERSION,
        "models": pair.provenance() | {"rope": pair.rope.model_dump() if pair.rope else None},
        "dtype": dtype,
        "data": Path(settings.data).name if Path(settings.data).exists() else settings.data,
        "data_sha256": prompts.sha256,
        "documents": len(prompts.prompts),
        "context": settings.context,
        "continuation": settings.continuation,
        "rows": rows,
        "windows": settings.windows,
        "depth": depth,
        "width": settings.width or depth,
        "lookahead": settings.lookahead,
        "stop_ids": sorted(pair.stop_ids()),
        "heads": {name: {str(layer): list(chosen) for layer, chosen in found.items()} for name, found in heads.items()},
    }


def evaluation_heads(pair: Pair, settings: DataSettings, target_heads: Heads) -> Heads:
    """Heads whose mean attention is the truth."""
    if settings.evaluation == "srh":
        return target_heads
    shape = pair.target_shape
    return {layer: list(range(shape.query_heads)) for layer in range(shape.layers)}


def collect_traces(
    folder: Path,
    pair: Pair,
    models: Callable[[], tuple[Decoder, Decoder]],
    dtype: torch.dtype,
    rows: int,
    settings: DataSettings,
    depth: int,
    prompts: Calibration,
    heads: dict[str, Heads],
    overwrite: bool = False,
    ranks: Ranks = ALONE,
    decision: Decision | None = None,
) -> TraceStore:
    """Trace every document that is not traced yet, or as many as it takes to decide.

    Args:
        models: gives target and draft; called if there is something to trace.
        rows: documents that are continued together.
        heads: `history` and `evaluation` of the target, `lookahead` of the draft.
        ranks: that share the documents, in teams if the target is split; the first keeps the manifest and decides.
        decision: when to end before all are traced. It is made anew from what is traced, so that it falls at the same
            document in a run that was cut, and whatever else is traced already.

    Returns:
        All traced documents; with a decision those that it took.

    Raises:
        NothingMeasuredError: no document gave a window, or attention is not finite.
        ConflictError: the folder holds traces made from other inputs, or ranks have different ones.
        PeerError: another rank has ended.
    """
    kind = str(dtype).removeprefix("torch.")
    inputs = trace_inputs(pair, settings, depth, prompts, kind, heads, rows, ranks.team)
    entries = [{"id": p.id, "source": p.source, "sha256": p.sha256} for p in prompts.prompts]
    ranks.agree({f"traces' {name}": value for name, value in inputs.items()})

    def opened() -> list[dict[str, Any]]:
        return TraceStore.open(folder, inputs, entries, overwrite).documents

    def reopened() -> TraceStore:
        return TraceStore(folder, ranks.once(opened), shared=not ranks.alone)

    @cache
    def collector() -> Collector:
        return _collector(pair, models, settings, depth, prompts, heads, rows)

    said: set[int] = set()

    def trace(group: Sequence[int]) -> None:
        asked = [Prompted(prompt.id, prompt.ids, prompt.answer_ids) for prompt in (prompts.prompts[i] for i in group)]
        found = collector().trace_all(asked)
        if not ranks.keeps:
            deque(found, maxlen=0)
            return
        for index, reason in write_each(store, group, found, alone=ranks.team == 1).items():
            said.add(index)
            say(reason)

    def taken() -> TraceStore:
        return store.subset(entries[index]["id"] for index in used)

    store = reopened()
    pending = store.pending()
    used: list[int] = []
    for batch in decision.batches(entries) if decision else [list(range(len(entries)))]:
        used += batch
        if todo := [index for index in pending if index in batch]:
            with ranks.alike(loading=True):
                collector()
            longest_first = sorted(todo, key=lambda index: -len(prompts.prompts[index].ids))
            deal(ranks, "traces", grouped(longest_first, rows, ranks), trace, len)
            store = reopened()
            for index in todo:
                if index not in said and (reason := store.documents[index]["skipped"]):
                    say(reason)
        if decision and len(used) >= decision.least and ranks.once(lambda: decision.decided(taken())):
            break
    store = taken()
    if not len(store):
        nothing = NothingMeasuredError(f"no document gave a window; {store.documents[0]['skipped']}")
        nothing.quiet = ranks.rank > 0
        raise nothing
    if decision:
        ranks.once(lambda: _record(store, decision, len(entries), len(used)))
    return store


def write_each(
    store: TraceStore,
    indices: Sequence[int],
    found: Iterator[Windows | ShortContinuationError],
    alone: bool = True,
) -> dict[int, str]:
    """Store each document while the next is under way.

    Args:
        alone: whether no other rank takes part, which would wait for this one if it ended before the last document.

    Returns:
        By index, why a document was skipped.

    Raises:
        CapacityError: the disk is full; what is stored stays.
    """
    skipped: dict[int, str] = {}
    with ThreadPoolExecutor(1) as writer:
        under_way: list[Future[None]] = []
        for index, windows in zip(indices, found, strict=True):
            if isinstance(windows, ShortContinuationError):
                skipped[index] = str(windows)
                under_way.append(writer.submit(store.skip, index, str(windows)))
            else:
                under_way.append(writer.submit(store.add, index, windows))
            while alone and under_way and under_way[0].done():  # a disk that is full ends this now
                under_way.pop(0).result()
        for writing in under_way:
            writing.result()
    return skipped


def _record(store: TraceStore, decision: Decision, asked: int, used: int) -> None:
    """Keep and say why tracing ended where it did."""
    found = decision.reached(store)
    store.record_stopping(
        {
            "asked_documents": asked,
            "used_documents": used,
            "least_documents": decision.least,
            "decided_within": decision.within,
            "budget": decision.options.budget.k,
            "reached": found,
        }
    )
    reached = "too few to decide on"
    if found:
        gain, hybrid = max(found["could_gain"].values()), found["hybrid_minus_dustin_t"]
        reached = (
            f"other layers or m could gain {gain:.4f} ARR at most,"
            f" hybrid minus history alone is {hybrid['low']:+.4f} to {hybrid['high']:+.4f}"
        )
    say(f"traces: {used} of {asked} documents used; {reached}; within {decision.within:g} was asked for")


def _collector(
    pair: Pair,
    models: Callable[[], tuple[Decoder, Decoder]],
    settings: DataSettings,
    depth: int,
    prompts: Calibration,
    heads: dict[str, Heads],
    rows: int,
) -> Collector:
    target, draft = models()
    return Collector(
        target,
        draft,
        history=heads["history"],
        evaluation=heads["evaluation"],
        lookahead=heads["lookahead"],
        settings=TraceSettings(
            settings.continuation, settings.windows, depth, settings.width or depth, settings.lookahead
        ),
        shared_vocab=pair.shared_vocab,
        stop_ids=pair.stop_ids(),
        # Of all prompts, whatever is left to do: a resumed run computes in the same layout.
        capacity=max(len(prompt.ids) for prompt in prompts.prompts) + settings.continuation,
        rows=rows,
    )


def prompts_of(
    pair: Pair,
    traces: dict[str, Any],
    wanted: Mapping[str, Any],
    data: str | None,
    template: Template,
    offline: bool,
    owner: str = "the baseline",
) -> list[Prompt]:
    """The prompts that documents of earlier traces were cut from, checked by hash.

    Args:
        traces: what they were made from, as `trace_inputs`.
        wanted: by id, entries with the `sha256` of the prompt.
        data: where the documents are, if they came from a file or folder.
        owner: what was measured on them, for errors.

    Raises:
        ConflictError: a prompt is another one now, or the documents are others.
        MissingError: the documents are not there.
    """
    settings = DataSettings(
        data=data or traces["data"],
        context=traces["context"],
        documents=traces["documents"],
        continuation=traces["continuation"],
        template=template,
    )
    try:
        found = {prompt.id: prompt for prompt in calibration(pair, settings, offline).prompts}
    except MissingError as error:
        if data is None:
            raise MissingError(f"{error}; {owner} was measured on {traces['data']}: say where with --data") from None
        raise
    for name, entry in wanted.items():
        if name not in found:
            where = f"--data {data}" if data else settings.data
            measured = f"{owner} was measured on ({traces['data']})"
            raise ConflictError(f"{where}: has no document {name}, which {measured}: say where that is with --data")
        require_same(f"document {name}", entry["sha256"], found[name].sha256, owner)
    return [found[name] for name in wanted]


def require_same(name: str, before: Any, now: Any, owner: str = "the baseline") -> None:
    """Refuse to compare what was made from different inputs.

    Raises:
        ConflictError: names the first field that differs, with both values.
    """
    if found := first_difference(before, now, name):
        field, old, new = found
        had, have = ("none" if old is None else old), ("there is none" if new is None else f"it is {new}")
        raise ConflictError(f"{field}: {owner} has {had}, now {have}: compare like with like, or search again")
