"""What tells how far a step's verification will lie from full: rank correlations, and what a guard by it leaves.

python tools/study_tells.py CONFIG --pair smollm2 --data BOOKS --context 2304 --documents 6 -o tells.json

Of every step, launch by launch, with what a policy reads: KL to full verification, and beside it what might tell it.
`estimate`, what the configuration's guard estimates the list to leave out, 1 less the ARR; `unread`, the share of the
attention that it truly leaves out, which no step knows; `rest`, that share as the token of `dustin-rest` has it;
entropies (nats) of the `drafted` and of the `served` distributions, and `apart`, KL of the former from the latter. The
file is written after every document, one that is there is continued, and several (`--join`) are printed as one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dustin_profile.cli.given_texts import add_options, texts_of
from dustin_profile.data import Prompt
from dustin_profile.evaluation.fidelity import prepare
from dustin_profile.evaluation.given_texts import GivenTexts, Models, split
from dustin_profile.evaluation.tells import SHARE, told
from dustin_profile.evaluation.text_run import TextRun
from dustin_profile.progress import say
from dustin_profile.provenance import versions
from dustin_profile.report import table
from dustin_profile.reporting.documents.studies import TellsStudy
from dustin_profile.reporting.sources import gather
from dustin_profile.reporting.studies import pooled, steps_by_cell
from dustin_profile.statistics import percentile
from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.scoring import last_rows
from dustin_runtime.attention.sparse import SparseAttention
from dustin_runtime.config import changed, load_config
from dustin_runtime.errors import DustinError, MissingError, UsageError
from dustin_runtime.files import read_json, write_json
from dustin_runtime.guard import NEVER
from dustin_runtime.misfits import warn_of_config
from dustin_runtime.policies import Policy, able, guarded, judged, make_policy
from dustin_runtime.scaled import Held


class Watched:
    """Puts what every layer leaves unread beside what it attends to, in place of `SparseAttention.__call__`."""

    def __init__(self) -> None:
        self.inner = SparseAttention.__call__
        self.unread: list[Tensor] = []
        self.rest: list[Tensor] = []

    def attach(self) -> None:
        def call(attend: SparseAttention, layer: int, q: Tensor, k: Held, v: Held, start: Tensor) -> Tensor:
            self.watch(attend, layer, q, k, int(start))
            return self.inner(attend, layer, q, k, v, start)

        setattr(SparseAttention, "__call__", call)  # noqa: B010

    def watch(self, attend: SparseAttention, layer: int, q: Tensor, k: Held, prefix: int) -> None:
        assert isinstance(k, Tensor)
        keys = k[:, : prefix + q.shape[1]]
        rows = last_rows(q, keys)[0]  # [kv_heads, group, tokens, keys]
        kept = attend.kept(layer)[0]
        read = torch.zeros(kept.shape[0], keys.shape[1] + 1, device=q.device)
        read.scatter_(1, torch.where(kept < 0, keys.shape[1], kept), 1)
        read = read[:, :-1]
        read[:, prefix:] = 1
        seen = (rows * read[:, None, None]).sum(dim=-1)
        self.unread.append(1 - seen.mean())
        if attend.rest is not None:
            one, scale = attend.rest.of(layer), q.shape[3] ** -0.5
            logit = (q[0].float() * one.keys[0].float()).sum(dim=-1) * scale + one.bias[0]  # [tokens, query_heads]
            query = q[0].float().unflatten(1, (rows.shape[0], -1)).permute(1, 2, 0, 3)
            scores = query @ keys[0].float().permute(1, 2, 0).unsqueeze(1) * scale
            listed = scores.masked_fill((read[:, None, None] == 0) | (rows == 0), float("-inf")).logsumexp(dim=-1)
            self.rest.append((logit.T.view_as(listed) - listed).sigmoid().mean())

    def taken(self) -> tuple[float, float]:
        """Means over the layers since the last call."""
        found = [float(torch.stack(shares).mean()) if shares else 0.0 for shares in (self.unread, self.rest)]
        self.unread, self.rest = [], []
        return found[0], found[1]


def entropy(log_probabilities: Tensor) -> Tensor:
    return -(log_probabilities.exp() * log_probabilities).sum(dim=-1)


def one_document(
    texts: GivenTexts, models: Models, prompt: Prompt, cells: dict[str, Policy], watched: Watched
) -> dict[str, list[dict[str, float]]]:
    """By cell, what is known of each step, and its KL."""
    ids, text = split(prompt, texts.tokens)
    depth, vocab = texts.config.depth, texts.pair.shared_vocab
    ready = prepare(*models, ids, text, vocab, depth, max(policy.prompt_queries for policy in cells.values()))
    begin = torch.tensor([len(ids)], device=ready.full.device)
    read = torch.tensor([text], device=ready.full.device)
    hidden = models[1].forward(read, begin, ready.draft_cache, dense_attention, len(ids) + len(text))[0]
    proposed = torch.cat([models[1].logits(part)[:, :vocab].float().log_softmax(-1) for part in hidden.split(64)])
    found: dict[str, list[dict[str, float]]] = {}
    for name, policy in cells.items():
        run, steps = TextRun(ready, policy, depth, vocab, graph=False), []  # whose layers can be watched
        watched.taken()
        for at in range(0, len(text) - depth - 1, depth + 1):
            served = run.step(at).logits[0].float().log_softmax(-1)
            full, drafted = ready.full[at + 1 : at + 2 + depth], proposed[at : at + depth]
            unread, rest = watched.taken()
            verified = run.stepper.verified
            assert isinstance(verified, SparseAttention) and verified.estimate is not None
            steps.append(
                {
                    "kl": float((full.exp() * (full - served)).sum(-1).clamp(min=0).mean()),
                    "estimate": 1 - float(verified.estimate),
                    "unread": unread,
                    "rest": rest,
                    "drafted": float(entropy(drafted).mean()),
                    "served": float(entropy(served).mean()),
                    "apart": float((drafted.exp() * (drafted - served[:depth])).sum(-1).mean()),
                }
            )
        found[name] = [{key: float(f"{value:.5g}") for key, value in step.items()} for step in steps]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", help="with guard: emitted by dustin-profile search")
    add_options(parser, context=2304, tokens=256)
    parser.add_argument("--method", action="append", help="repeat; default: dustin, dustin-rest-look")
    parser.add_argument("--budget", type=int, action="append", help="repeat; default: the config's")
    parser.add_argument("--join", type=Path, action="append", help="print such files together, and measure nothing")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.join:
        show(arguments.join)
        return
    if arguments.config is None or arguments.output is None:
        parser.error("give a config and --output, or files to --join")
    served = load_config(arguments.config)
    if served.guard is None:
        parser.error(f"{arguments.config} has no guard: emit it anew with dustin-profile search")
    texts = texts_of(arguments, served)
    cells: dict[str, Policy] = {}
    for method, budget in product(
        arguments.method or ["dustin", "dustin-rest-look"], arguments.budget or [served.selection.budget]
    ):
        selection = changed(served.selection, budget, None)
        policy = make_policy(method, selection)
        if not judged(policy):
            parser.error(f"--method {method}: its lists are not judged; give one of {able()}")
        cells[f"{method} k{budget}"] = guarded(policy, served, threshold=NEVER)
        warn_of_config(cells[f"{method} k{budget}"], served, selection, depth=served.depth, windowed=False)
    inputs = json.loads(json.dumps(texts.made_from(1) | {"guard": served.guard.model_dump(mode="json")}))
    documents: list[dict[str, Any]] = []
    if arguments.output.exists():
        gather([arguments.output])  # or it is refused
        held = read_json(arguments.output)
        if held["inputs"] != inputs or any(one["cells"].keys() != cells.keys() for one in held["documents"]):
            parser.error(f"{arguments.output} was made from other inputs; give another file")
        documents = held["documents"]
    watched, loaded = Watched(), list[Models]()
    watched.attach()
    for _, prompt in texts.usable():
        if prompt.id not in [one["id"] for one in documents]:
            loaded = loaded or [texts.load()]
            with torch.inference_mode():
                measured = one_document(texts, loaded[0], prompt, cells, watched)
            if not all(measured.values()):
                say(f"{prompt.id}: left out, its text does not fill a step")
                continue
            found_cells = {name: {"steps": steps} for name, steps in measured.items()}
            documents.append({"id": prompt.id, "source": prompt.source, "cells": found_cells})
            found = {"kind": "dustin-study-tells", "inputs": inputs, "versions": versions(), "documents": documents}
            write_json(arguments.output, found)
            say(prompt.id)
    if not documents:
        raise MissingError("no document has a text that fills a step; give other --data or more --tokens")
    show([arguments.output])


def show(files: Sequence[Path]) -> None:
    """Print what files of one study say, each document once."""
    studies = [source.data for source in gather(files).of(TellsStudy)]
    pools = pooled([text for study in studies for text in study.texts])
    if len(pools) != 1:
        names = ", ".join(map(str, files))
        raise UsageError(f"{names}: of {len(pools)} studies; give files of one pair, config, length and depth")
    for name, documents in steps_by_cell(pools[0]).items():
        kl = [step["kl"] for one in documents for step in one]
        print(f"\n{name}: {len(kl)} steps, KL {sum(kl) / len(kl):.4f}, 99th % {percentile(kl):.3f}\n")
        header = ["told by", "rank correlation", f"a guard at {SHARE:.0%} leaves of mean KL", "of the 99th %"]
        rows = [
            [one.signs, "" if one.rank is None else f"{one.rank:.2f}", f"{one.mean:.2f}", f"{one.tail:.2f}"]
            for one in told(documents)
        ]
        print("\n".join(table(header, rows)))


if __name__ == "__main__":
    try:
        main()
    except DustinError as error:
        raise SystemExit(f"error: {error}") from None
