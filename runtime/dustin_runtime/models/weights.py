"""Weights, streamed tensor by tensor into fused device tensors that are allocated once.

Peak host memory is one tensor (GGUF) or the mapped pages of one shard (safetensors), never a second copy of the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dustin_runtime.errors import CapacityError, MissingError
from dustin_runtime.models.decoder import Decoder, LayerWeights, Weights
from dustin_runtime.models.folder import weight_files
from dustin_runtime.models.shape import ModelShape

if TYPE_CHECKING:
    from dustin_runtime.parallel.collectives import Collectives
    from dustin_runtime.parallel.shards import Share
    from dustin_runtime.parallel.split import Part, Split


def load_decoder(
    path: Path,
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device | str,
    ranks: Collectives | None = None,
    *,
    pipeline: bool = False,
) -> Decoder:
    """Load a model from a folder of safetensors shards or a GGUF file.

    Args:
        shape: what it is run as: its own shape, or that with another RoPE scaling.
        ranks: that share the model; of what others hold nothing is read.
        pipeline: each of them has whole layers, rather than a part of each.

    Raises:
        MissingError: a tensor is absent, unexpected, of the wrong shape, or a file is damaged.
        CapacityError: the device's memory does not suffice.
        UsageError: the ranks cannot share the model.
    """
    split, share = None, None
    if ranks:
        from dustin_runtime.parallel.split import split_over

        split = split_over(shape, ranks, pipeline)
        share = split.share
    if path.suffix == ".gguf":
        from dustin_runtime.models.gguf import read_gguf

        tensors = read_gguf(path).tensors(share=share)
    else:
        tensors = safetensors_in(path, share)
    return build(share.shape if share else shape, tensors, dtype, device, path.name, split=split)


def load_headless(path: Path, shape: ModelShape, target: Decoder) -> Decoder:
    """Load a draft that stores layers and final norm only (`models.headless`) next to its target.

    Embedding and head are the target's own tensors, so dtype and device are the target's. What ranks have of them is
    put together, since every rank runs the whole draft.

    Raises: as `load_decoder`, and ConfigError for a tensor that is stored in a type that cannot be read.
    """
    from dustin_runtime.models.headless import dequantised

    stored = dequantised(safetensors_in(path), path.name)
    outer = target.weights
    if target.split:
        embedding, head = target.split.outer(outer)
        outer = replace(outer, embedding=embedding, head=head)
    return build(shape, stored, target.dtype, target.device, path.name, outer=outer)


def build(
    shape: ModelShape,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    device: torch.device | str,
    name: str = "model",
    outer: Weights | None = None,
    split: Split | None = None,
) -> Decoder:
    """Fill a decoder from (Hugging Face name, tensor) pairs in any order.

    Args:
        outer: whose embedding and head to use; `tensors` must then hold neither.
        split: how the model is split over ranks; `shape` and `tensors` are then this one's share.
    """
    weights, slots = _allocate(shape, dtype, device, outer, split.share if split else None)
    missing = set(slots)
    for key, tensor in tensors:
        if key.endswith("rotary_emb.inv_freq") or (key == "lm_head.weight" and shape.tied and outer is None):
            continue  # recomputed, or a second name of the embedding
        slot = slots.get(key)
        if slot is None:
            raise MissingError(f"{name}: unexpected tensor {key}: not the architecture that its config describes")
        if slot.shape != tensor.shape:
            raise MissingError(f"{name}: {key} is {list(tensor.shape)}, its config says {list(slot.shape)}")
        slot.copy_(tensor)
        missing.discard(key)
    if missing:
        raise MissingError(f"{name}: {len(missing)} tensors are missing, {min(missing)} among them: download it again")
    return Decoder(shape, weights, split)


def random_decoder(
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    ranks: Collectives | None = None,
) -> Decoder:
    """A decoder with small random weights, for timing and for tests; its text means nothing.

    Args:
        ranks: that share the model. Each allocates and draws its own part alone, so the numbers are not those of one
            process; what several of them hold is the same on each.

    Raises:
        CapacityError: the device's memory does not suffice.
        UsageError: the ranks cannot share the model evenly.
    """
    split = None
    if ranks:
        from dustin_runtime.parallel.tensor import TensorParallel

        split = TensorParallel.of(shape, ranks)
    held = split.share.shape if split else shape
    weights, slots = _allocate(held, dtype, device, share=split.share if split else None)
    generator = torch.Generator(device=device).manual_seed(seed)
    for key in sorted(slots):
        slot = slots[key]
        if "norm" in key:
            slot.fill_(1.0)
            continue
        if split:
            generator.manual_seed(_seed_of_part(seed, key, split.share))
        slot.normal_(std=shape.hidden**-0.5, generator=generator)
    return Decoder(held, weights, split)


def _seed_of_part(seed: int, key: str, share: Share) -> int:
    """Of what a rank holds of a tensor: equal parts draw equal numbers, wherever they are held."""
    cut = share.cut(key)
    text = f"{seed} {key} {cut.part if cut else 'whole'}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def safetensors_in(folder: Path, share: Part | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a folder's safetensors shards, memory-mapped, one at a time.

    Args:
        share: what to read of each; all if not given.

    Raises:
        MissingError: a shard is truncated or not a safetensors file, or a tensor is not of the size that is shared.
    """
    from safetensors import SafetensorError, safe_open

    for shard in weight_files(folder):
        try:
            with safe_open(shard, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - not a dict
                    if share and not share.holds(key):
                        continue
                    if share is None or share.cut(key) is None:
                        yield key, opened.get_tensor(key)
                    else:
                        part = opened.get_slice(key)
                        yield key, part[share.index(key, part.get_shape())]
        except (SafetensorError, OSError) as error:
            raise MissingError(f"{shard.name}: damaged ({error}): download it again") from error


def _allocate(
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device | str,
    outer: Weights | None = None,
    share: Part | None = None,
) -> tuple[Weights, dict[str, Tensor]]:
    """Reserve all weights; return them with a view per Hugging Face tensor name, so that loading is copying.

    Embedding and head are those of `outer` if it is given, and have no name then. A share's head may end in zeros.
    """
    slots: dict[str, Tensor] = {}

    def tensor(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def fused(names: list[str], rows: list[int], columns: int | None) -> Tensor:
        whole = tensor(sum(rows), *([] if columns is None else [columns]))
        slots.update(zip(names, whole.split(rows), strict=True))
        return whole

    def single(name: str, *size: int) -> Tensor:
        slots[name] = tensor(*size)
        return slots[name]

    def padded_rows(name: str, rows: int, padded: int) -> Tensor:
        whole = tensor(padded, shape.hidden)
        whole[rows:].zero_()
        if padded:
            slots[name] = whole[:rows]
        return whole

    query, kv = shape.query_heads * shape.head_size, shape.kv_heads * shape.head_size

    def layer(index: int) -> LayerWeights:
        at = f"model.layers.{index}."
        projections = [f"{at}self_attn.{x}_proj" for x in "qkv"]
        return LayerWeights(
            attention_norm=single(f"{at}input_layernorm.weight", shape.hidden),
            qkv=fused([f"{p}.weight" for p in projections], [query, kv, kv], shape.hidden),
            qkv_bias=fused([f"{p}.bias" for p in projections], [query, kv, kv], None) if shape.qkv_bias else None,
            q_norm=single(f"{at}self_attn.q_norm.weight", shape.head_size) if shape.qk_norm else None,
            k_norm=single(f"{at}self_attn.k_norm.weight", shape.head_size) if shape.qk_norm else None,
            output=single(f"{at}self_attn.o_proj.weight", shape.hidden, query),
            mlp_norm=single(f"{at}post_attention_layernorm.weight", shape.hidden),
            gate_up=fused([f"{at}mlp.{x}_proj.weight" for x in ("gate", "up")], [shape.ffn] * 2, shape.hidden),
            down=single(f"{at}mlp.down_proj.weight", shape.hidden, shape.ffn),
        )

    try:
        if outer:
            embedding, head = outer.embedding, outer.head
        else:
            padded = share.embedding_rows if share else shape.vocab
            embedding = padded_rows("model.embed_tokens.weight", shape.vocab, padded)
            if shape.tied:
                head = embedding[share.tied_head] if share else embedding
            else:
                ids, rows = (share.vocab, share.vocab_rows) if share else (range(shape.vocab), shape.vocab)
                head = padded_rows("lm_head.weight", len(ids), rows)
        layers = tuple(layer(index) for index in (share.layers if share else range(shape.layers)))
        norm = single("model.norm.weight", shape.hidden) if share is None or share.ends else tensor(0)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        need = shape.parameters * dtype.itemsize / 2**30
        raise CapacityError(f"no memory on {device} for {need:.1f} GiB of weights: use a smaller dtype") from error
    return Weights(embedding, layers, norm, head), slots
