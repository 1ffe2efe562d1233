"""How sequences are cut into slices: the value, its notation, and the slicing DP."""

from terapipe.slicing.optimal import SlicingPlan, optimal_slicing, pipeline_latency_ms
from terapipe.slicing.value import MicrobatchSlices, Slicing, uniform_slicing

__all__ = [
    "MicrobatchSlices",
    "Slicing",
    "SlicingPlan",
    "optimal_slicing",
    "pipeline_latency_ms",
    "uniform_slicing",
]
