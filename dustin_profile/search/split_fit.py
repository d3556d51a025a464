"""The weight of `dustin-merged`, fitted on traces (`dustin_runtime.config.Split`)."""

from __future__ import annotations

import torch
from torch import Tensor

from dustin_profile.search.arr import arr, first_best, mass
from dustin_profile.search.phases import over_documents
from dustin_profile.search.signals import TraceSignals
from dustin_profile.traces.windows import Documents, Windows
from dustin_runtime.config import Selection, Split
from dustin_runtime.policies.dustin import Dustin
from dustin_runtime.policies.dustin_merged import DustinMerged, split_of

WEIGHTS = tuple(step / 16 for step in range(17))
"""Tried for `Split.weight`."""


def arr_of(windows: Windows, policy: Dustin) -> Tensor:
    """Windowed ARR of what a method keeps, [W] fp64."""
    assert policy.selection is not None
    kept = policy.select(TraceSignals(windows, policy.selection))[0, :, 0]
    return arr(windows, mass(windows.truth, kept).sum(-1))


def fit_split(documents: Documents, selection: Selection) -> Split:
    """The selection's split, or the default one, with the weight of the best mean ARR, the smallest of equals.

    The exponent stays as it is. With exponent 1 the embedded pair's KL asked for more lookahead than its ARR did:
    `tools/study_splits.py` compares weights and exponents by both.

    Raises:
        NothingMeasuredError: there are no documents, or their traces are empty or not finite.
    """
    tried = [split_of(selection).model_copy(update={"weight": weight}) for weight in WEIGHTS]
    policies = [DustinMerged(selection.model_copy(update={"split": split})) for split in tried]

    def measure(windows: Windows) -> Tensor:
        return torch.stack([arr_of(windows, policy) for policy in policies])

    return tried[first_best(over_documents(documents, measure).mean(0))]
