"""The schedule IR: which rank runs which slice in which order. Never costs, tensors or processes."""

from terapipe.schedule.action import Action, Kind
from terapipe.schedule.graph import Graph
from terapipe.schedule.lower import lower
from terapipe.schedule.orders import FAMILIES, Family, build_schedule, schedules
from terapipe.schedule.schedule import Schedule
from terapipe.schedule.starts import Starts, Transfers, earliest_starts

__all__ = [
    "FAMILIES",
    "Action",
    "Family",
    "Graph",
    "Kind",
    "Schedule",
    "Starts",
    "Transfers",
    "build_schedule",
    "earliest_starts",
    "lower",
    "schedules",
]
