"""Schedules are functions of the step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dustin_runtime.errors import UsageError
from recipes.smollm2_135m.losses import Weights
from recipes.smollm2_135m.schedule import Schedule, parse_lengths, parse_losses

SCHEDULE = Schedule(
    steps=100,
    rate=1.0,
    warmup=10,
    floor=0.1,
    lengths=parse_lengths("0:8,16;0.5:16,64"),
    losses=parse_losses("0:kl=1;0.7:kl=0.25,tv=0.75"),
)


def test_rate_rises_falls_and_ends_at_its_floor() -> None:
    rates = [SCHEDULE.rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_lengths_alternate_and_losses_change() -> None:
    assert [SCHEDULE.length_at(step) for step in (0, 1, 2, 49, 50, 51)] == [8, 16, 8, 16, 16, 64]
    assert SCHEDULE.longest == 64
    assert SCHEDULE.weights_at(69) == Weights(1, 0)
    assert SCHEDULE.weights_at(70) == Weights(0.25, 0.75)


def test_an_earlier_end_changes_nothing_before_it_was_decided() -> None:
    short = replace(SCHEDULE, ending=(40, 60))
    assert (SCHEDULE.end, short.end) == (100, 60)
    assert all(short.rate_at(step) == SCHEDULE.rate_at(step) for step in range(41))
    rates = [short.rate_at(step) for step in range(40, 61)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("512", "give SHARE:VALUES"),
        ("x:512", "give SHARE:VALUES"),
        ("0.5:512", "must ascend from 0"),
        ("0:512;1:512", "stay below 1"),
        ("0:512,x", "no list of numbers"),
        ("0:512;0.5:700", "512 does not divide the longest, 700"),
    ],
)
def test_lengths_that_make_no_sense(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["0:kl", "0:js=1", "0:kl=-1", "0:kl=0", "0:kl=x", "kl=1"])
def test_losses_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="--loss"):
        parse_losses(text)
