"""Token files and blocks: what a step reads is a function of seed and step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dustin_runtime.errors import MissingError, UsageError
from dustin_runtime.files import write_json
from recipes.smollm2_135m import data, texts
from recipes.smollm2_135m.data import Mixture, parse_shares, read_manifest, read_source, spread, write_source

STREAMS = {"a": np.arange(1000, dtype=np.int32), "b": np.arange(5000, 5600, dtype=np.int32)}


def mixture(seed: int = 0, **shares: float) -> Mixture:
    return Mixture(STREAMS, shares or {"a": 0.75, "b": 0.25}, 64, seed)


def test_batches_depend_on_seed_and_step_alone() -> None:
    one, other = mixture(), mixture()
    assert torch.equal(one.batch(7, 256, 16), other.batch(7, 256, 16))
    assert [tuple(one.batch(step, 256, 64).shape) for step in (0, 1)] == [(4, 64), (4, 64)]
    assert not torch.equal(one.batch(7, 256, 16), one.batch(8, 256, 16))
    assert not torch.equal(one.batch(7, 256, 16), mixture(1).batch(7, 256, 16))
    assert torch.equal(one.batch(3, 256, 16).flatten(), one.batch(3, 256, 64).flatten())  # the length cuts, no more


def test_the_same_bytes_on_every_machine() -> None:
    assert mixture().batch(2, 128, 64)[:, 0].tolist() == [443, 5265]


def test_a_block_is_a_stretch_of_its_source_and_shares_hold_in_the_short_run() -> None:
    found = mixture()
    for number in range(40):
        block = found.block_at(number)
        assert (np.diff(block) == 1).all()
        assert block[0] in STREAMS[found.source_of(number)]
    counts = [sum(found.source_of(number) == "b" for number in range(begin, begin + 40)) for begin in (0, 40, 80)]
    assert all(9 <= count <= 11 for count in counts)
    assert {mixture(b=1).source_of(number) for number in range(20)} == {"b"}


def test_shares_without_text_are_refused() -> None:
    with pytest.raises(UsageError, match="no source c"):
        mixture(c=1.0)
    with pytest.raises(UsageError, match="600 tokens do not fill one of 700"):
        Mixture(STREAMS, {"b": 1.0}, 700, 0)
    assert parse_shares("a=0.5,b=0") == {"a": 0.5}
    for text in ("a", "a=-1,b=2", "a=0", "a=x"):
        with pytest.raises(UsageError, match="--shares"):
            parse_shares(text)


def test_held_out_sequences_lie_evenly_and_apart() -> None:
    rows = spread(STREAMS["a"], 100, 4)
    assert rows[:, 0].tolist() == [0, 250, 500, 750]
    assert spread(STREAMS["a"], 400, 9).shape == (2, 400)
    assert spread(STREAMS["a"], 2000, 9).shape == (0, 2000)


@pytest.mark.parametrize("largest", [49151, 70000])
def test_streams_come_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    monkeypatch.setattr(data, "PART_TOKENS", 300)
    write_json(tmp_path / data.MANIFEST, {"kind": "dustin-draft-data", "sources": {}})
    stream = np.linspace(0, largest, 1000).astype(np.uint32)
    write_source(tmp_path, "a", {"train": data.write_tokens(tmp_path, "a", "train", stream)})
    manifest = read_manifest(tmp_path)
    assert [entry["tokens"] for entry in manifest["sources"]["a"]["train"]] == [300, 300, 300, 100]
    assert (read_source(tmp_path, manifest, "a", "train") == stream).all()
    (tmp_path / "a.train-1.safetensors").write_bytes(b"other")
    with pytest.raises(MissingError, match=r"a\.train-1\.safetensors: absent, or not the file"):
        read_source(tmp_path, manifest, "a", "train")


def test_another_json_file_is_no_manifest(tmp_path: Path) -> None:
    write_json(tmp_path / data.MANIFEST, {"kind": "other"})
    with pytest.raises(MissingError, match="not a manifest"):
        read_manifest(tmp_path)


def test_a_files_docstrings_are_held_out_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lengthy = "An explanation of what this does. " * 20
    for number in range(60):
        (tmp_path / f"m{number}.py").write_text(f'"""{lengthy}"""\n\ndef f():\n    """{lengthy}"""\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "t.py").write_text(f"# {lengthy}")
    (tmp_path / "broken.py").write_text(f"def {lengthy}")
    monkeypatch.setattr(texts, "_roots", lambda: iter([("pkg", tmp_path, "lib")]))
    monkeypatch.setattr(texts, "PACKAGES", ())
    code = {text.name: text.held_out for text in texts.code()}
    docs = {text.name: text for text in texts.documentation()}
    assert len(code) == 61 and "pkg/lib/tests/t.py" not in code
    assert 0 < sum(code.values()) < 12
    assert {name.removesuffix(": docstrings"): text.held_out for name, text in docs.items()} == {
        name: held for name, held in code.items() if "broken" not in name
    }
    assert docs["pkg/lib/m0.py: docstrings"].text.endswith(f"f\n\n{lengthy}")
    with pytest.raises(MissingError, match=r"holds no \.txt"):
        list(texts.books(tmp_path))
