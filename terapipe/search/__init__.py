"""Whatever simulates in order to choose: slicings for a schedule family, and slicings side by side."""

from terapipe.search.compare import compare_slicings
from terapipe.search.slicing import SlicingSearch, search_slicing

__all__ = ["SlicingSearch", "compare_slicings", "search_slicing"]
