"""Charts at their edges, drawn for real."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dustin_profile import progress
from dustin_profile.method_styles import style
from dustin_profile.reporting.blocks import Figure
from dustin_profile.reporting.charts import Mark, bars, columns, curve, heatmap, intervals, lines, scatter, stacked
from dustin_profile.reporting.charts.axes import short
from dustin_profile.reporting.charts.lines import _spread
from dustin_profile.reporting.documents.common import Estimate
from dustin_profile.reporting.drawing import draw

OWN, OTHER, NEW = style("dustin"), style("streaming"), style("a method of $tomorrow$ with a long, long name")
TIE = [(OWN, [1.0, 2.0], [0.5, 0.25]), (OTHER, [1.0, 2.0], [0.75, 0.25]), (NEW, [1.0, 2.0], [0.25, 0.25])]


@pytest.mark.parametrize(
    "chart",
    [
        partial(lines, curves=TIE, xlabel="x", ylabel="y", log_x=True, log_y=True, x_ticks=[1, 2]),
        partial(lines, curves=[(OWN, [1.0], [0.0])], xlabel="x", ylabel="y", from_zero=True),
        partial(intervals, marks=[Mark("one", Estimate(mean=0.5), OWN)], xlabel="x"),
        partial(intervals, marks=[Mark("none", Estimate(mean=0.0, low=0.0, high=0.0), NEW)], xlabel="x", zero=True),
        partial(intervals, marks=[Mark("huge", Estimate(mean=1e300, low=-1e300, high=1e300), OWN)], xlabel="x"),
        partial(bars, rows=[(OWN, "two\nlines", 0.0, "0")], xlabel="x"),
        partial(stacked, rows=[("a", {"p": 1.0, "q": -1.0})], parts={"p": "P", "q": "Q"}, xlabel="x", marks=[None]),
        partial(heatmap, table=[[0.0]], xlabel="x", ylabel="y", bar_label="z", written=True),
        partial(heatmap, table=[[float("nan"), 1.0]], xlabel="x", ylabel="y", bar_label="", marks=[(0, 0)]),
        partial(curve, values=[0.5], chosen=0, flat=(0, 0), levels={"oracle": 1.0}, xlabel="x", ylabel="y"),
        partial(columns, values=[None, 0.5], chosen=[1], xlabel="x", ylabel="y"),
        partial(scatter, groups=[(OWN, [0.5], [0.0]), (NEW, [0.5], [0.5])], xlabel="x", ylabel="y"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_little_data_is_drawn(chart: Callable[[Any], None]) -> None:
    drawn = draw(Figure("name", "", "what it & shows", chart, synthetic=["a word " * 40]))
    assert drawn.png.startswith(b"\x89PNG")
    assert drawn.inline.startswith("<svg ") and drawn.inline.rstrip().endswith("</svg>")
    assert 'aria-label="what it &amp; shows"' in drawn.inline
    assert "SYNTHETIC: a word" in drawn.svg
    assert "xlink" not in drawn.inline.replace("xmlns:xlink", "")


def test_labels_without_room_are_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(progress, "quiet", False)
    draw(Figure("crowded", "", "", partial(bars, rows=[(OWN, "one", 1.0, "9" * 400)], xlabel="x")))
    assert capsys.readouterr().err == "crowded: its labels leave no room for what is drawn; look at the table instead\n"
    assert not recwarn.list


@given(st.lists(st.floats(-2, 2), max_size=12), st.floats(0.01, 0.5))
def test_labels_keep_their_distance_and_order(wanted: list[float], gap: float) -> None:
    wanted = sorted(wanted)
    places = _spread(wanted, gap)
    assert len(places) == len(wanted)
    assert all(later - earlier > gap - 1e-9 for earlier, later in pairwise(places))
    if len(wanted) == 1 or all(b - a >= gap for a, b in pairwise(wanted)):
        assert places == pytest.approx(wanted)


def test_long_labels_are_cut_in_the_middle() -> None:
    assert short("StreamingLLM") == "StreamingLLM"
    cut = short("Qwen2.5-Coder-1.5B-Instruct.Q4_K_M\ndraft reads 512")
    assert cut.splitlines()[1] == "draft reads 512"
    assert cut.startswith("Qwen2.5") and "…" in cut and len(cut.splitlines()[0]) <= 26
