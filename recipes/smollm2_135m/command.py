"""How every script here ends: an error of the project is one line and its exit code, as in the two command lines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from dustin_runtime.errors import DustinError


def run_main(parser: argparse.ArgumentParser, main: Callable[[argparse.Namespace], None]) -> None:
    """Parse the command line, run, exit."""
    arguments = parser.parse_args()
    try:
        main(arguments)
    except DustinError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
