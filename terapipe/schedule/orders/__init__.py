"""The order of actions on every rank, family by family."""

from terapipe.schedule.orders.build import build_schedule
from terapipe.schedule.orders.family import Family
from terapipe.schedule.orders.registry import FAMILIES, schedules

__all__ = ["FAMILIES", "Family", "build_schedule", "schedules"]
