"""The timings table that both back ends emit, and what it tells."""

from terapipe.timeline.budget import BUDGET
from terapipe.timeline.compute import check_contention
from terapipe.timeline.inputs import input_ends
from terapipe.timeline.match import match
from terapipe.timeline.memory import MEMORY_COLUMNS
from terapipe.timeline.path import name_blockers
from terapipe.timeline.sources import (
    EMULATED,
    EMULATED_EXTRAPOLATED,
    LINK_GIVEN,
    MEASURED,
    REPLAYED,
    SIMULATED,
    SIMULATED_EXTRAPOLATED,
    replayed,
)
from terapipe.timeline.step import Step
from terapipe.timeline.table import COLUMNS
from terapipe.timeline.timeline import Timeline

__all__ = [
    "BUDGET",
    "COLUMNS",
    "EMULATED",
    "EMULATED_EXTRAPOLATED",
    "LINK_GIVEN",
    "MEASURED",
    "MEMORY_COLUMNS",
    "REPLAYED",
    "SIMULATED",
    "SIMULATED_EXTRAPOLATED",
    "Step",
    "Timeline",
    "check_contention",
    "input_ends",
    "match",
    "name_blockers",
    "replayed",
]
