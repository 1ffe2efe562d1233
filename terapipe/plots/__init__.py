"""Timings and slicings as plotly figures, and figures as files."""

from terapipe.plots.export import find_browser, save
from terapipe.plots.lanes import compare, timeline
from terapipe.plots.lengths import slicing
from terapipe.plots.shares import budget

__all__ = ["budget", "compare", "find_browser", "save", "slicing", "timeline"]
