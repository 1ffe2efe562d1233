"""What a slice costs on one stage, and what a message costs between two ranks."""

from terapipe.cost.linear import LinearContextCost
from terapipe.cost.link import Link
from terapipe.cost.model import CallableCost, CostModel, as_times
from terapipe.cost.profile import Profile
from terapipe.cost.table import TableCost

__all__ = ["CallableCost", "CostModel", "LinearContextCost", "Link", "Profile", "TableCost", "as_times"]
