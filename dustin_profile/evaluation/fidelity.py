"""Fidelity: how far a policy's predictions lie from full verification's, on the same text (arXiv 2606.24957, App. B).

A text is verified window by window as if every draft were right. The target's keys of the window come from the policy's
own passes, as when it serves. All policies of a document share one prefill: what they write lies behind the prompt, and
is overwritten by the next. They share the draft's pass over the text too, as it reads its whole cache in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dustin_profile.evaluation.text_run import Prefilled, TextRun, log_loss, padded
from dustin_runtime.attention.dense import dense_attention
from dustin_runtime.attention.scoring import last_rows
from dustin_runtime.attention.sparse import SparseAttention
from dustin_runtime.attention.tap import MassTap, QueryTap
from dustin_runtime.cache import KVCache
from dustin_runtime.models.decoder import Decoder
from dustin_runtime.policies import Policy
from dustin_runtime.policies.base import Prompted, Verification
from dustin_runtime.prefill import CHUNK, chunk_for, prefill
from dustin_runtime.prompt_store import mark_of


class Fidelity(NamedTuple):
    """One text under one policy; entry j of a tensor is its token j."""

    kl: Tensor
    """[tokens] fp64, KL(full || policy) in nats over the shared vocabulary."""
    agrees: Tensor
    """[tokens] bool, whether both would choose the same token."""
    loss: Tensor
    """[tokens] fp64, -log p of the text's token, in nats."""
    apart: Tensor
    """[tokens] fp64, total variation of both distributions at a temperature, 0 to 1: the least share of draws in which
    two samplers, one of each, can differ."""
    read: float
    """Prefix tokens that a KV head read per step, mean over layers, heads and steps."""
    lists: list[list[Tensor | None]]
    """By step and layer, [heads, k] int32 prefix positions that were read (`Verification.kept`), -1 padded, where the
    target is; None for all. Layers of one list share it."""
    full: Tensor | None = None
    """[steps] bool, which were verified in full by a guard; None without one."""
    estimate: Tensor | None = None
    """[steps] fp64, the ARR that each step's list was estimated to have, for a policy that estimates it."""


@torch.inference_mode()
def prepare(
    target: Decoder,
    draft: Decoder,
    prompt: Sequence[int],
    text: Sequence[int],
    vocab: int,
    depth: int,
    window: int,
    mass: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> Prefilled:
    """Prefill both models, verify the text in full, and let the draft read it.

    Args:
        text: what follows the prompt.
        vocab: ids below it are compared.
        depth: of `measure`.
        window: most last queries of the prompt that a policy asks for (`Policy.prompt_queries`).
        mass: whether one asks what each position of the prompt received (`Policy.prompt_mass`).
        kv_dtype: of the target's cache that policies read (`Stepper`); what is compared with has the model's dtype.

    Raises:
        CapacityError: memory does not suffice.
    """
    capacity = len(prompt) + len(text) + 2 * (depth + 1)
    target_cache, draft_cache = target.cache(1, capacity), draft.cache(1, capacity)
    chunk = chunk_for(target.device)
    summed = MassTap(dense_attention)
    tap = QueryTap(summed if mass else dense_attention, range(target.shape.layers), last=max(window, 1))
    last = prefill(target, target_cache, prompt, attend=tap, chunk=chunk, tail=window)
    draft_tap = QueryTap(dense_attention, range(draft.shape.layers), last=max(window, 1))
    prefill(draft, draft_cache, prompt, attend=draft_tap, chunk=chunk, tail=window)
    rows = [target.logits(last)[None, :vocab].float().log_softmax(-1)]
    text_queries, hidden = _read(target, target_cache, len(prompt), text[:-1])
    rows += [target.logits(part)[:, :vocab].float().log_softmax(-1) for part in hidden]
    ahead = padded(text, depth)[: len(text) + depth - 1] if len(text) > 1 else []
    draft_queries, _ = _read(draft, draft_cache, len(prompt), ahead)
    text_keys = target_cache.keys[:, 0, len(prompt) : len(prompt) + len(text) - 1].clone()
    served_cache = target_cache
    if kv_dtype:
        served_cache, summed = target.cache(1, capacity, kv_dtype), MassTap(dense_attention)
        tap = QueryTap(summed if mass else dense_attention, range(target.shape.layers), last=max(window, 1))
        prefill(target, served_cache, prompt, attend=tap, chunk=chunk, tail=window)
    return Prefilled(
        target,
        draft,
        target_cache,
        draft_cache,
        prompt,
        text,
        Prompted(len(prompt), served_cache, tap.queries, summed.received, mark_of(prompt)),
        Prompted(len(prompt), draft_cache, draft_tap.queries),
        torch.cat(rows),
        text_queries,
        text_keys,
        draft_queries,
        served_cache,
    )


def _read(model: Decoder, cache: KVCache, start: int, ids: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Process tokens behind a prompt, in chunks.

    Returns:
        By layer, [1, tokens, query_heads, head_size] queries after RoPE, nothing if there is no token; by chunk,
        [tokens, hidden] final hidden states.
    """
    tap = QueryTap(dense_attention, range(model.shape.layers))
    queries: list[list[Tensor]] = [[] for _ in range(model.shape.layers)]
    hidden: list[Tensor] = []
    for begin in range(0, len(ids), CHUNK):
        piece = torch.tensor([ids[begin : begin + CHUNK]], device=model.device)
        at = start + begin
        position = torch.tensor([at], device=model.device)
        hidden.append(model.forward(piece, position, cache, tap, at + piece.shape[1])[0])
        for layer, parts in enumerate(queries):
            parts.append(tap.queries[layer])
    return [torch.cat(parts, dim=1) for parts in queries if parts], hidden


@torch.inference_mode()
def measure(ready: Prefilled, policy: Policy, depth: int, vocab: int, temperature: float = 1.0) -> Fidelity:
    """Verify the text with one policy. Its first token comes from the prefill, which is the same for all.

    Args:
        depth: tokens that a step verifies beyond the pending one; that of `prepare`.
        temperature: of `Fidelity.apart`, above 0.
    """
    run = TextRun(ready, policy, depth, vocab)
    depth = run.stepper.depth
    text = torch.tensor(ready.text, device=ready.target.device)
    kl, agrees, loss, apart, read = [], [], [], [], []
    lists: list[list[Tensor | None]] = []
    full: list[Tensor] = []
    estimate: list[Tensor] = []
    for begin in range(0, len(text) - 1, depth + 1):
        result = run.step(begin)
        count = min(depth + 1, len(text) - 1 - begin)
        have = result.logits[0, :count].float().log_softmax(-1)
        want = ready.full[begin + 1 : begin + 1 + count]
        kl.append((want.exp() * (want - have)).double().sum(-1).clamp(min=0))
        agrees.append(want.argmax(-1) == have.argmax(-1))
        loss.append(log_loss(have, text[begin + 1 : begin + 1 + count]))
        apart.append(total_variation(want, have, temperature))
        read.append(result.packed[0, depth + 2].clone())
        verified = run.stepper.verified
        lists.append(_kept(verified, ready.target.shape.layers))
        if isinstance(verified, SparseAttention):
            full += [] if verified.full is None else [verified.full[0].clone()]
            estimate += [] if verified.estimate is None else [verified.estimate[0].clone()]
    in_full = torch.stack(full).cpu() if full else None
    for step in [] if in_full is None else in_full.nonzero().flatten().tolist():
        lists[step] = [None] * ready.target.shape.layers
    first = log_loss(ready.full[:1], text[:1])
    return Fidelity(
        torch.cat([first.new_zeros(1), *kl]).cpu(),
        torch.cat([agrees[0].new_ones(1), *agrees]).cpu() if agrees else torch.ones(1, dtype=torch.bool),
        torch.cat([first, *loss]).cpu(),
        torch.cat([first.new_zeros(1), *apart]).cpu(),
        float(torch.stack(read).mean()) if read else float(len(ready.prompt)),
        lists,
        in_full,
        torch.stack(estimate).cpu() if estimate else None,
    )


def total_variation(p: Tensor, q: Tensor, temperature: float) -> Tensor:
    """Half the sum of absolute differences of two distributions.

    Args:
        p, q: [tokens, vocab] fp32 log-probabilities at temperature 1; temperature: above 0.

    Returns:
        [tokens] fp64.
    """
    if temperature != 1:
        p, q = ((x / temperature).log_softmax(-1) for x in (p, q))
    return (p.exp() - q.exp()).abs().double().sum(-1) / 2


@torch.inference_mode()
def recovered(ready: Prefilled, found: Sequence[Fidelity], depth: int) -> Tensor:
    """Attention recovery rate of every policy: the share of full verification's attention on what a step reads.

    All heads of all layers count alike, and the positions from the pending token on as read (windowed ARR, arXiv
    2606.24957, section 3.1).

    Args:
        found: of `measure`, with one `depth`.

    Returns:
        [policies, steps] fp64.
    """
    layers, steps = ready.target.shape.layers, len(found[0].lists)
    shares = torch.zeros(steps, len(found), dtype=torch.float64, device=ready.target.device)
    for step in range(steps):
        begin = step * (depth + 1)
        for layer in range(layers):
            rows = attention_rows(ready, layer, begin, depth)
            tokens = min(depth + 1, len(ready.text) - 1 - begin)
            mass = rows.unflatten(1, (-1, tokens)).mean(dim=2, dtype=torch.float64)
            lists = [one.lists[step][layer] for one in found]
            shares[step] += _on_lists(mass, lists, len(ready.prompt) + begin) / layers
    return shares.T.cpu()


def attention_rows(ready: Prefilled, layer: int, begin: int, depth: int) -> Tensor:
    """Full verification's attention in one step.

    Args:
        begin: tokens of the text before the step's pending one.

    Returns:
        [kv_heads, rows, keys] fp32, a row for each query head of the KV head and each token of the step, tokens running
        faster. Each sums to 1.
    """
    end = min(begin + depth + 1, len(ready.text) - 1)
    prompt = ready.target_cache.keys[layer, 0, : len(ready.prompt)]
    keys = torch.cat((prompt, ready.text_keys[layer, :end]))
    return last_rows(ready.text_queries[layer][:, begin:end], keys.unsqueeze(0))[0].flatten(1, 2)


def _on_lists(mass: Tensor, lists: Sequence[Tensor | None], prefix: int) -> Tensor:
    """What of the attention lies on each list and behind the prefix: [lists] fp64, mean over query heads.

    Args:
        mass: [kv_heads, group, keys] fp64 attention of every query head.
        lists: [heads, k] each; see `Fidelity.lists`.
    """
    by_heads = {mass.shape[0] * mass.shape[1]: mass.flatten(0, 1), mass.shape[0]: mass.mean(dim=1)}
    by_heads[1] = mass.mean(dim=(0, 1)).unsqueeze(0)
    alike: dict[torch.Size | None, list[int]] = {}
    for index, kept in enumerate(lists):
        alike.setdefault(None if kept is None else kept.shape, []).append(index)
    shares: list[Tensor] = [by_heads[1][0].sum()] * len(lists)  # of those that read all
    new = by_heads[1][0, prefix:].sum()
    for shape, members in alike.items():
        if shape is not None:
            kept = torch.stack([one for one in (lists[index] for index in members) if one is not None])
            source = by_heads[shape[0]].expand(len(members), -1, -1)
            listed = (source.gather(2, kept.long().clamp(min=0)) * (kept >= 0)).sum(dim=2).mean(dim=1)
            for index, share in zip(members, (listed + new).unbind(), strict=True):
                shares[index] = share
    return torch.stack(shares)


def _kept(verified: Verification, layers: int) -> list[Tensor | None]:
    """What each layer read, of one row: copies, since a policy may change its lists in the next step."""
    lists = [verified.kept(layer) for layer in range(layers)]  # all at once, so that what is apart has other addresses
    copies = {kept.data_ptr(): kept[0].to(torch.int32, copy=True) for kept in lists if kept is not None}
    return [None if kept is None else copies[kept.data_ptr()] for kept in lists]
