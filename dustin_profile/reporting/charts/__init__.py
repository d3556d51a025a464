"""The few kinds of charts that sections draw, each into a matplotlib figure or a part of one."""

from __future__ import annotations

from dustin_profile.reporting.charts.bars import Mark, bars, intervals, stacked
from dustin_profile.reporting.charts.lines import columns, curve, lines, scatter
from dustin_profile.reporting.charts.maps import heatmap

__all__ = ["Mark", "bars", "columns", "curve", "heatmap", "intervals", "lines", "scatter", "stacked"]
