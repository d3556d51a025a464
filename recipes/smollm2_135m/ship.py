"""Put a trained draft beside the recipes: `python -m recipes.smollm2_135m.ship RUN`.

Copies `RUN/draft` to `draft/` beside this file and writes the recipe of the model, with the SHA-256 of its files. From
then on `--draft recipe:smollm2-135m-draft` loads it; a pair uses it once its recipe says `draft: smollm2-135m-draft`.
"""

from __future__ import annotations

import argparse
import shutil
from functools import partial
from pathlib import Path

from dustin_runtime.errors import ConfigError
from dustin_runtime.files import digest_file, write_text, write_with
from dustin_runtime.models.folder import read_config, weight_files
from dustin_runtime.models.headless import headless
from dustin_runtime.models.shape import shape_from_hf
from dustin_runtime.recipe_files import recipes_folder
from dustin_runtime.validation import dump_yaml
from recipes.smollm2_135m.command import run_main

NAME = "smollm2-135m-draft"
FOLDER = "smollm2_135m/draft"


def main(arguments: argparse.Namespace) -> None:
    """Copy, then write the recipe: weights without a recipe are only not found."""
    source: Path = arguments.run / "draft"
    config = read_config(source)
    if headless(config, str(source / "config.json")) is None:
        raise ConfigError(f"{source}: holds its own embedding; export a draft with train")
    files = [source / "config.json", *weight_files(source)]
    for path in files:
        write_with(recipes_folder() / FOLDER / path.name, partial(shutil.copyfile, path))
    shape = shape_from_hf(config, str(source / "config.json"))
    recipe = {
        "hub": f"recipe:{NAME}",
        "tokenizer_vocab": arguments.tokenizer_vocab,
        "notes": "Distilled from SmolLM2-135M-Instruct; embedding, head and tokenizer are the target's.",
        "shape": shape.model_dump(exclude_defaults=True),
        "weights": {"folder": FOLDER, "sha256": {path.name: digest_file(path) for path in files}},
    }
    write_text(recipes_folder() / "models" / f"{NAME}.yaml", dump_yaml(recipe, ""))
    print(f"recipe:{NAME}: {sum(path.stat().st_size for path in files):,} bytes")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="ship", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("run", type=Path, help="folder of a training run")
    made.add_argument("--tokenizer-vocab", type=int, default=49152, help="default: %(default)s")
    return made


if __name__ == "__main__":
    run_main(parser(), main)
