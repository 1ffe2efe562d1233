"""What a slice costs on one stage, and what a message costs between two ranks."""

from terapipe.cost.device import Device
from terapipe.cost.linear import LinearContextCost
from terapipe.cost.link import Link, Links, check_links, describe_links, find_link, read_links
from terapipe.cost.memory import MemoryModel
from terapipe.cost.model import CallableCost, CostModel, as_times
from terapipe.cost.profile import Profile
from terapipe.cost.roofline import RooflineCost
from terapipe.cost.share import StageShare
from terapipe.cost.table import TableCost
from terapipe.cost.transfer import TransferCost

__all__ = [
    "CallableCost",
    "CostModel",
    "Device",
    "LinearContextCost",
    "Link",
    "Links",
    "MemoryModel",
    "Profile",
    "RooflineCost",
    "StageShare",
    "TableCost",
    "TransferCost",
    "as_times",
    "check_links",
    "describe_links",
    "find_link",
    "read_links",
]
