"""The timings table that both back ends emit, and what it tells."""

from terapipe.timeline.budget import BUDGET
from terapipe.timeline.inputs import input_ends, name_blockers
from terapipe.timeline.timeline import (
    COLUMNS,
    EMULATED,
    EMULATED_EXTRAPOLATED,
    MEASURED,
    SIMULATED,
    SIMULATED_EXTRAPOLATED,
    Timeline,
)

__all__ = [
    "BUDGET",
    "COLUMNS",
    "EMULATED",
    "EMULATED_EXTRAPOLATED",
    "MEASURED",
    "SIMULATED",
    "SIMULATED_EXTRAPOLATED",
    "Timeline",
    "input_ends",
    "name_blockers",
]
