"""A config for the tiny pair."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_pair import TinyPair

from dustin_runtime.config import DustinConfig, LayerHeads, Selection, save_config
from dustin_runtime.loading import open_pair

LAYER_1 = LayerHeads(layer=1, heads=(1, 2))


@pytest.fixture(scope="module")
def config(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pair = open_pair(str(tiny_pair.target), str(tiny_pair.draft), offline=True)
    selection = Selection(
        budget=64,
        sink=4,
        window=8,
        m=20,
        history=LayerHeads(layer=2, heads=(0, 3)),
        lookahead=(LAYER_1,),
        retrieval_heads=((0, 3),) * pair.target_shape.layers,
    )
    path = tmp_path_factory.mktemp("config") / "pair.yaml"
    save_config(DustinConfig(pair=pair.identity(), depth=2, selection=selection), path)
    return path
