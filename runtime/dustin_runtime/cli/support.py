"""What both command lines share: errors become one line and an exit code, and stdout stays for results."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dustin_runtime.errors import ConfigWarning, DustinError, InterruptedRunError, UsageError, understood

EXIT_CODES = """\
Exit codes: 0 done; 1 a bug; 2 usage; 3 regression found by check; 4 run directory or baseline made from other inputs;
5 memory, disk or context does not suffice; 6 model or data missing or damaged; 7 invalid config, or of another pair;
8 nothing could be measured; 9 another process of a distributed run ended; 130 interrupted."""
INTERRUPTED = InterruptedRunError.exit_code
OVER_RANKS = ("generate", "bench")
"""Commands that torchrun may start as several processes of one run."""


def run_app(app: Callable[[], object], *, interrupted: str = "interrupted") -> None:
    """Run a Typer app as a program.

    A `DustinError` prints its one line on stderr and exits with its code; `DUSTIN_DEBUG=1` shows the traceback.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of libraries, which would mix with ours
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what the terminal's encoding lacks is no error
    try:
        with _interrupts_wait_for_torch(), _one_line_warnings():
            app()
    except DustinError as error:
        if error.quiet:
            raise SystemExit(error.exit_code) from None
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail(interrupted, INTERRUPTED)
    except SystemExit as error:
        if error.code == INTERRUPTED:  # Typer turns the exception into this
            _fail(interrupted, INTERRUPTED)
        if isinstance(error.__context__, BrokenPipeError):  # and a closed pipe into 1, which is a bug's
            raise SystemExit(0) from None
        raise
    except Exception as error:
        if (told := understood(error)) is None:
            raise
        _fail(str(told), told.exit_code)


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Show our own warnings as we show errors, and once where several processes have the same."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, ConfigWarning):
                shown(message, category, *where, **more)
            elif os.environ.get("RANK", "0") == "0":
                print(f"warning: {message}", file=sys.stderr)

        warnings.showwarning = show
        yield


@contextmanager
def _interrupts_wait_for_torch() -> Iterator[None]:
    """Put Ctrl-C off while torch is being imported: its C++ part loses the exception, or aborts on it."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
            threading.Timer(0.05, signal.raise_signal, (number,)).start()
        else:
            raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or a host program's
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _fail(message: str, code: int) -> None:
    if os.environ.get("DUSTIN_DEBUG"):
        import traceback

        traceback.print_exc()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


def one_process(command: str) -> UsageError:
    """That a command was started by torchrun which does not share its work."""
    return UsageError(f"{command}: runs in one process; only {' and '.join(OVER_RANKS)} serve under torchrun")


def go_offline() -> None:
    """Forbid the hub. Its libraries read this once, when they are imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ["HF_DATASETS_OFFLINE"] = "1"


def require_one_budget(budget: int | None, target_arr: float | None) -> None:
    """Refuse a budget where one of several is chosen at every step.

    Raises:
        UsageError: both are given.
    """
    if budget is not None and target_arr is not None:
        raise UsageError(f"--budget {budget}: --target-arr chooses the budget at every step; leave one of them out")
