"""Timings, slicings and costs as plotly figures, and figures as files."""

from terapipe.plots.curves import memory
from terapipe.plots.export import find_browser, save
from terapipe.plots.lanes import compare, timeline
from terapipe.plots.lengths import slicing
from terapipe.plots.pareto import pareto
from terapipe.plots.residuals import residuals
from terapipe.plots.shares import budget
from terapipe.plots.surface import cost_surface
from terapipe.plots.tradeoff import t_max

__all__ = [
    "budget",
    "compare",
    "cost_surface",
    "find_browser",
    "memory",
    "pareto",
    "residuals",
    "save",
    "slicing",
    "t_max",
    "timeline",
]
