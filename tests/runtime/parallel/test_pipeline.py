"""A target whose layers lie on several processes generates what it does in one, from the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gguf_files
import pytest
import torch
from rank_pool import RankPool
from safetensors.torch import load_file, save_file
from split_models import (
    SHAPES,
    SPLIT,
    VOCAB,
    Case,
    alone,
    compare,
    generate,
    models,
    rested,
    selection,
    together,
    write_headless,
    write_weights,
)

from dustin_runtime import graph
from dustin_runtime.errors import DustinError, MissingError, NothingMeasuredError, PeerError, UsageError
from dustin_runtime.models import gguf
from dustin_runtime.models.weights import load_decoder, random_decoder, safetensors_in
from dustin_runtime.parallel.collectives import Collectives
from dustin_runtime.parallel.pipeline import Pipeline
from dustin_runtime.parallel.ranks import joined
from dustin_runtime.parallel.stages import Stage
from dustin_runtime.policies import POLICIES
from dustin_runtime.pricing import held_weights

ODD_HEADS = SHAPES["llama"].model_copy(update={"query_heads": 5, "kv_heads": 5, "ffn": 63})
"""Which two ranks could not share."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_weights(root / name, shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[RankPool]:
    pool = RankPool(3)
    yield pool
    pool.close()


def case(folders: dict[str, Path], family: str, method: str = "vanilla", **options: Any) -> Case:
    chosen = selection(budget=14, m=4) if POLICIES[method].needs_selection else None
    return Case(folders[family], SHAPES[family], method, **{"selection": chosen, "pipeline": True} | options)


def compare_bits(pool: RankPool, cases: list[Case]) -> None:
    """As `compare`, and scores are those of one process: no sum is taken in another order. (A whole draft has other
    rows at once, and other roundings.)"""
    compare(pool, cases)
    for one, *runs in zip(cases, *pool(together, cases), strict=True):
        whole = alone(one)
        for run in runs:
            assert len(run.scores) == len(whole.scores)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(run.scores, whole.scores, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_method_generates_what_it_does_in_one_process(
    dtype: torch.dtype, folders: dict[str, Path], two_ranks: RankPool
) -> None:
    """With a draft that is another model, whole on both ranks."""
    compare(
        two_ranks,
        [
            case(
                folders,
                "llama",
                method,
                dtype=dtype,
                own_layers=None,
                draft_budget=12 if method == "magicdec" else None,
            )
            for method in SPLIT
        ],
    )


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families(family: str, folders: dict[str, Path], two_ranks: RankPool) -> None:
    """Biases and a head of its own; norms of queries and keys."""
    cases = [case(folders, family, method, own_layers=None) for method in ("vanilla", "dustin")]
    compare(two_ranks, [*cases, cases[-1]._replace(dtype=torch.float32)])


def test_a_draft_of_the_targets_layers_is_dealt_out_with_them(folders: dict[str, Path], two_ranks: RankPool) -> None:
    """Of one layer, the second stage has none; of three, one."""
    low = selection(budget=14, m=4)
    low = low.model_copy(update={"lookahead": low.lookahead[1:]})
    compare_bits(
        two_ranks,
        [
            case(folders, "llama", "dustin", own_layers=1, selection=low),
            case(folders, "qwen2", "dustin", own_layers=3),
            case(folders, "qwen2", "dustin-d", own_layers=3, draft_budget=9),
            case(folders, "qwen3", "magicdec", own_layers=2, draft_budget=9),
        ],
    )


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_draft_that_borrows_embedding_and_head(
    family: str, folders: dict[str, Path], two_ranks: RankPool, tmp_path: Path
) -> None:
    draft = write_headless(tmp_path / "draft", folders[family])
    compare(two_ranks, [case(folders, family, "dustin", headless=draft)])


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_turns_go_by_layers_of_the_whole(period: int, folders: dict[str, Path], two_ranks: RankPool) -> None:
    """Two of three layers are on the first stage; in some steps a stage has no turn."""
    compare(two_ranks, [rested(folders["llama"], SHAPES["llama"], period, pipeline=True, own_layers=None)])


def test_prompts_that_wait_for_a_row_and_texts_that_are_sampled(folders: dict[str, Path], two_ranks: RankPool) -> None:
    several = [case(folders, "qwen2", "dustin", own_layers=None, rows=rows) for rows in (1, 2)]
    hot = [case(folders, "llama", "dustin", temperature=1.3, own_layers=own, rows=2) for own in (None, 2)]
    compare(two_ranks, several + hot)
    assert alone(hot[0]).tokens != alone(hot[0]._replace(temperature=0.0)).tokens
    first, second = two_ranks(together, [hot[0], several[0]])
    assert torch.equal(first[0].logits, second[0].logits) and first[0].logits.shape[-1] == VOCAB
    assert (first[1].logits.shape[-1], second[1].logits.shape[-1]) == (0, VOCAB)  # the last stage's alone


def test_heads_that_do_not_divide(two_ranks: RankPool, tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "odd", ODD_HEADS)
    odd = Case(folder, ODD_HEADS, "dustin", selection(14, 4, heads=(1, 4)), own_layers=None, pipeline=True)
    compare(two_ranks, [odd])
    with pytest.raises(UsageError, match="2 ranks cannot share 5 query heads"):
        two_ranks(together, [odd._replace(pipeline=False)])


def held_here(one: Case) -> tuple[int, int, int]:
    """On a rank: elements of the target's weights, layers of its cache, and layers of the draft's."""
    with joined(20) as ranks:
        target, draft = models(one, ranks)
    weights = target.weights
    tensors = [weights.embedding, weights.norm, *([] if one.shape.tied else [weights.head])]
    tensors += [x for layer in weights.layers for x in vars(layer).values() if x is not None]
    assert all(cache.capacity == 9 for cache in (target.cache(1, 9), draft.cache(1, 9)))
    return sum(x.numel() for x in tensors), len(target.cache(1, 9).keys), len(draft.cache(1, 9).keys)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_rank_holds_its_stage_alone(family: str, folders: dict[str, Path], two_ranks: RankPool) -> None:
    shape = SHAPES[family]
    found = two_ranks(held_here, case(folders, family))
    stages = [Stage.of(shape, rank, 2) for rank in range(2)]
    assert found == [(held_weights(stages[0]), 2, 2), (held_weights(stages[1]), 1, 0)]
    twice = shape.vocab * shape.hidden if shape.tied else 0
    assert sum(map(held_weights, stages)) == shape.parameters + twice


@pytest.mark.parametrize("family", SHAPES)
def test_of_safetensors_a_rank_reads_its_stage_alone(family: str, folders: dict[str, Path]) -> None:
    shape, whole = SHAPES[family], set(dict(safetensors_in(folders[family])))
    read = [set(dict(safetensors_in(folders[family], Stage.of(shape, rank, 3)))) for rank in range(3)]
    assert set.union(*read) == whole
    tied = {"model.embed_tokens.weight"} if shape.tied else set()
    assert (read[0] & read[1], read[1] & read[2], read[0] & read[2]) == (set(), set(), tied)
    assert all(name.startswith(f"model.layers.{rank}.") for rank in range(3) for name in read[rank] if "layers" in name)
    assert {"model.norm.weight"} <= read[2]


@pytest.mark.parametrize("tied", [False, True])
def test_of_gguf_a_rank_reads_its_stage_alone(tied: bool, tmp_path: Path) -> None:
    tensors = gguf_files.tensors_of("qwen2", tied=tied)
    model = gguf.read_gguf(gguf_files.write(tmp_path / "m.gguf", tensors, gguf_files.fields_of("qwen2"), "qwen2"))
    left, right = (dict(model.tensors(share=Stage.of(model.shape, rank, 2))) for rank in range(2))
    assert left.keys() | right.keys() == set(model.names)
    assert left.keys() & right.keys() == ({"model.embed_tokens.weight"} if tied else set())
    for name, tensor in (left | right).items():
        assert torch.equal(tensor, model.tensor(name)), name


def test_layers_are_dealt_out_in_blocks() -> None:
    shape = SHAPES["llama"].model_copy(update={"layers": 8})
    stages = [Stage.of(shape, rank, 3) for rank in range(3)]
    assert [list(stage.layers) for stage in stages] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [len(stage.first_layers(4).layers) for stage in stages] == [3, 1, 0]
    with pytest.raises(UsageError, match="9 stages of a pipeline need a layer each, the target has 8; start no more"):
        Stage.of(shape, 0, 9)


def load(folder: Path) -> str:
    """On a rank: what is wrong with the target."""
    with joined(20) as ranks:
        try:
            load_decoder(folder, SHAPES["llama"], torch.float32, "cpu", ranks.collectives("cpu"), pipeline=True)
        except MissingError as error:
            return str(error)
        return ""


def test_what_a_file_lacks_or_has_too_much_is_seen(
    folders: dict[str, Path], two_ranks: RankPool, tmp_path: Path
) -> None:
    tensors = load_file(folders["llama"] / "model.safetensors")
    extra = tensors | {"model.layers.3.mlp.up_proj.weight": torch.zeros(1)}
    lacking = {name: x for name, x in tensors.items() if name != "model.layers.2.mlp.up_proj.weight"}
    save_file(extra, tmp_path / "model.safetensors")
    assert all("unexpected tensor model.layers.3." in said for said in two_ranks(load, tmp_path))
    save_file(lacking, tmp_path / "model.safetensors")
    left, right = two_ranks(load, tmp_path)
    assert left == "" and "model.layers.2.mlp.up_proj.weight among them" in right


def said(one: Case) -> tuple[type, str] | None:
    """On a rank: what ends a run."""
    with joined(20) as ranks:
        try:
            generate(one, ranks)
        except DustinError as error:
            return type(error), str(error)
        return None


@pytest.mark.parametrize(
    ("broken", "where"),
    [
        ("model.embed_tokens.weight", "in its embedding"),
        ("model.layers.0.mlp.down_proj.weight", "from layer 0 on"),
        ("model.layers.1.mlp.down_proj.weight", "from layer 1 on"),  # the last of the first stage
        ("model.layers.2.self_attn.v_proj.weight", "from layer 2 on"),
        ("model.norm.weight", "from layer 2 on"),
        ("lm_head.weight", "in its head"),
    ],
)
def test_ranks_name_one_layer_that_breaks(
    broken: str, where: str, folders: dict[str, Path], two_ranks: RankPool, tmp_path: Path
) -> None:
    tensors = load_file(folders["qwen2"] / "model.safetensors")
    tensors[broken].fill_(torch.nan)
    save_file(tensors, tmp_path / "model.safetensors")
    left, right = two_ranks(said, case({"qwen2": tmp_path}, "qwen2"))
    assert left == right and left[0] is NothingMeasuredError
    assert f"what the target makes of it is not finite, {where};" in left[1]


def test_no_graph_is_captured() -> None:
    shape = SHAPES["llama"]
    target = random_decoder(shape, torch.float32, "cpu")
    with mock.patch.object(graph, "usable", return_value=True):
        assert graph.capturable(target, None)
        target.split = Pipeline(Stage.of(shape, 0, 2), Collectives(0, 2))
        assert not graph.capturable(target, None)


def test_three_stages(folders: dict[str, Path], three_ranks: RankPool) -> None:
    """With a draft whose rows they share, one of a layer each, and one whose layer is on the first."""
    rest = rested(folders["llama"], SHAPES["llama"], pipeline=True, own_layers=None)
    compare(three_ranks, [case(folders, "llama", "dustin", own_layers=None), rest])
    own = [case(folders, "llama", "dustin", own_layers=3), case(folders, "qwen2", "streaming", own_layers=1)]
    compare_bits(three_ranks, own)


def dies_in_a_step(one: Case) -> None:
    """On a rank: that of the second stage is killed in the middle of a run."""
    real, calls = Collectives.receive, 0

    def receive(self: Collectives, *given: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if self.rank == 1 and calls == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *given)

    with mock.patch.object(Collectives, "receive", receive), joined(5) as ranks:
        generate(one._replace(new=100), ranks)


def test_a_stage_that_dies_ends_the_others(folders: dict[str, Path], three_ranks: RankPool) -> None:
    """The last test of these three processes."""
    three_ranks.start(dies_in_a_step, case(folders, "llama"))
    for rank in (0, 2):
        error = three_ranks.finish(rank, seconds=30)
        assert isinstance(error, PeerError) and error.exit_code == 9, error
