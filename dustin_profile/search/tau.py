"""Tokens per step, by walking a continuation as a decoder would: what speculative decoding emits at any depth.

The walk is that of lossless greedy verification. Sparse verification changes a few of the target's choices, and with
them what is accepted; that is left out. Where a given answer was forced, it is what the draft has to agree with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dustin_profile.traces.windows import Documents
from dustin_runtime.errors import MissingError, NothingMeasuredError


def walk(agrees: Tensor, depth: int) -> tuple[int, int]:
    """Tokens emitted and steps taken, of one continuation.

    A step emits the drafts that the target agrees with, up to the first that it does not, and one token of its own. The
    first token is the prefill's. A last step whose outcome lies beyond the continuation is left out.

    Args:
        agrees: [C] bool, as of `Windows`.
        depth: drafts of a step, at least 1.
    """
    said: list[bool] = agrees.tolist()
    at, steps = 1, 0
    while at < len(said):
        run = 0
        while run < depth and at + run < len(said) and said[at + run]:
            run += 1
        if run < depth and at + run == len(said):
            break
        at += run + 1
        steps += 1
    return at - 1, steps


def tokens_per_step(agreements: Sequence[Tensor], depths: Sequence[int]) -> Tensor:
    """[documents, depths] fp64; NaN where a continuation holds no whole step.

    Args:
        agreements: of every document, as `walk` takes them.

    Raises:
        NothingMeasuredError: no continuation holds a step of some depth.
    """
    found = torch.full((len(agreements), len(depths)), torch.nan, dtype=torch.float64)
    for row, agrees in enumerate(agreements):
        for column, depth in enumerate(depths):
            tokens, steps = walk(agrees, depth)
            if steps:
                found[row, column] = tokens / steps
    for column, depth in enumerate(depths):
        if found[:, column].isnan().all():
            raise NothingMeasuredError(f"no continuation holds a step of depth {depth}; raise --continuation")
    return found


def agreement(documents: Documents, index: int) -> Tensor:
    """`Windows.agrees` of one document.

    Raises:
        MissingError: its traces were made before that was recorded.
    """
    windows = documents[index]
    if not len(windows.agrees):
        raise MissingError(
            f"{windows.document}: its traces do not say which tokens the draft would have proposed; delete the folder"
            " of traces and run the same dustin-profile trace or search again"
        )
    return windows.agrees
