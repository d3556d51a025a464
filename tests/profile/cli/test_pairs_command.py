"""`dustin-profile pairs` as a user runs it."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from dustin_profile.cli.pairs import app
from dustin_runtime.errors import UsageError
from dustin_runtime.pairs import ModelRecipe, all_pairs, find_pair

root = typer.Typer()
root.add_typer(app, name="pairs")
root.command("other")(lambda: None)


def output(*arguments: str) -> str:
    result = CliRunner().invoke(root, ["pairs", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_list_has_a_line_for_every_pair() -> None:
    lines = output().splitlines()
    for pair in all_pairs():
        line = next(line for line in lines if line.split()[0] == pair.name)
        assert line.split()[-2:] == [str(pair.depth), str(pair.budget)]
        assert pair.target.hub.partition("/")[2] in line


def test_list_as_json_is_one_document() -> None:
    listed = json.loads(output("--json"))["pairs"]
    assert [entry["pair"] for entry in listed] == [pair.name for pair in all_pairs()]


def test_show_prints_both_models() -> None:
    text = output("show", "qwen72b:0.5b")
    for word in ("Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", "72.706", "152064 rows", "yarn"):
        assert word in text


@pytest.mark.parametrize("arguments", [("show", "llama8b:1b", "--json"), ("--json", "show", "llama8b:1b")])
def test_show_as_json_round_trips(arguments: tuple[str, ...]) -> None:
    shown = json.loads(output(*arguments))
    assert ModelRecipe.model_validate(shown["target"]) == find_pair("llama8b:1b").target
    assert (shown["pair"], shown["depth"], shown["draft_id"]) == (
        "llama8b:1b",
        3,
        "meta-llama/Llama-3.2-1B-Instruct",
    )


def test_unknown_pair_is_a_usage_error_with_nothing_on_stdout() -> None:
    result = CliRunner().invoke(root, ["pairs", "show", "nonsense", "--json"])
    assert isinstance(result.exception, UsageError)
    assert result.stdout == ""
