"""Time the stages of profiling a pair on a GPU: random weights of its shapes and random texts, for timing only.

python tools/bench_profile.py --pair qwen7b:0.5b --part trace --part search --json OUT
python tools/bench_profile.py --pair llama8b:1b --part srh --json OUT

Everything that a run does on a document or prompt is done: prefill, continuation, observed passes, files. Answers and
continuations never end early, which is the slowest case. Loading weights and tokenizing are left out.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from dustin_profile.prompts import Sample
from dustin_profile.provenance import versions
from dustin_profile.search.budget import Budget
from dustin_profile.search.evaluate import evaluate
from dustin_profile.search.phases import SearchOptions, search
from dustin_profile.settings import GPU_ROWS
from dustin_profile.srh.score import Prober
from dustin_profile.traces.collect import Collector, Prompted, TraceSettings
from dustin_profile.traces.resident import resident
from dustin_profile.traces.stage import write_each
from dustin_profile.traces.store import TraceStore
from dustin_runtime.errors import DustinError
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import random_decoder
from dustin_runtime.pairs import find_pair
from dustin_runtime.prefill import chunk_for, prefill
from dustin_runtime.pricing import prefill_flops

PEAK = 989.4e12
"""Dense bf16 of an H100 or H200 (SXM), data sheet."""
TOKENS = 10_000
"""Token ids are drawn below it."""
T = TypeVar("T")


def timed(device: torch.device, work: Callable[[], T]) -> tuple[float, T]:
    """Seconds of the wall clock, the device's work included."""
    synchronize(device)
    began = time.perf_counter()
    result = work()
    synchronize(device)
    return time.perf_counter() - began, result


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(TOKENS), k=length)


def prefill_rate(model: Decoder, length: int) -> dict[str, Any]:
    """How fast one prompt is prefilled."""
    cache, ids = model.cache(1, length), text(1, length)
    chunk = chunk_for(model.device)
    with torch.inference_mode():
        seconds = [timed(model.device, lambda: prefill(model, cache, ids, chunk=chunk))[0] for _ in range(5)]
    median = statistics.median(seconds[1:])
    rate = prefill_flops(model.shape, length) / median
    return {"tokens": length, "seconds": median, "tflops_per_s": rate / 1e12, "of_peak": rate / PEAK}


def four(shape: ModelShape) -> dict[int, list[int]]:
    """Four heads of every layer, of different KV heads where there are as many."""
    heads = [index * shape.query_heads // 4 for index in range(4)]
    return dict.fromkeys(range(shape.layers), heads)


def bench_trace(target: Decoder, draft: Decoder, depth: int, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """All documents, as `dustin-profile trace` does them; traces stay in the folder."""
    prefilled = {side: prefill_rate(model, given.context) for side, model in (("target", target), ("draft", draft))}
    collector = Collector(
        target,
        draft,
        history=four(target.shape),
        evaluation=four(target.shape),
        lookahead=four(draft.shape),
        settings=TraceSettings(given.continuation, given.windows, depth, depth),
        shared_vocab=TOKENS,
        stop_ids=frozenset(),
        capacity=given.context + given.continuation,
        rows=given.rows,
    )
    documents = [Prompted(f"random#{index}", text(index, given.context)) for index in range(given.documents)]
    # Kernels are compiled and libraries warm before the clock runs.
    for _ in collector.trace_all([Prompted("warm", text(-1, 2 * given.rows + 100))]):
        pass
    entries = [{"id": one.document, "source": one.document, "sha256": ""} for one in documents]
    store = TraceStore.open(folder, {"documents": given.documents}, entries)

    def all_documents() -> None:
        for first in range(0, len(documents), given.rows):
            group = range(first, min(first + given.rows, len(documents)))
            write_each(store, group, collector.trace_all([documents[index] for index in group]))

    seconds, _ = timed(target.device, all_documents)
    flops = given.documents * sum(prefill_flops(model.shape, given.context) for model in (target, draft))
    return {
        "documents": given.documents,
        "context": given.context,
        "continuation": given.continuation,
        "windows": given.windows,
        "rows": given.rows,
        "seconds": seconds,
        "prefill": prefilled,
        "prefill_tflops_per_s_over_all": flops / seconds / 1e12,
        "bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
    }


def bench_search(folder: Path, device: torch.device, budget: int) -> dict[str, Any]:
    """The three phases on 70 % of the traces, and the evaluation of both splits."""
    store = TraceStore.read(folder)
    ids = [entry["id"] for entry in store.entries]
    held = max(len(ids) * 3 // 10, 1)
    searched, reported = (resident(store.subset(part), device) for part in (ids[held:], ids[:held]))
    options = SearchOptions(Budget(budget, sink=4, window=16))

    def whole() -> None:
        found = search(searched, options)
        for documents in (searched, reported):
            evaluate(
                documents,
                target_layer=found.target.layer,
                draft_layers=found.draft.layers,
                m=found.curve.m,
                budget=options.budget,
            )

    first, again = timed(device, whole)[0], timed(device, whole)[0]
    return {"documents": len(ids), "budget": budget, "seconds": first, "seconds_with_traces_resident": again}


def needle_prompts(given: argparse.Namespace) -> list[Sample]:
    """Lengths x depths x needles in one haystack, in the order of `srh`: each shares what precedes its needle."""
    haystack, made = text(0, given.longest), []
    lengths = [given.longest * (index + 1) // given.lengths for index in range(given.lengths)]
    for length in reversed(lengths):
        for place in reversed(range(given.depths)):
            for number in range(given.needles):
                needle, question = text(100 + number, 24), text(200 + number, 16)
                at = (length - 40) * place // max(given.depths - 1, 1)
                ids = haystack[:at] + needle + haystack[at : length - 40] + question
                made.append(Sample(number, length, place, ids, tuple(range(at + 8, at + 18)), needle[8:18], at))
    return made


def bench_srh(model: Decoder, given: argparse.Namespace) -> dict[str, Any]:
    """All prompts of one model, answers generated and accepted whatever they are."""
    prompts = needle_prompts(given)
    prober = Prober(
        model,
        mode=given.mode,
        decode=str,
        accept=lambda answer, needle: True,
        stop=lambda tokens: False,
        vocab=TOKENS,
        capacity=given.longest + 64,
        rows=given.rows if given.mode == "generate" else 1,
    )
    prober.score_all(prompts[-prober.rows :])
    prefilled = sum(len(prompt.ids) - prompt.insert_at for prompt in prompts)
    groups = [prompts[first : first + prober.rows] for first in range(0, len(prompts), prober.rows)]
    seconds, _ = timed(model.device, lambda: [prober.score_all(group) for group in groups])
    return {
        "prompts": len(prompts),
        "longest": given.longest,
        "mode": given.mode,
        "answer_tokens": prober.decoder.most if prober.decoder else 0,
        "rows": prober.rows,
        "tokens_prefilled": prefilled,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="qwen7b:0.5b")
    parser.add_argument("--part", action="append", choices=("srh", "trace", "search"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--context", type=int, default=13_500)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--continuation", type=int, default=128)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--rows", type=int, default=GPU_ROWS)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--longest", type=int, default=16_000, help="tokens of the longest needle prompt")
    parser.add_argument("--lengths", type=int, default=20)
    parser.add_argument("--depths", type=int, default=10)
    parser.add_argument("--needles", type=int, default=3)
    parser.add_argument("--mode", choices=("generate", "forced"), default="generate")
    parser.add_argument("--folder", type=Path, help="where traces lie; by default a temporary one")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    recipe = find_pair(given.pair)
    parts = given.part or ["srh", "trace", "search"]
    target, draft = (random_decoder(model.shape, dtype, device) for model in (recipe.target, recipe.draft))
    rows: list[dict[str, Any]] = []

    def show(part: str, row: dict[str, Any]) -> None:
        rows.append({"part": part, "pair": recipe.name, **row, "synthetic": ["random weights", "random texts"]})
        print(f"{part} (random weights, random texts): {json.dumps(row)}", flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "traces"
        if "srh" in parts:
            for side, model, mode in (("target", target, given.mode), ("draft", draft, "forced")):
                given.mode = mode
                show("srh", {"side": side} | bench_srh(model, given))
        if "trace" in parts:
            show("trace", bench_trace(target, draft, recipe.depth, folder, given))
        if "search" in parts:
            del target, draft
            show("search", bench_search(folder, device, given.budget))
    if given.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        command = shlex.join(["python", *sys.argv])
        document = {"kind": "dustin-profile-time", "device": name, "versions": versions(), "command": command}
        given.json.write_text(json.dumps(document | {"dtype": str(dtype)[6:], "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except DustinError as error:
        raise SystemExit(f"error: {error}") from None
