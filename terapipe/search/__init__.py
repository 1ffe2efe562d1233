"""Whatever simulates in order to choose: slicings for a schedule family, slicings side by side, schedule families."""

from terapipe.search.compare import compare_slicings
from terapipe.search.schedules import best_schedule
from terapipe.search.slicing import SlicingSearch, search_slicing

__all__ = ["SlicingSearch", "best_schedule", "compare_slicings", "search_slicing"]
