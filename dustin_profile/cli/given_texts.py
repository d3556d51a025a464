"""What commands on given texts share: their options, and the texts and models behind them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from pydantic import TypeAdapter, ValidationError

from dustin_profile.settings import ModelSettings
from dustin_runtime.errors import UsageError
from dustin_runtime.validation import one_line

if TYPE_CHECKING:
    from dustin_profile.evaluation.given_texts import GivenTexts
    from dustin_runtime.config import DustinConfig
    from dustin_runtime.models.decoder import Decoder

T = TypeVar("T")
Data = Annotated[str, typer.Option(help="JSONL, parquet, text file or folder, hub data set, or topics.")]
Context = Annotated[
    int,
    typer.Option(
        min=3, help="Tokens of every plain text, prompt and --tokens; of the prompt alone where it has an answer."
    ),
]
Documents = Annotated[int, typer.Option(min=1, help="Documents.")]
Tokens = Annotated[int, typer.Option(min=2, help="Tokens of text behind every prompt, at most.")]


def open_texts(
    served: DustinConfig,
    models: ModelSettings,
    data: str,
    context: int,
    documents: int,
    tokens: int,
    *,
    generated: bool = False,
) -> GivenTexts:
    """Find models and documents; weights are loaded when first needed.

    Args:
        generated: whether the tokens are to be generated behind a prompt of `context`, rather than its last ones.

    Raises: as `check.open_models` and `traces.stage.calibration`.
    """
    from dustin_profile import progress
    from dustin_profile.check import open_models
    from dustin_profile.evaluation.given_texts import GivenTexts
    from dustin_profile.provenance import device_kind
    from dustin_profile.settings import DataSettings
    from dustin_profile.traces.stage import calibration
    from dustin_runtime.loading import pick_device, pick_dtype

    pair = open_models(served, models)
    beyond, asked_by = (tokens, "--context with --tokens") if generated else (0, "--context, prompt and --tokens")
    settings = DataSettings(data=data, context=context, documents=documents, continuation=beyond)
    prompts = calibration(pair, settings, models.offline, asked_by)
    device = pick_device(models.device)
    dtype = pick_dtype(models.dtype, device)

    def load() -> tuple[Decoder, Decoder]:
        progress.say(f"loading {pair.target_id} and {pair.draft_id}")
        target = pair.load_target(dtype, device)
        return target, pair.load_draft(target)

    inputs = {
        "device": device_kind(device),
        "dtype": str(dtype).removeprefix("torch."),
        "context": context,
        "documents": documents,
    }
    return GivenTexts(pair, served, load, prompts, tokens, inputs)


def add_options(parser: ArgumentParser, context: int, tokens: int) -> None:
    """The options of a study of one set of texts, which `texts_of` reads."""
    for name in ("pair", "target", "draft"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--data", default="topics")
    parser.add_argument("--context", type=int, default=context, help="tokens of a document, its text included")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=tokens, help="of a document's text")


def texts_of(arguments: Namespace, served: DustinConfig) -> GivenTexts:
    """What `add_options` asked for. Raises: as `open_texts`."""
    named = {name: getattr(arguments, name) for name in ("pair", "target", "draft", "device", "dtype")}
    models = ModelSettings(**named, offline=True)
    return open_texts(served, models, arguments.data, arguments.context, arguments.documents, arguments.tokens)


def check_tokens(context: int, tokens: int) -> None:
    """Refuse a text that leaves no prompt.

    Raises:
        UsageError: it does.
    """
    if tokens >= context:
        raise UsageError(f"--tokens {tokens}: leaves no prompt of --context {context}")


def json_list(option: str, given: str, of: TypeAdapter[list[T]]) -> list[T]:
    """What an option of a study gives: a JSON list, or a file of one.

    Raises:
        UsageError: it is neither, or not a list of what is wanted.
    """
    inline = given.lstrip().startswith("[")
    if not inline and not Path(given).is_file():
        raise UsageError(f"{option} {given}: neither a JSON list nor a file")
    try:
        return of.validate_json(given if inline else Path(given).read_text(encoding="utf-8"))
    except ValidationError as error:
        raise UsageError(f"{option}: {one_line(error)}") from None
