"""The stage that finds the heads of one model: resumable per prompt, and independent of interruptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dustin_profile.choices import Credit, Mode
from dustin_profile.dealing import deal, grouped
from dustin_profile.haystack import load_haystack
from dustin_profile.needles import Needle, load_needles
from dustin_profile.progress import say
from dustin_profile.prompts import Sample, is_answer, samples
from dustin_profile.rundir import open_stage
from dustin_profile.settings import HeadSettings
from dustin_profile.srh.ranking import Array, agreement, rank, top_heads
from dustin_profile.srh.score import Prober, Score
from dustin_profile.srh.stopping import batches, overlap
from dustin_profile.srh.store import Entry, Key, ScoreStore, part, read_part, read_prompts
from dustin_runtime.errors import MissingError, NothingMeasuredError
from dustin_runtime.files import digest, read_json, write_json
from dustin_runtime.loading import Pair
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import check_context
from dustin_runtime.parallel.ranks import ALONE, Ranks

HEADS_VERSION = 2
"""Raised when the same inputs would be scored differently: parts of an older version are not mixed in."""


class HeadPrompts:
    """The needle prompts of a run: the same for target and draft."""

    def __init__(self, pair: Pair, settings: HeadSettings) -> None:
        for length in settings.lengths:
            check_context(pair.target_shape, length + settings.steps, f"--length {length}")
            check_context(pair.draft_shape, length + settings.steps, f"--length {length}")
        self.needles: Sequence[Needle] = load_needles(settings.needles)[: settings.needle_count]
        haystack = load_haystack(settings.haystack)
        self.haystack, self.haystack_sha256 = haystack.name, haystack.sha256
        made = samples(pair.tokenizer, haystack.text, self.needles, settings.lengths, settings.depths)
        # Deepest first: what precedes a needle is pure haystack, and stays in the cache for all that follow.
        self.samples = sorted(made, key=lambda s: (-s.length, -s.depth, s.needle))
        self.keys = [Key.of(sample) for sample in self.samples]
        if repeated := len(made) - len({tuple(sample.ids) for sample in made}):
            say(
                f"{repeated} of {len(made)} prompts repeat another, since no sentence ends between some lengths or"
                " depths: they count twice; give these further apart"
            )


def head_inputs(
    pair: Pair,
    dtype: torch.dtype,
    side: str,
    mode: Mode,
    settings: HeadSettings,
    prompts: HeadPrompts,
    rows: int,
    team: int = 1,
) -> dict[str, Any]:
    """What the scores of one model's heads are made from; `team` ranks that it is split over.

    Raises:
        MissingError: weights cannot be read.
    """
    split = {"tensor_parallel": team} if team > 1 else {}  # sums of parts round otherwise than one sum
    return {
        "version": HEADS_VERSION,
        "model": pair.provenance()[side] | {"rope": pair.rope.model_dump() if pair.rope else None},
        "dtype": str(dtype).removeprefix("torch."),
        "mode": mode,
        "lengths": list(settings.lengths),
        "depths": list(settings.depths),
        "steps": settings.steps,
        "rows": rows,
        "stop_ids": sorted(pair.stop_ids()),
        "haystack": prompts.haystack,
        "haystack_sha256": prompts.haystack_sha256,
        "needles_sha256": digest([needle.model_dump() for needle in prompts.needles]),
    } | split


def find_heads(
    folder: Path,
    pair: Pair,
    model: Callable[[], Decoder],
    dtype: torch.dtype,
    side: str,
    mode: Mode,
    settings: HeadSettings,
    prompts: HeadPrompts,
    overwrite: bool = False,
    ranks: Ranks = ALONE,
    rows: int = 1,
) -> Path:
    """Score every head of one model and write its ranking.

    Args:
        folder: of the run's heads; parts go to `folder/side`, the result to `folder/heads-side.json`.
        model: called if there is something to score.
        side: `target` or `draft`.
        ranks: that share the prompts, in teams if the model is split; the first ranks and writes.
        rows: prompts that are continued together.

    Returns:
        The file with the result.

    Raises:
        NothingMeasuredError: no sample was accepted.
        ConflictError: the folder holds scores made from other inputs, or ranks have different ones.
        PeerError: another rank has ended.
    """
    with ranks.alike(loading=True):  # which reads weights to hash them
        inputs = head_inputs(pair, dtype, side, mode, settings, prompts, rows, ranks.team)
    ranks.agree({f"{side} {name}": value for name, value in inputs.items()})
    store = ScoreStore(folder / side, prompts.keys)

    def begin() -> set[Key]:
        open_stage(store.folder, inputs, overwrite)
        return set(store.missing())

    missing = ranks.once(begin)

    @cache
    def prober() -> Prober:
        return _prober(pair, model(), mode, settings, rows, prompts)

    def measure(group: Sequence[Sample]) -> None:
        for sample, score in zip(group, prober().score_all(group), strict=True):
            if ranks.keeps:
                store.add(Key.of(sample), _entry(sample, score))

    def stops() -> bool:
        if used < settings.least_prompts:
            return False
        found = overlap(measured(), settings.credit)
        return found is not None and bool(found["low"] >= settings.stable_overlap)

    def measured() -> list[Entry]:
        """In the order of all prompts, whatever was measured first: sums are then the same bits."""
        return [entry for key, entry in store.entries().items() if key in asked]

    asked: set[Key] = set()
    used = 0
    for batch in batches(prompts.keys) if settings.stop_when_stable else [prompts.keys]:
        asked.update(batch)
        used += len(batch)
        if todo := [sample for sample in prompts.samples if Key.of(sample) in missing.intersection(batch)]:
            with ranks.alike(loading=True):
                prober()
            deal(ranks, f"heads of {side}", grouped(todo, rows, ranks), measure, lambda group: sum(map(_cost, group)))
        if settings.stop_when_stable and ranks.once(stops):
            break
    path = folder / f"heads-{side}.json"

    def end() -> None:
        store.join()
        entries = measured()
        result = _result(entries, settings.credit, len(prompts.needles))
        if not result["accepted"]:
            path.unlink(missing_ok=True)
            flag = "--mode" if side == "target" else "--draft-mode"
            raise NothingMeasuredError(
                f"{side} {inputs['model']['id']}: none of {result['samples']} needles was retrieved:"
                f" rank it with {flag} forced, or use shorter lengths (--length)"
            )
        if settings.stop_when_stable:
            result["stopping"] = {
                "asked_prompts": len(prompts.keys),
                "used_prompts": used,
                "least_prompts": settings.least_prompts,
                "stable_overlap": settings.stable_overlap,
                "top4_overlap": overlap(entries, settings.credit),
            }
        write_json(path, {"kind": "dustin-heads", "side": side, "inputs": inputs, "credit": settings.credit} | result)

    ranks.once(end)
    return path


def read_entries(folder: Path) -> list[dict[str, Any]]:
    """What `find_heads` measured of one model, prompt by prompt; a part of it if it stopped early.

    Args:
        folder: of one side's parts, beside the heads that it gave.

    Raises:
        MissingError: there are none, some are not measured yet, or one is damaged.
    """
    if not (folder / "inputs.json").exists():
        raise MissingError(f"{folder}: no scores of heads; measure them with dustin-profile srh")
    inputs = read_json(folder / "inputs.json")
    entries: list[Entry] = []
    partial = _stopped_early(folder.parent / f"heads-{folder.name}.json")
    for length in inputs["lengths"]:
        for depth in inputs["depths"]:
            path = part(folder, length, depth)
            if path.exists():
                entries += read_part(path)
            elif partial:
                entries += read_prompts(folder, length, depth)
            else:
                raise MissingError(f"{path}: not measured yet; let dustin-profile srh finish")
    return entries


def _stopped_early(heads: Path) -> bool:
    stopping = read_json(heads).get("stopping") if heads.exists() else None
    return bool(stopping and stopping["used_prompts"] < stopping["asked_prompts"])


def read_heads(path: Path) -> dict[int, list[int]]:
    """The first four heads of every layer, from a file that `find_heads` wrote.

    Raises:
        MissingError: absent, or not such a file.
    """
    data = read_json(path)
    if not isinstance(data, dict) or data.get("kind") != "dustin-heads":
        raise MissingError(f"{path}: not a heads file; make one with dustin-profile srh")
    return top_heads(data["ranking"])


def _prober(pair: Pair, model: Decoder, mode: Mode, settings: HeadSettings, rows: int, prompts: HeadPrompts) -> Prober:
    ends = pair.stop_ids()

    def decode(ids: Sequence[int]) -> str:
        return str(pair.tokenizer.decode(list(ids), skip_special_tokens=True))

    def stop(tokens: list[int]) -> bool:
        """An answer is one line; some models begin with an empty one."""
        return tokens[-1] in ends or ("\n" in decode(tokens[-1:]) and "\n" in decode(tokens).lstrip())

    return Prober(
        model,
        mode=mode,
        decode=decode,
        accept=lambda text, needle: is_answer(text, prompts.needles[needle].answer),
        stop=stop,
        vocab=pair.shared_vocab,
        # Of all prompts, whatever is left to do: a resumed run computes in the same layout.
        capacity=max(len(sample.ids) + len(sample.answer_ids) for sample in prompts.samples),
        steps=settings.steps,
        rows=rows,
    )


def _cost(sample: Sample) -> float:
    """Relative time of a sample: the tokens from its needle on, and an answer."""
    return len(sample.ids) - sample.insert_at + 256


def _entry(sample: Sample, score: Score) -> dict[str, Any]:
    entry = {
        "needle": sample.needle,
        "length": sample.length,
        "depth": sample.depth,
        "tokens": len(sample.ids),
        "accepted": score.accepted,
        "response": score.response,
    }
    if score.accepted:
        entry |= {"span": _rounded(score.span), "copies": _rounded(score.copies)}
    return entry


def _rounded(table: torch.Tensor) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in row] for row in table.tolist()]


def _result(entries: list[Entry], credit: Credit, needles: int) -> dict[str, Any]:
    accepted = [entry for entry in entries if entry["accepted"]]
    by_length = {}
    for length in sorted({entry["length"] for entry in entries}):
        outcomes = [entry["accepted"] for entry in entries if entry["length"] == length]
        by_length[str(length)] = {"accepted": sum(outcomes), "samples": len(outcomes)}
    result: dict[str, Any] = {"samples": len(entries), "accepted": len(accepted), "accepted_by_length": by_length}
    if accepted:
        scores = _mean(accepted, credit)
        result["ranking"] = rank(scores)
        result["scores"] = [[float(f"{value:.6g}") for value in layer] for layer in scores]
        result["stability"] = _stability(accepted, credit, needles)
    return result


def _stability(accepted: list[dict[str, Any]], credit: Credit, needles: int) -> dict[str, Any] | None:
    """Agreement of the rankings from even and from odd needles; None if either half retrieved nothing."""
    halves = [[entry for entry in accepted if entry["needle"] % 2 == parity] for parity in (0, 1)]
    if needles < 2 or not all(halves):
        return None
    found = agreement(_mean(halves[0], credit), _mean(halves[1], credit))
    return {"top4_overlap": round(found.top, 4), "kendall_tau": round(found.kendall, 4)}


def _mean(entries: list[dict[str, Any]], credit: Credit) -> Array:
    tables: Array = np.asarray([entry[credit] for entry in entries], dtype=np.float64)
    return np.asarray(tables.mean(axis=0))


def summarise(path: Path) -> None:
    """Say what was found, and whether to trust it."""
    data = read_json(path)
    stable = data["stability"]
    trust = "too few accepted needles to judge stability"
    if stable:
        overlap, tau = stable["top4_overlap"], stable["kendall_tau"]
        trust = f"halves of the needles agree on {overlap:.0%} of the top four (Kendall tau {tau:.2f})"
    say(f"{data['side']}: {data['accepted']} of {data['samples']} needles accepted; {trust}")
    if stopping := data.get("stopping"):
        found = stopping["top4_overlap"]
        bounds = (
            f"overlap of halves {found['low']:.0%} to {found['high']:.0%}" if found else "too few needles to compare"
        )
        used, asked = stopping["used_prompts"], stopping["asked_prompts"]
        wanted = f"{stopping['stable_overlap']:.0%} was asked for"
        say(f"{data['side']}: {used} of {asked} prompts used; {bounds}, {wanted}")
