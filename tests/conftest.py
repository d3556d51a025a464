"""Fixtures that several packages' tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rank_pool import RankPool
from tiny_pair import TinyPair, train_tokenizer, write_pair
from transformers import PreTrainedTokenizerFast

# Workers share the cores: a second thread each would wait for its turn at the end of every operation.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run."""
    absent = {
        "gpu": None if torch.cuda.is_available() else "needs a CUDA device",
        "qwen": None if os.environ.get("DUSTIN_QWEN_PAIR") else "needs DUSTIN_QWEN_PAIR",
    }
    for item in items:
        for marker, reason in absent.items():
            if reason and marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def small_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 2000 tokens, trained on Python's reference topics; it adds no special token."""
    return train_tokenizer()


@pytest.fixture(scope="session")
def tiny_pair(small_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """Folders of a random target (4 layers, 6 query heads) and draft (3 layers, 4 query heads) on one tokenizer."""
    return write_pair(tmp_path_factory.mktemp("pair"), small_tokenizer)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two processes, for all tests of what several do together."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture
def plain_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are written but not drawn, which takes longer than all the rest of a tiny run."""
    from dustin_profile import plots
    from dustin_runtime.files import write_with

    def save(figure: object, path: Path) -> None:
        write_with(path, lambda temporary: temporary.write_bytes(b"PNG"))

    monkeypatch.setattr(plots, "save", save)
