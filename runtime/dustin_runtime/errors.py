"""What can go wrong, each with the exit code that the command line answers with.

Every message is one line that names the field or file and the remedy. Codes are part of the interface: CI scripts
branch on them, so an existing one never changes its meaning.
"""

from __future__ import annotations

import errno

OUT_OF_MEMORY = "out of memory: lower the context, the batch or the budgets, or use a smaller model or dtype"


class DustinError(Exception):
    """Base of every error a user can cause or mend. `exit_code` 1 is left to bugs."""

    exit_code = 1
    quiet = False
    """Whether another process of the run says it."""


class UsageError(DustinError):
    """A flag or a combination of flags makes no sense."""

    exit_code = 2


class RegressionError(DustinError):
    """`check` found a score below its baseline."""

    exit_code = 3


class ConflictError(DustinError):
    """The run directory or baseline was made from other inputs, or processes of one run were given different ones."""

    exit_code = 4


class CapacityError(DustinError):
    """Memory, disk or the model's context range does not suffice."""

    exit_code = 5


class MissingError(DustinError):
    """A model, file or data set is absent, unreadable or damaged."""

    exit_code = 6


class ConfigError(DustinError):
    """A configuration or recipe is invalid, or belongs to another pair of models."""

    exit_code = 7


class InterruptedRunError(DustinError):
    """Ctrl-C came; what had been finished was delivered."""

    exit_code = 130


class NothingMeasuredError(DustinError):
    """The run ended without a usable sample: no accepted needle, no window, non-finite scores."""

    exit_code = 8


class PeerError(DustinError):
    """Another process of a distributed run has ended, or does not answer."""

    exit_code = 9


class ConfigWarning(UserWarning):
    """A config is used otherwise than it was searched for, or says what is not done. Shown in one line, as an error."""


class OtherWeightsWarning(ConfigWarning):
    """A config is used with weights that it was not searched with."""


def understood(error: Exception) -> DustinError | None:
    """What a user is told of an exception, others' included: memory, disk, or itself if it is ours. None for a bug."""
    if isinstance(error, DustinError):
        return error
    words = str(error).lower()
    # torch.OutOfMemoryError is a RuntimeError; the CPU allocator raises the plain class.
    full = isinstance(error, RuntimeError) and ("out of memory" in words or "can't allocate memory" in words)
    if full or isinstance(error, MemoryError):
        return CapacityError(OUT_OF_MEMORY)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(f"{error.filename or 'disk'}: no space left; free some and run the command again")
    return None
