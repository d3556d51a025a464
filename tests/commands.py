"""The two command lines as a shell sees them: exit code, stdout, stderr. In this process, so that torch loads once."""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest import mock

import typer.main
from tokenizers import Encoding

from dustin_profile import progress
from dustin_profile.cli.app import main as profile_main
from dustin_profile.encoder import PlainEncoder
from dustin_runtime.cli.app import main as run_main

SEARCH = [
    *("--mode", "forced", "--length", "256", "--depth-at", "0.5", "--depth-at", "1", "--needle-count", "3"),
    *("--context", "256", "--documents", "5", "--continuation", "24", "--windows", "4"),
    *("--budget", "64", "--draft-layers", "2"),
]
"""A search that takes the tiny pair a second."""
SRH, TRACE = SEARCH[:10], SEARCH[:18]


LONG = 100_000
"""Characters of a text whose tokens are worth remembering."""
_encode = PlainEncoder.encode
_encodings: dict[tuple[str, str], Encoding] = {}


def _encode_once(self: PlainEncoder, text: str) -> Encoding:
    """Many commands read the same documents with the same tokenizer: half of the time that a small one takes."""
    if len(text) < LONG:
        return _encode(self, text)
    key = (self._backend.to_str(), text)
    if key not in _encodings:
        _encodings[key] = _encode(self, text)
    return _encodings[key]


_get_command = functools.cache(typer.main.get_command)
"""The options of all commands are read from their functions once, not for every command that is run."""


class Outcome(NamedTuple):
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says what is wrong; what may stand beside it is progress."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert self.err.endswith(f"{lines[0]}\n"), self.err
        assert "Traceback" not in self.err
        return lines[0].removeprefix("error: ")


def dustin_profile(*arguments: object, environment: Mapping[str, str] | None = None) -> Outcome:
    """`dustin-profile`."""
    return _command(profile_main, "dustin-profile", arguments, environment or {})


def dustin_run(*arguments: object) -> Outcome:
    """`dustin-run`."""
    return _command(run_main, "dustin-run", arguments, {})


def _command(
    main: Callable[[], None], name: str, arguments: tuple[object, ...], environment: Mapping[str, str]
) -> Outcome:
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        mock.patch.object(sys, "argv", [name, *map(str, arguments)]),
        mock.patch.object(progress, "quiet", False),
        mock.patch.object(PlainEncoder, "encode", _encode_once),
        mock.patch.object(typer.main, "get_command", _get_command),
        mock.patch.dict(os.environ, environment),
    ):
        os.environ.pop("DUSTIN_DEBUG", None)
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    assert isinstance(code, int)
    return Outcome(code, out.getvalue(), err.getvalue())
