"""The curve of m as an Optuna study in a journal file, for Optuna's dashboard, plots and samplers.

The objective is a look-up in the exact curve: nothing is saved by asking less of it. `exact` therefore records every
m; Optuna's own samplers are kept for fidelity to arXiv 2606.24957 (Alg. 1, phase 3). A study takes seconds and is
built anew each time, so a crash leaves nothing to resume and a seed always gives the same trials.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dustin_profile.choices import Sampler
from dustin_runtime.errors import UsageError
from dustin_runtime.files import write_with

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler


class StudyResult(NamedTuple):
    """What the study found."""

    m: int
    """The best m tried; of equals the smallest."""
    value: float
    """Its mean ARR."""
    trials: int
    """Trials finished, repeated ones included."""


def write_study(
    path: Path,
    curve: Sequence[float],
    *,
    name: str,
    sampler: Sampler = "exact",
    seed: int = 0,
    trials: int = 100,
    attributes: Mapping[str, Any] | None = None,
) -> StudyResult:
    """Search the curve with `sampler` and replace the journal file at `path` by the study.

    Args:
        path: `optuna-dashboard` and `optuna.load_study` open it.
        curve: mean ARR at m = 0, 1, ... (one or more values).
        name: of the study, such as the fingerprint of its inputs.
        seed: of Optuna's samplers; `exact` needs none.
        trials: how many Optuna's samplers try; the first are m = 0, the largest m and half of it. `brute` ends early
            once it has tried all. `exact` always records all.
        attributes: JSON values stored with the study, such as the arguments of the search.

    Raises:
        UsageError: `trials` is below 1.
        CapacityError, MissingError: the file cannot be written.
    """
    if trials < 1:
        raise UsageError(f"trials: {trials} is too few; give 1 or more")
    results: list[StudyResult] = []
    write_with(
        path,
        lambda temporary: results.append(_fill(temporary, curve, name, sampler, seed, trials, attributes or {})),
    )
    return results[0]


def _fill(
    path: Path,
    curve: Sequence[float],
    name: str,
    sampler: Sampler,
    seed: int,
    trials: int,
    attributes: Mapping[str, Any],
) -> StudyResult:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path.unlink(missing_ok=True)  # a process of the same id may have died over it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(path))),
            study_name=name,
            direction="maximize",
            sampler=None if sampler == "exact" else _sampler(sampler, seed),
        )
        for key, value in {"sampler": sampler, "seed": seed, **attributes}.items():
            study.set_user_attr(key, value)
        if sampler == "exact":
            _record(study, curve)
        else:
            _optimize(study, curve, trials)
    found = study.get_trials(deepcopy=False)
    best = min(found, key=lambda trial: (-trial.values[0], trial.params["m"]))
    return StudyResult(best.params["m"], best.values[0], len(found))


def _record(study: Study, curve: Sequence[float]) -> None:
    """Add every m as a finished trial."""
    from optuna.distributions import IntDistribution
    from optuna.trial import create_trial

    space = {"m": IntDistribution(0, len(curve) - 1)}
    study.add_trials([create_trial(params={"m": m}, distributions=space, value=value) for m, value in enumerate(curve)])


def _optimize(study: Study, curve: Sequence[float], trials: int) -> None:
    """Let the study's sampler ask for `trials` values of m."""
    largest = len(curve) - 1
    for m in (0, largest, largest // 2):
        study.enqueue_trial({"m": m}, skip_if_exists=True)
    study.optimize(lambda trial: curve[trial.suggest_int("m", 0, largest)], n_trials=trials)


def _sampler(name: Sampler, seed: int) -> BaseSampler:
    from optuna.samplers import BruteForceSampler, GPSampler, TPESampler

    if name == "tpe":
        return TPESampler(seed=seed)
    if name == "gp":
        return GPSampler(seed=seed, deterministic_objective=True)
    return BruteForceSampler(seed=seed)
