"""Progress of long work on stderr: a bar with the remaining time on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_SECONDS = 15.0
"""How often a log gets a line where there is no terminal."""

quiet = False
"""Set by `--quiet`: no progress at all."""


@contextmanager
def progress(title: str, total: float) -> Iterator[Callable[[float], None]]:
    """Show how far `total` units of work are; yields the function that reports units done."""
    if quiet:
        yield lambda done: None
    elif sys.stderr.isatty():
        with _bar(title, total) as advance:
            yield advance
    else:
        yield _lines(title, total)


def say(text: str) -> None:
    """Tell the user something: on stderr, since stdout is for results."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def _bar(title: str, total: float) -> Iterator[Callable[[float], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, advance=done)


def _lines(title: str, total: float) -> Callable[[float], None]:
    began = last = time.monotonic()
    done = 0.0

    def advance(units: float) -> None:
        nonlocal last, done
        done += units
        now = time.monotonic()
        if now - last >= LINE_SECONDS and total > 0:
            last = now
            left = (now - began) / done * (total - done)
            say(f"{title}: {done / total:.0%}, {left:.0f} s left")

    return advance
