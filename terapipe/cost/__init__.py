"""What a slice costs on one stage, and what a message costs between two ranks."""

from terapipe.cost.device import Device
from terapipe.cost.linear import LinearContextCost
from terapipe.cost.link import Link
from terapipe.cost.memory import MemoryModel
from terapipe.cost.model import CallableCost, CostModel, as_times
from terapipe.cost.profile import Profile
from terapipe.cost.roofline import RooflineCost
from terapipe.cost.table import TableCost
from terapipe.cost.transfer import TransferCost

__all__ = [
    "CallableCost",
    "CostModel",
    "Device",
    "LinearContextCost",
    "Link",
    "MemoryModel",
    "Profile",
    "RooflineCost",
    "TableCost",
    "TransferCost",
    "as_times",
]
