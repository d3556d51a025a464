"""What both command lines share: errors become one line and an exit code, and stdout stays for results."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from dustin_runtime.errors import CapacityError, DustinError

EXIT_CODES = """\
Exit codes: 0 done; 1 a bug; 2 usage; 3 regression found by check; 4 run directory or baseline made from other inputs;
5 memory, disk or context does not suffice; 6 model or data missing or damaged; 7 invalid config, or of another pair;
8 nothing could be measured; 130 interrupted."""
INTERRUPTED = 130
OUT_OF_MEMORY = "out of memory: lower --context or the batch, or use a smaller model or dtype"


def run_app(app: Callable[[], object]) -> None:
    """Run a Typer app as a program.

    A `DustinError` prints its one line on stderr and exits with its code; `DUSTIN_DEBUG=1` shows the traceback.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of libraries, which would mix with ours
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except DustinError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted; run the same command again to continue", INTERRUPTED)
    except SystemExit as error:
        if error.code == INTERRUPTED:  # Typer turns the exception into this
            _fail("interrupted; run the same command again to continue", INTERRUPTED)
        raise
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except MemoryError:
        _fail(OUT_OF_MEMORY, CapacityError.exit_code)
    except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU allocator raises the plain class
        if not any(words in str(error).lower() for words in ("out of memory", "can't allocate memory")):
            raise
        _fail(OUT_OF_MEMORY, CapacityError.exit_code)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _fail(
            f"{error.filename or 'disk'}: no space left; free some and run the command again", CapacityError.exit_code
        )


def _fail(message: str, code: int) -> None:
    if os.environ.get("DUSTIN_DEBUG"):
        import traceback

        traceback.print_exc()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


def go_offline() -> None:
    """Forbid the hub. Its libraries read this once, when they are imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ["HF_DATASETS_OFFLINE"] = "1"
