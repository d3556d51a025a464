"""What a rank holds: every part once, whole heads, and nothing read that belongs to others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import gguf_files
import numpy as np
import pytest
import safetensors
import torch
from gguf import GGMLQuantizationType
from split_models import SHAPES, write_weights

from dustin_runtime.config import LayerHeads
from dustin_runtime.errors import MissingError, UsageError
from dustin_runtime.models import gguf
from dustin_runtime.models.shape import ModelShape
from dustin_runtime.models.weights import safetensors_in
from dustin_runtime.pairs import find_pair
from dustin_runtime.parallel.shards import COLUMNS, Share


def shares(shape: ModelShape, world: int) -> list[Share]:
    return [Share.of(shape, rank, world) for rank in range(world)]


def smollm2() -> ModelShape:
    return find_pair("smollm2").target.shape


@pytest.mark.parametrize("world", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", ["qwen72b:0.5b", "llama8b:1b"])
def test_every_head_unit_and_id_has_its_ranks(name: str, world: int) -> None:
    shape = find_pair(name).target.shape
    parts = shares(shape, world)
    for whole, of in (("query_heads", shape.query_heads), ("ffn", shape.ffn), ("vocab", shape.vocab)):
        assert [*itertools.chain.from_iterable(getattr(part, whole) for part in parts)] == list(range(of))
    for part in parts:
        assert {head // shape.group for head in part.query_heads} == set(part.kv_heads)
        assert part.shape.group * len(part.kv_heads) == len(part.query_heads)
        assert len(part.kv_heads) == max(shape.kv_heads // world, 1)
        assert part.shape.layers == shape.layers and part.shape.hidden == shape.hidden


def test_ranks_that_outnumber_kv_heads_hold_them_together() -> None:
    shape = SHAPES["llama-one-kv-head"]
    assert [part.kv_heads for part in shares(shape, 2)] == [range(1)] * 2
    two = ModelShape(**shape.model_dump() | {"query_heads": 8, "kv_heads": 2})
    assert [list(part.kv_heads) for part in shares(two, 4)] == [[0], [0], [1], [1]]
    assert [list(part.query_heads) for part in shares(two, 4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_vocabulary_that_does_not_divide_is_padded() -> None:
    shape = SHAPES["llama"].model_copy(update={"vocab": 9})
    parts = shares(shape.model_copy(update={"query_heads": 8, "kv_heads": 8, "ffn": 64}), 8)
    assert {part.vocab_rows for part in parts} == {2}
    assert [len(part.vocab) for part in parts] == [2, 2, 2, 2, 1, 0, 0, 0]


@pytest.mark.parametrize("world", [2, 4, 5, 6, 27])
def test_heads_that_do_not_divide_are_refused_with_what_would(world: int) -> None:
    """SmolLM2-135M has 9 query heads and 3 KV heads: uneven parts would make all wait for the largest."""
    with pytest.raises(UsageError) as refused:
        Share.of(smollm2(), 0, world)
    assert str(refused.value) == (
        f"{world} ranks cannot share 9 query heads, 3 KV heads and an MLP of 1536 evenly; "
        "start one process, or as many as can: 3"
    )
    assert [len(part.kv_heads) for part in shares(smollm2(), 3)] == [1, 1, 1]


def test_chosen_heads_fall_to_their_ranks() -> None:
    chosen = [LayerHeads(layer=2, heads=(5, 0, 2)), LayerHeads(layer=0, heads=(4,))]
    left, right = (part.held(chosen) for part in shares(SHAPES["llama"], 2))
    assert left == (LayerHeads(layer=2, heads=(0, 2)),)
    assert right == (LayerHeads(layer=2, heads=(2,)), LayerHeads(layer=0, heads=(1,)))


def test_the_first_layers_of_a_share_are_a_share_of_the_first_layers() -> None:
    shape = SHAPES["llama"]
    assert Share.of(shape, 1, 2).first_layers(2) == Share.of(shape.model_copy(update={"layers": 2}), 1, 2)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes that are read of safetensors, by tensor."""
    read: dict[str, int] = {}
    real = safetensors.safe_open

    class Slice:
        def __init__(self, key: str, inner: object) -> None:
            self.key, self.inner = key, inner

        def get_shape(self) -> list[int]:
            return self.inner.get_shape()

        def __getitem__(self, index: object) -> torch.Tensor:
            found = self.inner[index]
            read[self.key] = found.numel() * found.itemsize
            return found

    class Opened:
        def __init__(self, *arguments: object, **options: object) -> None:
            self.inner = real(*arguments, **options)

        def __enter__(self) -> Opened:
            self.inner.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.inner.__exit__(*error)

        def keys(self) -> list[str]:
            return self.inner.keys()

        def get_tensor(self, key: str) -> torch.Tensor:
            found = self.inner.get_tensor(key)
            read[key] = found.numel() * found.itemsize
            return found

        def get_slice(self, key: str) -> Slice:
            return Slice(key, self.inner.get_slice(key))

    with mock.patch.object(safetensors, "safe_open", Opened):
        yield read


@pytest.mark.parametrize("family", SHAPES)
def test_a_rank_reads_its_own_slices_of_safetensors(family: str, tmp_path: Path) -> None:
    shape = SHAPES[family]
    folder = write_weights(tmp_path, shape)
    whole = dict(safetensors_in(folder))
    parts = []
    for share in shares(shape, 2):
        with counted() as read:
            parts.append(dict(safetensors_in(folder, share)))
        assert read == {name: tensor.numel() * 4 for name, tensor in parts[-1].items()}
        cut = {name for name in whole if share.cut(name)}
        assert sum(read[name] for name in cut) <= 0.56 * sum(whole[name].numel() * 4 for name in cut)
    for name, tensor in whole.items():
        left, right = (part[name] for part in parts)
        cut = Share.of(shape, 0, 2).cut(name)
        if cut is None or (
            len(Share.of(shape, 0, 2).kv_heads) == shape.kv_heads and name.split(".")[-2] in ("k_proj", "v_proj")
        ):
            assert torch.equal(left, tensor) and torch.equal(right, tensor)
        else:
            assert torch.equal(torch.cat((left, right), dim=cut.axis), tensor)


def test_what_is_cut_is_checked_against_the_whole(tmp_path: Path) -> None:
    """A tensor that is too large would give a slice of the right size."""
    folder = write_weights(tmp_path, SHAPES["llama"].model_copy(update={"kv_heads": 3}))
    share = Share.of(SHAPES["llama"], 0, 2)
    with pytest.raises(MissingError, match=r"self_attn.k_proj.weight is \[24, 48\], its config says 16 rows"):
        list(safetensors_in(folder, share))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [None, GGMLQuantizationType.Q8_0])
def test_a_rank_reads_its_own_blocks_of_gguf(
    architecture: str, kind: GGMLQuantizationType | None, tmp_path: Path
) -> None:
    """Of 96 columns in blocks of 32, a rank's 48 lie in two blocks; all other cuts are at the ends of blocks."""
    tensors = gguf_files.tensors_of(architecture, tied=False)
    path = gguf_files.write(tmp_path / "m.gguf", tensors, gguf_files.fields_of(architecture), architecture, kind=kind)
    model = gguf.read_gguf(path)
    real = gguf._values
    for share, (name, info) in itertools.product(shares(model.shape, 2), model.names.items()):
        if (cut := share.cut(name)) is None:
            continue
        whole = model.tensor(name)
        read = []

        def spy(raw: np.ndarray, *arguments: object, to: list[int] = read) -> torch.Tensor:
            to.append(raw.nbytes)
            return real(raw, *arguments)

        with mock.patch.object(gguf, "_values", spy):
            part = model.tensor(name, share=share)
        assert torch.equal(part, whole[share.index(name, whole.shape)])
        quantised = kind is not None and whole.dim() == 2
        halves = info.size // 2
        assert sum(read) == (info.size * 2 // 3 if quantised and "down_proj" in name else halves)
        assert cut.axis == COLUMNS or len(part) == len(whole) // 2


def test_a_truncated_gguf_file_is_missing(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", gguf_files.tensors_of(), gguf_files.fields_of())
    model = gguf.read_gguf(path)
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(MissingError, match=r"truncated in tensor blk.1.ffn_down.weight"):
        model.tensor("model.layers.1.mlp.down_proj.weight", share=Share.of(model.shape, 1, 2))
